"""The actions of a schedule under the names of MindSpore's world: what :class:`Action` is, as ``MetaStep``."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hyper_parallel.core.pipeline_parallel.action import Action, Kind

__all__ = ["MetaStep", "MetaStepType", "action_of", "kind_of", "meta_step_of"]


class MetaStepType(enum.Enum):
    """What a step does."""

    FWD = "fwd"
    BWD = "bwd"
    BWD_INPUT = "bwd_input"
    BWD_WEIGHT = "bwd_weight"
    FWD_SEND = "fwd_send"
    FWD_RECV = "fwd_recv"
    BWD_SEND = "bwd_send"
    BWD_RECV = "bwd_recv"
    FSDP_UNSHARD = "fsdp_unshard"
    FSDP_RESHARD = "fsdp_reshard"
    FSDP_REDUCE_GRAD = "fsdp_reduce_grad"
    BATCH_SEND_RECV = "batch_send_recv"
    OVERLAP_F_B = "overlap_f_b"
    OVERLAP_B_F = "overlap_b_f"


_KINDS = {
    MetaStepType.FWD: Kind.F,
    MetaStepType.BWD: Kind.B,
    MetaStepType.BWD_INPUT: Kind.I,
    MetaStepType.BWD_WEIGHT: Kind.W,
    MetaStepType.FWD_SEND: Kind.SEND_F,
    MetaStepType.FWD_RECV: Kind.RECV_F,
    MetaStepType.BWD_SEND: Kind.SEND_B,
    MetaStepType.BWD_RECV: Kind.RECV_B,
    MetaStepType.FSDP_UNSHARD: Kind.UNSHARD,
    MetaStepType.FSDP_RESHARD: Kind.RESHARD,
    MetaStepType.FSDP_REDUCE_GRAD: Kind.REDUCE,
}
_TYPES = {kind: meta_type for meta_type, kind in _KINDS.items()}


@dataclass(frozen=True)
class MetaStep:
    """One step of a rank: of which microbatch (None: of all), what, on which stage; ``sub_steps`` run together.

    >>> MetaStep(2, MetaStepType.FWD, 3)
    MetaStep(micro_index=2, meta_type=<MetaStepType.FWD: 'fwd'>, stage_index=3, sub_steps=None)
    """

    micro_index: int | None
    meta_type: MetaStepType
    stage_index: int
    sub_steps: tuple[MetaStep, ...] | None = None


def meta_step_of(action: Action) -> MetaStep:
    """An action as a step."""
    if not action.parts:
        return MetaStep(action.microbatch, _TYPES[action.kind], action.stage)
    together = MetaStepType.BATCH_SEND_RECV
    if action.is_computed:
        together = MetaStepType.OVERLAP_F_B if action.parts[0].kind is Kind.F else MetaStepType.OVERLAP_B_F
    return MetaStep(action.microbatch, together, action.stage, tuple(map(meta_step_of, action.parts)))


def action_of(step: MetaStep) -> Action:
    """A step as an action."""
    if step.sub_steps:
        return Action.overlap(*map(action_of, step.sub_steps))
    return Action(kind_of(step.meta_type), step.stage_index, step.micro_index)


def kind_of(meta_type: MetaStepType) -> Kind:
    """The kind of a step that is one action."""
    if meta_type not in _KINDS:
        raise ValueError(f"{meta_type} is several steps at once; name one of {', '.join(one.name for one in _KINDS)}")
    return _KINDS[meta_type]
