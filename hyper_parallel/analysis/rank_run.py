"""One rank of a job, run without memory: the model is built and cut, and trains for a few steps in a silent world."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from hyper_parallel.analysis.memory_log import BACKWARD, FORWARD, OPTIMIZER, Call, MemoryLog, Peak
from hyper_parallel.analysis.model_source import ModelSource, inputs_for, loss_of_inputs
from hyper_parallel.analysis.rank_spy import RankSpy
from hyper_parallel.core.dtensor.comm_recorder import CommRecord, CommRecorder
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.rank_questions import RankQuestions
from hyper_parallel.core.pipeline_parallel.action import COMPUTED, Action, Kind
from hyper_parallel.core.shard.dispatching.dispatch import forget_plans
from hyper_parallel.parallel.degrees import Degrees
from hyper_parallel.parallel.parallel import Parallel
from hyper_parallel.parallel.parallelize import parallelize
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.membership import Member, as_member


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be trained, how it is split, and on what."""

    source: ModelSource
    degrees: Degrees  # with a number for each axis
    batch: int  # of this rank: a place along dp_replicate and dp_shard
    length: int
    microbatches: int = 1
    schedule: Any = "1f1b"
    stages_per_rank: int | None = None
    stages: Sequence[int] | None = None
    balance: str | Sequence[float] = "time"
    plan: Any = None
    sequence_parallel: bool | None = None
    keep_whole: Sequence[str] = ()
    attention: str = "auto"
    order: str = "contiguous"
    dtype: str | None = None
    precision: Any = None
    recompute: bool | str | Callable[..., Any] = False
    offload: bool = False
    split_by: Callable[[Any], Parallel] | None = None  # instead of parallelize with the options above
    clip_norm: float | None = None
    optimizer: Any = "adamw"
    device: str = "cpu"
    steps: int = 2

    @property
    def world_size(self) -> int:
        size = 1
        for degree in self.degrees.sizes.values():
            size *= degree
        return size

    def split(self, model: Any, inputs: Any) -> Parallel:
        """The model under the degrees, by the call that a program makes."""
        if self.split_by is not None:
            return self.split_by(model)
        recompute = "full" if self.recompute is True else self.recompute or None
        return parallelize(
            model,
            self.degrees,
            plan=self.plan,
            sequence_parallel=self.sequence_parallel is not False,
            keep_whole=self.keep_whole,
            microbatches=self.microbatches,
            schedule=self.schedule,
            stages_per_rank=self.stages_per_rank,
            stages=self.stages,
            balance=self.balance,
            attention=self.attention,
            order=self.order,
            precision=self.precision,
            recompute=recompute,
            offload=self.offload,
            loss=loss_of_inputs(model, inputs),
        )


@dataclass
class RankRun:
    """What one rank did in its last step, and the highest peak of all steps."""

    peak: Peak
    by_kind: dict[str, int]
    by_module: dict[str, dict[str, int]]  # of activations and temporaries
    resting_bytes: int
    flops: dict[str, int]
    collectives: list[tuple[str, str, str, CommRecord]]  # (phase, module, axes, record)
    dtype: str
    num_parameters: int
    num_local_parameters: int
    questions: RankQuestions = field(repr=False)
    rank_spy: RankSpy
    mesh: DeviceMesh = field(repr=False)

    def answers_of(self, rank: int) -> Any:
        """Equal for ranks that do alike: none, where the program asks for its rank itself; of one stage."""
        if self.rank_spy.lines:
            return rank
        place = dict(zip(self.mesh.mesh_dim_names or (), self.mesh.coordinate_of(rank), strict=True))
        return place.get("pp"), self.questions.answers_of(rank)


def run_rank(job: Job, rank: int) -> RankRun:
    """Build, cut and train as ``rank`` of the job's world."""
    platform = get_platform()
    member = Member(rank, job.world_size, platform.silent_group)
    log, rank_spy = MemoryLog(), RankSpy(member)
    with _by_itself(), as_member(member), platform.counted(log, job.device) as counter:
        with platform.building_without_memory():
            model, inputs = job.source.build(job.length)
            if job.dtype or job.source.dtype:
                model = platform.cast_model(model, str(job.dtype or job.source.dtype))
        num_parameters = sum(_num_elements(parameter) for parameter in platform.parameters_dict(model).values())
        if inputs is None:
            inputs = inputs_for(model, job.batch, job.length)
        run = job.split(model, inputs)
        optimizer = (
            None if job.optimizer in (None, "none") else platform.make_optimizer(job.optimizer, model, job.device)
        )
        parameters = run.parameters()
        counter.mark(parameters, "parameters")
        counter.mark(platform.buffers_of(model), "buffers")
        counter.mark(_tensors_in(inputs), "inputs")
        sizes = run.degrees.sizes
        is_alone = sizes["dp_replicate"] * sizes["dp_shard"] * sizes["cp"] == 1
        if is_alone:  # else marked when all are there: hooks would wait
            platform.watch_gradients(model, lambda gradient: counter.mark([gradient], "gradients"))
        training = _Training(job, run, inputs, optimizer, log, counter)
        with platform.watch_modules(model, log):
            if (
                job.offload and job.device != "cpu"
            ):  # what lies on the host is known behind a step, in which blocks pack
                training.step()
                counter.to_host([_local(one) for one in parameters])
                counter.to_host(platform.optimizer_state_of(optimizer) if optimizer is not None else ())
            steps = [training.step() for _ in range(job.steps)]
        last, highest = steps[-1], max(steps, key=lambda step: step.peak.num_bytes)
        return RankRun(
            highest.peak,
            highest.by_kind,
            highest.by_module,
            log.live_bytes,
            last.flops,
            last.collectives,
            platform.dtype_name(parameters[0].dtype) if parameters else "",
            num_parameters,
            sum(_num_elements(_local(parameter)) for parameter in parameters),
            RankQuestions(run.mesh),
            rank_spy,
            run.mesh,
        )


