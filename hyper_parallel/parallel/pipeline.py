"""The model of a run in stages: how it is cut, its tables, and a step through them."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.fully_shard.hsdp_module import HSDPModule, unit_of
from hyper_parallel.core.pipeline_parallel.action import Action, Kind, Value
from hyper_parallel.core.pipeline_parallel.prepare import prepare
from hyper_parallel.core.pipeline_parallel.runtime.agreement import demand_same_table
from hyper_parallel.core.pipeline_parallel.runtime.boundary import TensorSpec, describe
from hyper_parallel.core.pipeline_parallel.runtime.messages import Messages
from hyper_parallel.core.pipeline_parallel.runtime.overlap import overlap_for
from hyper_parallel.core.pipeline_parallel.runtime.run_table import TableRun
from hyper_parallel.core.pipeline_parallel.runtime.sharded_stage import ShardedStages, units_of_stages
from hyper_parallel.core.pipeline_parallel.runtime.shared_gradients import SharedGradients
from hyper_parallel.core.pipeline_parallel.runtime.stage_work import StageWork
from hyper_parallel.core.pipeline_parallel.runtime.weight_gradients import split_backward
from hyper_parallel.core.pipeline_parallel.stages.grad_norm import clip_grad_norm_of_stages
from hyper_parallel.core.pipeline_parallel.stages.losses_of_blocks import with_loss
from hyper_parallel.core.pipeline_parallel.stages.stage_model import StageModel
from hyper_parallel.core.pipeline_parallel.table import Table
from hyper_parallel.core.pipeline_parallel.tables import forward_only
from hyper_parallel.parallel.losses import GivenLoss, LabelledLoss
from hyper_parallel.parallel.meshes import Meshes
from hyper_parallel.parallel.micro_batches import MicroBatch
from hyper_parallel.parallel.part_runs import Beside, Draws, Objective, weighted
from hyper_parallel.parallel.sequence_inputs import shard_sequences
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.membership import current_member

__all__ = ["Pipeline", "in_silent_world"]

_platform = get_platform()


class Pipeline:
    """The stages of this rank, and what runs parts of a batch through all stages.

    Every rank of a pipeline is given the same rows: later stages make masks and positions of them by themselves.
    """

    def __init__(
        self,
        stages: StageModel,
        table: Table,
        meshes: Meshes,
        loss: GivenLoss | LabelledLoss,
        stream: TensorSpec | None = None,
        table_for_rows: Callable[[int], Table] | None = None,
        **options: Any,
    ) -> None:
        """``stream``: how what crosses is distributed, for a world in which nobody tells; ``options``: of prepare.

        ``table_for_rows``: the table of the first batch, where nobody said how many microbatches; of the same stages.
        """
        self.stages, self._meshes, self._loss = stages, meshes, loss
        self._pp: DeviceMesh = meshes.world["pp"]
        self._group, self._place = self._pp.get_group(), self._pp.get_local_rank()
        model, split = stages.model, stages.split
        is_sharded = isinstance(model, HSDPModule)
        self._sharded = ShardedStages([model], units_of_stages(model, split, stages.stages)) if is_sharded else None
        self._options = {**options, "sharded": is_sharded}
        self._table_for_rows = table_for_rows
        self._take(table)
        self._stream = stream
        self._observe: Callable[[Action], None] | None = None
        self._messages = Messages(self._group, meshes.compute, self._guess if in_silent_world() else None)
        holders = {
            name: [table.stages.rank_of[stage] for stage in holding]
            for name, holding in split.shared.items()
            if name in split.order
        }
        self._shared = SharedGradients(holders, stages.named_parameters, self._group)
        self._runs: dict[Table, TableRun] = {}
        self._parts: Sequence[MicroBatch] = ()
        self._values: list[dict[str, Any]] = []
        self._device: Any = None
        self._has_memory = False  # of the model, once it was seen
        self._has_loss = False  # that was looked at
        self._objective: Any = None
        self._beside: Beside | None = None
        self._shares: list[tuple[Any, ...]] = []
        self._draws: Any = None
        self._found: dict[int, tuple[Any, ...]] = {}

    def _take(self, table: Table) -> None:
        #: What every rank does in a step, with its messages.
        self.table = prepare(table, **self._options)
        if any(step.kind is Kind.I for _, _, action in self.table for step in action.steps):
            split_backward(self.stages.model)

    def settle_microbatches(self, rows: int) -> int:
        """How many parts a batch with ``rows`` on this rank has: as was said, or by the first batch.

        forward: where nobody said it an all-gather of the numbers of rows over all ranks, in the first step.
        """
        if self._table_for_rows is not None:
            mesh = self._meshes.world
            shares: list[Any] = [rows] * mesh.size()
            if mesh.size() > 1 and not in_silent_world():
                _platform.all_gather_object(shares, rows, mesh.get_group(tuple(range(mesh.ndim))))
            table = self._table_for_rows(max(shares))
            if table.microbatches != self.table.microbatches:
                self._take(table)
            self._table_for_rows = None
        return self.table.microbatches

    @functools.cached_property
    def dtype(self) -> Any:
        """In which losses travel: also ranks that do not have them must know it."""
        is_wide = any("float64" in dtype for dtype in self.stages.split.dtypes)
        return _platform.str_to_dtype("float64" if is_wide else "float32")

    @property
    def nothing(self) -> Any:
        """The loss of a rank without the last stage."""
        return _platform.zeros((), self.dtype, self._device)

    # ---------------------------------------------------------------- a step

    def run(
        self,
        parts: Sequence[MicroBatch],
        objective: Objective,
        draws: Draws,
        backward: bool,
        beside: Beside | None = None,
    ) -> list[tuple[Any, ...]]:
        """See :class:`PartRuns`: results are on ranks with the last stage, and with stages that have losses beside.

        forward and backward: messages between neighbouring stages, and the model's collectives.
        """
        if backward:
            self._refuse_unfrozen()
        self._values = [shard_sequences(part.values, self._meshes.compute) for part in parts]
        self._parts, self._objective, self._draws, self._found = parts, objective, draws, {}
        self._beside, self._shares = beside, []
        table = self.table if backward else self._table_of_forwards(len(parts))
        signatures = [_signature(values, self.stages.model) for values in self._values]
        like = next(value for value in parts[0].values.values() if _platform.is_tensor(value))
        before = self._shared.set_aside() if backward else {}
        try:
            self._device = self._device_for(like)
            self._run_of(table).run(signatures, self._device)
            if backward:
                self._shared.add_up(before)
            return [*(self._found[number] for number in sorted(self._found)), *self._shares]
        finally:
            self._values, self._parts, self._objective, self._draws, self._found = [], (), None, None, {}
            self._beside, self._shares = None, []

    @functools.cached_property
    def _frozen(self) -> list[tuple[str, Any]]:
        named = self.stages.named_parameters()
        return [(name, one) for name, one in named.items() if name not in self.stages.split.order]

    def _refuse_unfrozen(self) -> None:
        """Messages, norms and tied gradients are of what was trained when the model was cut."""
        for name, parameter in self._frozen:
            if _platform.requires_grad(parameter):
                raise ValueError(
                    f"forward_backward: '{name}' was frozen when the pipeline was made, and is not any more: freeze "
                    "parameters behind parallelize, not before, or build the pipeline again"
                )

    def _run_of(self, table: Table) -> TableRun:
        if table not in self._runs:
            if not in_silent_world():
                demand_same_table(table, self._group, [len(paths) for paths in self.stages.split.stages])
            last = table.stages.last
            work = {
                stage: StageWork(functools.partial(self._call, stage), stage == last) for stage in self.stages.stages
            }
            travels = bool(self._meshes.expert_axes) and not in_silent_world()
            overlap = overlap_for(table) if travels else None
            self._runs[table] = TableRun(table, self._place, work, self._messages, self._sharded, overlap)
            self._runs[table].observe = self._observe
        return self._runs[table]

    def observe(self, told: Callable[[Action], None]) -> None:
        """Call ``told`` with each action of later steps before it is done."""
        self._observe, self._runs = told, {}

    def _device_for(self, like: Any) -> Any:
        """Where messages are received: with the inputs, or nowhere in a model without memory."""
        if not self._has_memory:
            own = next(iter(self.stages.named_parameters().values()), None)
            if own is not None and _platform.has_no_memory(own):
                return own.device
            self._has_memory = True
        return like.device

    @functools.lru_cache(maxsize=8)  # noqa: B019 a pipeline lives as long as its program
    def _table_of_forwards(self, num_parts: int) -> Table:
        options = {name: value for name, value in self._options.items() if name in ("batched", "sharded", "keep")}
        return prepare(forward_only(self.table.stages, num_parts), **options)

    def _call(self, stage: int, number: int, received: tuple[Any, ...]) -> list[Any]:
        run = functools.partial(self.stages.run, stage, received[0] if received else None)
        part, values = self._parts[number], self._values[number]
        with self._draws(part):
            if stage < self.table.stages.last:
                return [self._with_losses(number, run(**self._loss.inputs(values)))]
            found = weighted(self._objective(run, number, values), part)
        if found and not self._has_loss:
            self._look_at(found[0])
        self._found[number] = tuple(map(_platform.detached, found))
        return list(found[:1])

    def _look_at(self, loss: Any) -> None:
        """Warn if the first loss is no number, for which pipelines have a reason of their own."""
        self._has_loss = True
        prologue = self.stages.split.prologue
        if prologue and not _platform.has_no_memory(loss) and np.isnan(_platform.tensor_to_numpy(loss)).any():
            warnings.warn(
                f"pipeline: the first loss is NaN. So it is for models that use what runs before their blocks "
                f"({', '.join(prologue)}) beside the stream, without gradients: other stages have NaN in its place. If "
                "that is so, use tp, dp_shard or cp for this model",
                RuntimeWarning,
                stacklevel=2,
            )

    def _with_losses(self, number: int, stream: Any) -> Any:
        """What a stage before the last hands on, with the share of its blocks' auxiliary losses in the gradient."""
        losses = self.stages.losses
        if self._beside is None or not losses:
            return stream
        (share,) = weighted((self._beside(number, losses),), self._parts[number])
        self._shares.append((_platform.detached(share),))
        return with_loss(stream, share)

    def _guess(self, value: Value) -> list[TensorSpec]:
        """What would come from the stage before, where nobody sends anything: blocks give what they are given."""
        values = self._loss.inputs(self._values[value.microbatch])
        with _platform.no_grad():
            spec = describe(self.stages.peek(value.taker, **values))
        like = spec if self._stream is None else self._stream
        unit = unit_of(self.stages.model)
        policy = None if unit is None else unit.mp_policy.param_dtype
        dtype = like.dtype if policy is None else _platform.dtype_name(policy)
        return [TensorSpec(spec.shape, dtype, _platform.is_recording(), like.mesh_axes, like.shard_axes)]

    # ---------------------------------------------------------------- behind a step

    def clip_grad_norm_(self, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Any:
        """Scale the gradients of all stages; see :func:`clip_grad_norm_of_stages`."""
        return clip_grad_norm_of_stages(
            self.stages.named_parameters(),
            max_norm,
            norm_type,
            error_if_nonfinite,
            order=self.stages.split.order,
            stages=self._pp,
        )

    def settle_buffers(self) -> None:
        """Let all ranks have the buffers around the blocks of the stage that computes with them: others only make masks
        and positions of what runs before the blocks, and run nothing behind them.

        forward: a broadcast of each such buffer, from the first stage's rank or the last one's; no backward.
        """
        split, ranks = self.stages.split, _platform.get_process_group_ranks(self._group)
        parameters = _platform.named_state_parameters(self.stages.model)
        for name, buffer in sorted(_platform.get_model_state_dict(self.stages.model, options=None).items()):
            path = name.rpartition(".")[0]
            if name in parameters or split.stage_of(path) is not None or not _platform.is_tensor(buffer):
                continue
            if _platform.has_no_memory(buffer):
                continue
            stage = 0 if path in split.before else self.table.stages.last
            rank = ranks[self.table.stages.rank_of[stage]]
            value = _platform.broadcast(_platform.copied(_platform.detached(buffer)), rank, self._group)
            _platform.load_into_param(buffer, value)

    def outputs(self, batch: dict[str, Any], of_output: Callable[[Any], Any]) -> Any:
        """The model's outputs for a batch, without gradient; None on ranks without the last stage."""
        kept: list[Any] = []

        def objective(model: Callable[..., Any], number: int, values: dict[str, Any]) -> tuple[Any, ...]:
            kept.append(of_output(model(**values)))
            return ()

        part = MicroBatch(batch, 0, 1)
        with _platform.no_grad():
            self.run([part], objective, lambda _: nullcontext(), backward=False)
        return kept[0] if kept else None


def in_silent_world() -> bool:
    """Whether this rank is alone in a world where nobody answers."""
    member = current_member()
    return member is not None and member.make_group is _platform.silent_group


def _signature(values: dict[str, Any], model: Any) -> Hashable:
    """What decides on the shapes between stages: the same on all ranks of a pipeline."""
    shapes = tuple(
        (name, tuple(value.shape), _platform.dtype_name(value.dtype)) if _platform.is_tensor(value) else (name,)
        for name, value in values.items()
    )
    return shapes, _platform.is_recording(), bool(model.training)
