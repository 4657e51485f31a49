"""ZB-H1 and ZB-H2 (Qi 2023): one stage a rank, weight gradients put off into what was a bubble."""

from __future__ import annotations

from collections.abc import Iterator

from hyper_parallel.core.pipeline_parallel.action import Action, Kind
from hyper_parallel.core.pipeline_parallel.stage_map import StageMap
from hyper_parallel.core.pipeline_parallel.table import Table
from hyper_parallel.core.pipeline_parallel.tables.counts import demand_counts


def zb_h1(ranks: int, microbatches: int) -> Table:
    """1F1B's memory on rank 0 on every rank, a third of its bubble: (p-1)(F+I-W)."""
    return _put_off("zb_h1", ranks, microbatches, 1)


def zb_h2(ranks: int, microbatches: int) -> Table:
    """Twice the memory, no idle time inside a rank while F+I <= 2W: 2p-1 microbatches alive."""
    return _put_off("zb_h2", ranks, microbatches, 2)


def _put_off(name: str, ranks: int, microbatches: int, depth: int) -> Table:
    demand_counts(name, ranks=ranks, microbatches=microbatches)
    rows = tuple(tuple(_row(rank, ranks, microbatches, depth)) for rank in range(ranks))
    return Table(StageMap.loop(ranks), microbatches, rows, name)


def _row(rank: int, ranks: int, microbatches: int, depth: int) -> Iterator[Action]:
    ahead, waiting = min(microbatches, depth * (ranks - 1 - rank)), depth * rank
    for number in range(microbatches + ahead):
        if number < microbatches:
            yield Action(Kind.F, rank, number)
        if number >= ahead:
            yield Action(Kind.I, rank, number - ahead)
            if number - ahead >= waiting:
                yield Action(Kind.W, rank, number - ahead - waiting)
    for number in range(max(0, microbatches - waiting), microbatches):
        yield Action(Kind.W, rank, number)