@dataclass
class _Step:
    peak: Peak
    by_kind: dict[str, int]
    by_module: dict[str, dict[str, int]]
    flops: dict[str, int]
    collectives: list[tuple[str, str, str, CommRecord]]


class _Training:
    """The loop that a program would have, with the log told of its phases."""

    def __init__(self, job: Job, run: Parallel, inputs: Any, optimizer: Any, log: MemoryLog, counter: Any) -> None:
        self._run, self._inputs, self._optimizer, self._clip = run, inputs, optimizer, job.clip_norm
        self._log, self._counter = log, counter
        self._axes = _axes_by_ranks(run.mesh)
        if run.pipeline is None:
            _tell_phases(run._loss, log)
        else:
            run.pipeline.observe(functools.partial(_tell_phase, log))

    def step(self) -> _Step:
        platform, log, run = get_platform(), self._log, self._run
        gc.collect()
        log.begin_counting()
        places: list[tuple[str, Call]] = []
        with ExitStack() as stack:
            stack.callback(platform.observe_collectives(lambda *_: places.append(log.place())))
            recorder = stack.enter_context(CommRecorder())
            log.begin_phase(FORWARD)
            if isinstance(self._inputs, Mapping):
                run.forward_backward(**self._inputs)
            else:
                run.forward_backward(*self._inputs)
            self._counter.mark([_local(one) for one in run.gradients() if one is not None], "gradients")
            log.begin_phase(OPTIMIZER)
            if self._clip is not None:
                run.clip_grad_norm_(self._clip)
            if self._optimizer is not None:
                self._optimizer.step()
                self._counter.mark(platform.optimizer_state_of(self._optimizer), "optimizer state")
            run.zero_grad()
        log.begin_phase(FORWARD)
        by_kind, by_module = _breakdown(log)
        collectives = [
            (phase, call.path, self._axes.get(record.ranks) or _listed(record.ranks), record)
            for (phase, call), record in zip(places, recorder.records, strict=True)
        ]
        return _Step(log.peak, by_kind, by_module, dict(log.flops_by_phase), collectives)


def _tell_phase(log: MemoryLog, action: Action) -> None:
    """The phase of an action of a pipeline; messages belong to what came before."""
    if action.kind is Kind.F:
        log.begin_phase(FORWARD)
    elif action.kind in COMPUTED:
        log.begin_phase(BACKWARD)


def _tell_phases(loss: Any, log: MemoryLog) -> None:
    """Where the loss of a micro-batch is known its forward ends: what the step does until the next is backward."""

    def told(original: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any) -> Any:
            log.begin_phase(FORWARD)
            found = original(*args)
            log.begin_phase(BACKWARD)
            return found

        return forward

    for name in ("share", "sum_and_count"):
        if hasattr(loss, name):
            setattr(loss, name, told(getattr(loss, name)))


def _breakdown(log: MemoryLog) -> tuple[dict[str, int], dict[str, dict[str, int]]]:
    by_kind: dict[str, int] = {}
    by_module: dict[str, dict[str, int]] = {"activations": {}, "temporaries": {}}
    for allocation in log.alive_at_peak():
        kind = allocation.resolved_kind()
        by_kind[kind] = by_kind.get(kind, 0) + allocation.num_bytes
        if kind in by_module:
            paths = by_module[kind]
            paths[allocation.call.path] = paths.get(allocation.call.path, 0) + allocation.num_bytes
    return by_kind, by_module


def _listed(ranks: tuple[int, ...]) -> str:
    return f"ranks {','.join(map(str, ranks))}"


def _axes_by_ranks(mesh: DeviceMesh) -> dict[tuple[int, ...], str]:
    """The name of the axes along which ranks lie in line, fewest axes first."""
    names = [name for name in mesh.mesh_dim_names or () if mesh.size(name) > 1]
    found: dict[tuple[int, ...], str] = {}
    for count in range(1, len(names) + 1):
        for axes in combinations(names, count):
            found.setdefault(tuple(sorted(mesh.line(axes))), " x ".join(axes))
    return found


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _num_elements(tensor: Any) -> int:
    count = 1
    for size in tensor.shape:
        count *= size
    return count


def _tensors_in(inputs: Any) -> list[Any]:
    values = inputs.values() if isinstance(inputs, Mapping) else inputs
    return [value for value in values if get_platform().is_tensor(value)]


@contextmanager
def _by_itself() -> Iterator[None]:
    """Memory is freed when the last reference goes, at the same place in every run; cycles between the steps.

    What is there already, a million objects where a few libraries are loaded, is not looked at again.
    """
    was_on, is_ours = gc.isenabled(), gc.get_freeze_count() == 0
    gc.disable()
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        forget_plans()  # those of a rank that is no more
        if is_ours:
            gc.unfreeze()
        if was_on:
            gc.enable()
