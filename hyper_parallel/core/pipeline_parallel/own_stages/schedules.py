"""Schedules for stages of your own: GPipe, 1F1B, interleaved 1F1B, or any table."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.fully_shard.hsdp_module import HSDPModule
from hyper_parallel.core.pipeline_parallel.action import Action, Kind
from hyper_parallel.core.pipeline_parallel.folding import overlap_neighbours
from hyper_parallel.core.pipeline_parallel.own_stages.batch_dims import merge_outputs, split_arguments
from hyper_parallel.core.pipeline_parallel.own_stages.meta_step import MetaStep, MetaStepType, kind_of, meta_step_of
from hyper_parallel.core.pipeline_parallel.own_stages.pipeline_stage import PipelineStage
from hyper_parallel.core.pipeline_parallel.prepare import prepare
from hyper_parallel.core.pipeline_parallel.runtime.agreement import demand_same_table
from hyper_parallel.core.pipeline_parallel.runtime.boundary import without_graph
from hyper_parallel.core.pipeline_parallel.runtime.messages import Messages
from hyper_parallel.core.pipeline_parallel.runtime.overlap import overlap_for
from hyper_parallel.core.pipeline_parallel.runtime.run_table import TableRun
from hyper_parallel.core.pipeline_parallel.runtime.sharded_stage import ShardedStages
from hyper_parallel.core.pipeline_parallel.runtime.shared_gradients import SharedGradients
from hyper_parallel.core.pipeline_parallel.runtime.stage_work import StageWork
from hyper_parallel.core.pipeline_parallel.runtime.weight_gradients import split_backward
from hyper_parallel.core.pipeline_parallel.table import Table
from hyper_parallel.core.pipeline_parallel.tables import forward_only, make_table
from hyper_parallel.platform import get_platform

__all__ = ["PipelineContext", "PipelineSchedule", "Schedule1F1B", "ScheduleGPipe", "ScheduleInterleaved1F1B"]

_platform = get_platform()


@dataclass(frozen=True)
class PipelineContext:
    """What a custom function may use: the schedule, the arguments of the microbatch, and ``default()``, which does the
    step as it would be done."""

    schedule: PipelineSchedule
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    default: Callable[[], None]


class PipelineSchedule:
    """Stages of this rank under a table, which is the same on all ranks.

    ``args_batch_dim``, ``kwargs_batch_dim``: a :class:`BatchDimSpec` for each argument of :meth:`run`, by default 0.
    ``output_concat_dim``: the dim along which outputs of the microbatches are put together, by default 0.
    """

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        table: Table,
        args_batch_dim: Sequence[Any] | None = None,
        kwargs_batch_dim: Mapping[str, Any] | None = None,
        output_concat_dim: Any = None,
    ) -> None:
        own = [stages] if isinstance(stages, PipelineStage) else list(stages)
        self.stages: dict[int, PipelineStage] = {stage.stage_index: stage for stage in own}
        self._group = own[0].group
        ranks = _platform.get_process_group_ranks(self._group)
        self._place = ranks.index(_platform.get_rank())
        self._dims = args_batch_dim, kwargs_batch_dim, output_concat_dim
        self._check(own, table, ranks)
        models = [stage.submodule for stage in own]
        units = {
            index: list(stage.submodule._units(True))
            for index, stage in self.stages.items()
            if isinstance(stage.submodule, HSDPModule)
        }
        if units and len(units) < len(own):
            raise ValueError(f"{type(self).__name__}: fully_shard all stages of a rank, or none; {own} are mixed")
        self._sharded = ShardedStages(models, units) if units else None
        #: What every rank does in a step, with its messages.
        self.table = prepare(table, sharded=bool(units))
        self._forwards = prepare(forward_only(table.stages, table.microbatches), sharded=bool(units))
        if any(step.kind is Kind.I for _, _, action in self.table for step in action.steps):
            for model in models:
                split_backward(model)
        self._messages = Messages(self._group, own[0].mesh)
        self._shared = self._shared_parameters(table)
        self._is_shared_alike = False
        self._instead: dict[Kind, Callable[[MetaStep, PipelineContext], None]] = {}
        self._runs: dict[Table, TableRun] = {}
        self._parts: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self._found: dict[int, tuple[Any, ...]] = {}

    def _check(self, own: Sequence[PipelineStage], table: Table, ranks: Sequence[int]) -> None:
        name = type(self).__name__
        if len({(one.stage_num, one.dyn_shape, one.has_backward) for one in own}) > 1:
            raise ValueError(f"{name}: the stages of a rank have the same stage_num, dyn_shape and has_backward; {own}")
        if own[0].stage_num != table.stages.num_stages or table.num_ranks != len(ranks):
            raise ValueError(
                f"{name}: {own[0].stage_num} stages, and its table has {table.stages.num_stages} on {table.num_ranks} "
                f"ranks; the group of the stages has {len(ranks)}"
            )
        wanted = table.stages.stages_of(self._place)
        if tuple(sorted(self.stages)) != tuple(sorted(wanted)) or len(own) != len(self.stages):
            raise ValueError(
                f"{name}: rank {_platform.get_rank()} gives the stages {[one.stage_index for one in own]}, and the "
                f"table has {list(wanted)} there"
            )

    def _shared_parameters(self, table: Table) -> SharedGradients:
        holders: dict[str, list[int]] = {}
        parameters: dict[str, Any] = {}
        for stage in self.stages.values():
            for name, (parameter, stages) in stage.shared_names().items():
                if parameters.setdefault(name, parameter) is not parameter:
                    raise ValueError(
                        f"{type(self).__name__}: stages {stages} of one rank share a parameter; give both the same one"
                    )
                holders[name] = [table.stages.rank_of[one] for one in stages]
        return SharedGradients(holders, lambda: parameters, self._group)

    # ---------------------------------------------------------------- a step

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """A step: forward and backward of all microbatches; what the last stage gives on its rank, None on others.

        Positional arguments go to the first stage, named ones to the stages of the rank where they are given. Gradients
        are sums over the microbatches of what the last stage gives first: divide a mean by their number. Inside of
        ``no_grad``, or with stages that have no backward, forwards only.

        forward and backward: messages between neighbouring stages, and the collectives of the modules.
        """
        first = next(iter(self.stages.values()))
        if 0 in self.stages and not args and not kwargs:
            raise ValueError(f"{type(self).__name__}.run: this rank has the first stage; give it the batch")
        num_parts = self.table.microbatches
        args_dims, kwargs_dims, output_dims = self._dims
        given = args if 0 in self.stages else ()
        self._parts = split_arguments(given, kwargs, num_parts, args_dims if given else None, kwargs_dims)
        if not first.dyn_shape and not _are_alike(self._parts):
            raise ValueError(
                f"{type(self).__name__}.run: {num_parts} microbatches of different sizes; give a batch that divides by "
                "them, or PipelineStage(..., dyn_shape=True) on every rank"
            )
        backward = first.has_backward and _platform.is_recording()
        if first.dyn_shape:
            self._messages.forget_specs()
        signatures = [number if first.dyn_shape else 0 for number in range(num_parts)]
        if not self._is_shared_alike:
            self._shared.spread_values()
            self._is_shared_alike = True
        before = self._shared.set_aside() if backward else {}
        self._found = {}
        try:
            run = self._run_of(self.table if backward else self._forwards)
            run.run([(one, backward) for one in signatures], self._device())
            if backward:
                self._shared.add_up(before)
            found = [self._found[number] for number in sorted(self._found)]
            return merge_outputs(found, output_dims) if found else None
        finally:
            self._parts, self._found = [], {}

    def _device(self) -> Any:
        stage = next(iter(self.stages.values()))
        if stage.device is not None:
            return stage.device
        like = next(iter(_platform.parameters_dict(stage.submodule).values()), None)
        if like is None:
            like = next((one for one in self._parts[0][0] if _platform.is_tensor(one)), None)
        return None if like is None else like.device

    def _run_of(self, table: Table) -> TableRun:
        if table not in self._runs:
            demand_same_table(table, self._group)
            work = {
                index: StageWork(functools.partial(self._call, stage), stage.is_last_stage)
                for index, stage in self.stages.items()
            }
            instead = {kind: functools.partial(self._custom, function) for kind, function in self._instead.items()}
            self._runs[table] = TableRun(
                table, self._place, work, self._messages, self._sharded, overlap_for(table), instead
            )
        return self._runs[table]

    def _call(self, stage: PipelineStage, number: int, received: tuple[Any, ...]) -> list[Any]:
        args, kwargs = self._parts[number]
        given = stage.submodule(*(args if stage.is_first_stage else received), **kwargs)
        outputs = tuple(given) if isinstance(given, (tuple, list)) else (given,)
        if not stage.is_last_stage:
            wrong = [type(one).__name__ for one in outputs if not _platform.is_tensor(one)]
            if wrong:
                raise TypeError(f"{stage} gives a {wrong[0]}; tensors, or tuples of them, go to the next stage")
            return list(outputs)
        self._found[number] = tuple(without_graph(one) if _platform.is_tensor(one) else one for one in outputs)
        loss = outputs[0]
        return [loss.sum() if loss.ndim else loss]

    # ---------------------------------------------------------------- looking at it, and changing it

    @property
    def exec_order(self) -> dict[int, list[MetaStep]]:
        """The steps of each rank, by its place in the group."""
        return {place: list(map(meta_step_of, actions)) for place, actions in enumerate(self.table.actions)}

    def build_exec_order(self) -> dict[int, list[MetaStep]]:
        """See :attr:`exec_order`."""
        return self.exec_order

    def register_custom_function(
        self, meta_type: MetaStepType, function: Callable[[MetaStep, PipelineContext], None]
    ) -> None:
        """Call ``function(step, context)`` in place of every step of that type; ``context.default()`` does the step."""
        self._instead[kind_of(meta_type)] = function
        self._runs = {}

    def _custom(
        self, function: Callable[[MetaStep, PipelineContext], None], action: Action, default: Callable[[], None]
    ) -> None:
        args, kwargs = ((), {}) if action.microbatch is None else self._parts[action.microbatch]
        function(meta_step_of(action), PipelineContext(self, args, kwargs, default))


class _Named(PipelineSchedule):
    """A schedule by name."""

    _name = ""
    _overlaps = False

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        micro_batch_num: int,
        args_batch_dim: Sequence[Any] | None = None,
        kwargs_batch_dim: Mapping[str, Any] | None = None,
        output_concat_dim: Any = None,
    ) -> None:
        own = [stages] if isinstance(stages, PipelineStage) else list(stages)
        ranks = _platform.get_process_group_ranks(own[0].group)
        per_rank = None if self._name in ("gpipe", "1f1b") else len(own)
        table = make_table(self._name, len(ranks), micro_batch_num, per_rank)
        table = overlap_neighbours(table) if self._overlaps else table
        super().__init__(own, table, args_batch_dim, kwargs_batch_dim, output_concat_dim)


class ScheduleGPipe(_Named):
    """All forwards, then all backwards."""

    _name = "gpipe"


class Schedule1F1B(_Named):
    """One forward, one backward."""

    _name = "1f1b"


class ScheduleInterleaved1F1B(_Named):
    """1F1B with several stages on each rank: stages r, r + ranks, ... on rank r.

    ``enable_dxdw_split``: gradients of weights apart from those of inputs, in the bubble (the table ``zb1p``).
    ``overlap_b_f``: a backward and the forward behind it at once, so that what one sends to experts of other ranks is
    under way while the other computes. Messages overlap with computation in any case, so ``overlap_p2p`` changes
    nothing.
    """

    _name = "interleaved"

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        micro_batch_num: int,
        args_batch_dim: Sequence[Any] | None = None,
        kwargs_batch_dim: Mapping[str, Any] | None = None,
        output_concat_dim: Any = None,
        overlap_p2p: bool = False,
        overlap_b_f: bool = False,
        swap: bool = False,
        enable_dxdw_split: bool = False,
        p2p_transport: str = "auto",
    ) -> None:
        del overlap_p2p
        for name, given, instead in (
            ("swap", swap, "recompute blocks, or take a schedule that keeps less, such as v_half"),
            ("p2p_transport", p2p_transport != "auto", "leave it at 'auto'"),
        ):
            if given:
                raise ValueError(f"ScheduleInterleaved1F1B: {name} is not there; {instead}")
        if enable_dxdw_split:
            self._name = "zb1p"
        self._overlaps = overlap_b_f
        super().__init__(stages, micro_batch_num, args_batch_dim, kwargs_batch_dim, output_concat_dim)


def _are_alike(parts: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]) -> bool:
    shapes = [
        [tuple(one.shape) for one in (*args, *kwargs.values()) if _platform.is_tensor(one)] for args, kwargs in parts
    ]
    return all(one == shapes[0] for one in shapes)
