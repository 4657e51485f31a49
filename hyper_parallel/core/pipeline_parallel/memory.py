"""What is alive on each rank while a table runs: its peak in chunks or bytes, and the action at which it is reached.

F saves the activations of its stage, I leaves what the weight gradients need, B and W free the rest. An activation or
gradient that crosses stages lives from its computation until it is sent, and from its receive until it is used; between
two stages of one rank from computation to use. UNSHARD brings whole weights, RESHARD takes them away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hyper_parallel.core.pipeline_parallel.action import RECEIVES, SENDS, Action, Kind
from hyper_parallel.core.pipeline_parallel.order import Place
from hyper_parallel.core.pipeline_parallel.table import Table

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Sizes:
    """Bytes of one microbatch on a stage, one number for all stages or one for each; as it stands it counts chunks.

    ``kept`` is what stays of ``activations`` between I and W (all of it when None), ``message`` one activation or
    gradient between stages, ``weights`` what a stage's gathered weights add.
    """

    activations: PerStage = 1
    kept: PerStage | None = None
    message: PerStage = 0
    weights: PerStage = 0

    def demand(self, num_stages: int) -> None:
        """Refuse lists of another length than there are stages."""
        for name in ("activations", "kept", "message", "weights"):
            size = getattr(self, name)
            if isinstance(size, Sequence) and len(size) != num_stages:
                raise ValueError(f"sizes: {name} has {len(size)} numbers for {num_stages} stages; give one or all")

    def kept_of(self, stage: int) -> float:
        """What stays between I and W."""
        return _of(self.activations if self.kept is None else self.kept, stage)


@dataclass(frozen=True)
class Peak:
    """The most that is alive on a rank, and the action at which it is."""

    size: float
    place: Place


def _of(size: PerStage, stage: int) -> float:
    return size[stage] if isinstance(size, Sequence) else size


def alive(table: Table, sizes: Sizes | None = None) -> tuple[tuple[tuple[float, float], ...], ...]:
    """For each rank and line: the most that is alive during the action, and what is alive behind it."""
    sizes = Sizes() if sizes is None else sizes
    sizes.demand(table.stages.num_stages)
    rows = []
    for actions in table.actions:
        now, row = 0.0, []
        for action in actions:
            changes = [_change(table, step, sizes) for step in action.steps]
            most = now + sum(more for more, _ in changes)
            now = most - sum(less for _, less in changes)
            row.append((most, now))
        rows.append(tuple(row))
    return tuple(rows)


def peaks(table: Table, sizes: Sizes | None = None) -> tuple[Peak, ...]:
    """The peak of each rank; without sizes in chunks, the activations of one stage for one microbatch."""
    found = []
    for rank, row in enumerate(alive(table, sizes)):
        most = [during for during, _ in row] or [0.0]
        found.append(Peak(max(most), Place(rank, most.index(max(most)))))
    return tuple(found)


def _change(table: Table, step: Action, sizes: Sizes) -> tuple[float, float]:
    """(what comes before the peak of an action, what goes behind it)."""
    kind, stage = step.kind, step.stage
    message = _of(sizes.message, stage)
    if kind in RECEIVES:
        return message, 0
    if kind in SENDS:
        return 0, message
    if kind is Kind.UNSHARD:
        return _of(sizes.weights, stage), 0
    if kind is Kind.RESHARD:
        return 0, _of(sizes.weights, stage)
    if kind is Kind.REDUCE:
        return 0, 0
    comes = message if _is_held(table, step, gives=True) else 0.0
    goes = message if _is_held(table, step, gives=False) else 0.0
    activations, kept = _of(sizes.activations, stage), sizes.kept_of(stage)
    if kind is Kind.F:  # The input becomes a part of what is saved.
        return (activations - goes + comes, 0) if table.has_backward else (activations + comes, activations + goes)
    if kind is Kind.I:
        return comes, goes + activations - kept
    return comes, goes + (activations if kind is Kind.B else kept)


def _is_held(table: Table, step: Action, gives: bool) -> bool:
    """Whether what a computation gives or needs is counted apart; between ranks only where messages are placed."""
    value = table.gives(step) if gives else table.needs(step)
    return value is not None and (table.has_messages or not table.crosses(value))
