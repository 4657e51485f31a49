"""Several stages a rank, in a loop over the ranks: interleaved 1F1B, its zero-bubble form ZB1P, breadth first.

Note [Rounds]
Interleaved schedules take microbatches in rounds of equal size, at least as many as ranks: one round through the first
stage of a rank, then the same microbatches through its next. Fewer microbatches than ranks are one short round.
"""

from __future__ import annotations

from collections.abc import Iterator

from hyper_parallel.core.pipeline_parallel.action import Action, Kind
from hyper_parallel.core.pipeline_parallel.stage_map import StageMap
from hyper_parallel.core.pipeline_parallel.table import Table
from hyper_parallel.core.pipeline_parallel.tables.counts import demand_counts, demand_microbatches


def looped_bfs(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Table:
    """Every stage takes all microbatches before the next stage of the rank starts (Lamy-Poirier 2022)."""
    demand_counts("looped_bfs", ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    stages = StageMap.loop(ranks, stages_per_rank)
    rows = tuple(
        tuple(
            Action(kind, stage, one)
            for kind, own in ((Kind.F, stages.stages_of(rank)), (Kind.B, stages.stages_of(rank)[::-1]))
            for stage in own
            for one in range(microbatches)
        )
        for rank in range(ranks)
    )
    return Table(stages, microbatches, rows, "looped_bfs")


def interleaved(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Table:
    """1F1B over several stages a rank (Narayanan 2021): bubble (p-1)(F+B)/v."""
    return _interleaved("interleaved", ranks, microbatches, stages_per_rank, is_split=False)


def zb1p(ranks: int, microbatches: int, stages_per_rank: int = 2) -> Table:
    """Interleaved with weight gradients put off (Qi 2023): bubble (p-1)(F+I-W)/v, vp chunks alive."""
    return _interleaved("zb1p", ranks, microbatches, stages_per_rank, is_split=True)


def _interleaved(name: str, ranks: int, microbatches: int, stages_per_rank: int, is_split: bool) -> Table:
    demand_counts(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages_per_rank)
    demand_microbatches(name, ranks, microbatches)
    size = microbatches // max(1, microbatches // ranks)
    rows = tuple(tuple(_row(rank, ranks, microbatches, stages_per_rank, size, is_split)) for rank in range(ranks))
    return Table(StageMap.loop(ranks, stages_per_rank), microbatches, rows, name)


def _row(rank: int, ranks: int, microbatches: int, per_rank: int, size: int, is_split: bool) -> Iterator[Action]:
    total = per_rank * microbatches
    ahead = min(total, (per_rank - 1) * size + (1 if is_split else 2) * (ranks - 1 - rank))

    def chunk(kind: Kind, number: int) -> Action:
        turn = number // size % per_rank
        turn = turn if kind is Kind.F else per_rank - 1 - turn
        return Action(kind, turn * ranks + rank, number // (size * per_rank) * size + number % size)

    for number in range(total + ahead):
        if number < total:
            yield chunk(Kind.F, number)
        if number >= ahead:
            yield chunk(Kind.I if is_split else Kind.B, number - ahead)
            if is_split and number - ahead >= rank:
                yield chunk(Kind.W, number - ahead - rank)
    if is_split:
        for number in range(max(0, total - rank), total):
            yield chunk(Kind.W, number)
