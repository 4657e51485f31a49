"""Ranks that run a pipeline together compare their tables once, so that other arguments are an error and no hang."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.pipeline_parallel.table import Table
from hyper_parallel.platform import get_platform

__all__ = ["demand_same_table"]

_platform = get_platform()


def demand_same_table(table: Table, group: Any) -> None:
    """Raise on every rank of ``group`` unless all have the same table.

    forward: an all-gather of 32 bytes and a line of text over ``group``.
    """
    ranks = _platform.get_process_group_ranks(group)
    if len(ranks) != table.num_ranks:
        raise ValueError(
            f"table {table.name} is for {table.num_ranks} ranks, and the stages lie on {len(ranks)}; make one for as "
            "many"
        )
    words = f"{table.name}, {table.stages.num_stages} stages, {table.microbatches} microbatches"
    given: list[Any] = [None] * len(ranks)
    _platform.all_gather_object(given, (table.digest, words), group)
    if any(digest != table.digest for digest, _ in given):
        told = "; ".join(f"rank {rank}: {words}" for rank, (_, words) in zip(ranks, given, strict=True))
        raise RuntimeError(
            f"the ranks of a pipeline have different tables ({told}): give all of them the same schedule, number of "
            "stages and microbatches"
        )
