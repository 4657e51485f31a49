"""GPipe, 1F1B, and forwards alone: one stage a rank, whole backwards."""

from __future__ import annotations

from collections.abc import Iterator

from hyper_parallel.core.pipeline_parallel.action import Action, Kind
from hyper_parallel.core.pipeline_parallel.stage_map import StageMap
from hyper_parallel.core.pipeline_parallel.table import Table
from hyper_parallel.core.pipeline_parallel.tables.counts import demand_counts


def gpipe(ranks: int, microbatches: int) -> Table:
    """All forwards, then all backwards (Huang 2019): bubble (p-1)(F+B), all microbatches alive."""
    demand_counts("gpipe", ranks=ranks, microbatches=microbatches)
    rows = tuple(
        tuple(Action(kind, rank, one) for kind in (Kind.F, Kind.B) for one in range(microbatches))
        for rank in range(ranks)
    )
    return Table(StageMap.loop(ranks), microbatches, rows, "gpipe")


def one_f_one_b(ranks: int, microbatches: int) -> Table:
    """A backward as soon as there is one (Narayanan 2019): GPipe's bubble, at most p-r microbatches alive on rank r."""
    demand_counts("1f1b", ranks=ranks, microbatches=microbatches)
    rows = tuple(tuple(_one_f_one_b(rank, ranks, microbatches)) for rank in range(ranks))
    return Table(StageMap.loop(ranks), microbatches, rows, "1f1b")


def _one_f_one_b(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    ahead = min(microbatches, ranks - 1 - rank)
    for one in range(microbatches + ahead):
        if one < microbatches:
            yield Action(Kind.F, rank, one)
        if one >= ahead:
            yield Action(Kind.B, rank, one - ahead)


def forward_only(stages: StageMap, microbatches: int) -> Table:
    """Forwards alone, for evaluation on the stages of any training table."""
    demand_counts("forward_only", microbatches=microbatches)
    rows = tuple(
        tuple(Action(Kind.F, stage, one) for stage in stages.stages_of(rank) for one in range(microbatches))
        for rank in range(stages.num_ranks)
    )
    return Table(stages, microbatches, rows, "forward_only")
