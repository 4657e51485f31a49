"""One rank of a job, run without memory: the model is built and cut, and trains for a few steps in a silent world."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from hyper_parallel.analysis.memory_log import BACKWARD, FORWARD, OPTIMIZER, Call, MemoryLog, Peak
from hyper_parallel.analysis.model_source import ModelSource, call_model, inputs_for
from hyper_parallel.analysis.rank_spy import RankSpy
from hyper_parallel.core.dtensor.comm_recorder import CommRecord, CommRecorder, asked_by
from hyper_parallel.core.dtensor.device_mesh import DeviceMesh, init_device_mesh
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.rank_questions import RankQuestions
from hyper_parallel.core.fully_shard.api import fully_shard
from hyper_parallel.core.shard.dispatching.dispatch import forget_plans
from hyper_parallel.core.tensor_parallel.parallelize import parallelize_module
from hyper_parallel.plans.roles import read_roles
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.membership import Member, as_member


@dataclass(frozen=True)
class Job:
    """What is to be trained, how it is split, and on what."""

    source: ModelSource
    degrees: Mapping[str, int]  # axes and their sizes, outermost first
    batch: int
    length: int
    plan: Any
    sequence_parallel: bool | None
    dtype: str | None
    recompute: bool
    optimizer: Any
    device: str
    steps: int

    @property
    def world_size(self) -> int:
        size = 1
        for degree in self.degrees.values():
            size *= degree
        return size


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

    def answers_of(self, rank: int) -> Any:
        """Equal for ranks that do alike: none, where the program asks for its rank itself."""
        return rank if self.rank_spy.lines else self.questions.answers_of(rank)


def run_rank(job: Job, rank: int) -> RankRun:
    """Build, cut and train as ``rank`` of the job's world."""
    platform = get_platform()
    member = Member(rank, job.world_size, platform.silent_group)
    log, rank_spy = MemoryLog(), RankSpy(member)
    with _by_itself(), as_member(member), platform.counted(log, job.device) as counter:
        mesh = init_device_mesh("cpu", tuple(job.degrees.values()), mesh_dim_names=tuple(job.degrees))
        with platform.building_without_memory():
            model, inputs = job.source.build(job.length)
            if job.dtype or job.source.dtype:
                model = platform.cast_model(model, str(job.dtype or job.source.dtype))
        num_parameters = sum(_num_elements(parameter) for parameter in platform.parameters_dict(model).values())
        _split(job, model, mesh)
        if inputs is None:
            inputs = inputs_for(model, job.batch, job.length)
        optimizer = (
            None if job.optimizer in (None, "none") else platform.make_optimizer(job.optimizer, model, job.device)
        )
        parameters = list(platform.parameters_dict(model).values())
        counter.mark(parameters, "parameters")
        counter.mark(platform.buffers_of(model), "buffers")
        counter.mark(_tensors_in(inputs), "inputs")
        if "dp_shard" not in job.degrees:  # whose gradients are marked when they are there: hooks would make it wait
            platform.watch_gradients(model, lambda gradient: counter.mark([gradient], "gradients"))
        training = _Training(job, model, inputs, optimizer, parameters, mesh, log, counter)
        with platform.watch_modules(model, log):
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
            RankQuestions(mesh),
            rank_spy,
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

    def __init__(
        self,
        job: Job,
        model: Any,
        inputs: Any,
        optimizer: Any,
        parameters: list[Any],
        mesh: DeviceMesh,
        log: MemoryLog,
        counter: Any,
    ) -> None:
        self._model, self._inputs, self._optimizer, self._parameters = model, inputs, optimizer, parameters
        self._log, self._counter = log, counter
        self._mesh = mesh
        self._axes = _axes_by_ranks(mesh)
        sums = job.degrees.get("dp", 1) > 1 and "dp_shard" not in job.degrees
        self._sums_over = mesh.get_group("dp") if sums else None

    def step(self) -> _Step:
        platform, log = get_platform(), self._log
        gc.collect()
        log.begin_counting()
        places: list[tuple[str, Call]] = []
        with ExitStack() as stack:
            stack.callback(platform.observe_collectives(lambda *_: places.append(log.place())))
            recorder = stack.enter_context(CommRecorder())
            log.begin_phase(FORWARD)
            loss = call_model(self._model, self._inputs)
            log.begin_phase(BACKWARD)
            loss.backward()
            del loss
            gradients = (parameter.grad for parameter in self._parameters)
            self._counter.mark([_local(one) for one in gradients if one is not None], "gradients")
            if self._sums_over is not None:
                with asked_by("sum of gradients over dp"):
                    for parameter in self._parameters:
                        if parameter.grad is not None:
                            platform.all_reduce(_local(parameter.grad), self._sums_over)
            log.begin_phase(OPTIMIZER)
            if self._optimizer is not None:
                self._optimizer.step()
                self._counter.mark(platform.optimizer_state_of(self._optimizer), "optimizer state")
            for parameter in self._parameters:
                parameter.grad = None
        log.begin_phase(FORWARD)
        by_kind, by_module = _breakdown(log)
        collectives = [
            (phase, call.path, self._axes.get(record.ranks) or _listed(record.ranks), record)
            for (phase, call), record in zip(places, recorder.records, strict=True)
        ]
        return _Step(log.peak, by_kind, by_module, dict(log.flops_by_phase), collectives)


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
    names = mesh.mesh_dim_names or ()
    found: dict[tuple[int, ...], str] = {}
    for count in range(1, len(names) + 1):
        for axes in combinations(names, count):
            found.setdefault(tuple(sorted(mesh.line(axes))), " x ".join(axes))
    return found


def _split(job: Job, model: Any, mesh: DeviceMesh) -> None:
    if "tp" in job.degrees:
        plan = job.plan
        if plan is None:
            plan = job.source.plan_for(model, job.sequence_parallel)
        elif callable(plan):
            plan = plan(model)
        parallelize_module(model, mesh if mesh.ndim == 1 else mesh["tp"], plan, src_data_rank=None)
    if job.recompute:
        _recompute_blocks(model)
    if "dp_shard" in job.degrees:
        data = mesh["dp", "dp_shard"] if "dp" in job.degrees else mesh["dp_shard"]
        fully_shard(model, mesh=data, units="auto")


def _recompute_blocks(model: Any) -> None:
    platform = get_platform()
    modules = dict(platform.get_cells_and_names(model))
    blocks = read_roles(model, ()).blocks
    outermost = [path for path in blocks if not any(path.startswith(f"{other}.") for other in blocks)]
    if not outermost:
        raise ValueError("recompute: the model has no list of blocks to compute again, and no other unit is known")
    for path in outermost:
        parent, _, name = path.rpartition(".")
        setattr(modules[parent], name, platform.ckpt_wrapper(modules[path]))


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
