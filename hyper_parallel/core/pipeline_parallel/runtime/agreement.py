"""Ranks that run a pipeline together compare their tables once, so that other arguments are an error and no hang."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.pipeline_parallel.table import Table
from hyper_parallel.platform import get_platform

__all__ = ["demand_same_table"]

_platform = get_platform()


def demand_same_table(table: Table, group: Any, blocks: Sequence[int] = ()) -> None:
    """Raise on every rank of ``group`` unless all have the same table, and ``blocks``, their numbers in the stages.

    forward: an all-gather of 32 bytes, the numbers and a line of text over ``group``.
    """
    ranks = _platform.get_process_group_ranks(group)
    if len(ranks) != table.num_ranks:
        raise ValueError(
            f"table {table.name} is for {table.num_ranks} ranks, and the stages lie on {len(ranks)}; make one for as "
            "many"
        )
    words = f"{table.name}, {table.stages.num_stages} stages, {table.microbatches} microbatches"
    if blocks:
        words += f", stages={list(blocks)}"
    given: list[Any] = [None] * len(ranks)
    _platform.all_gather_object(given, (table.digest, tuple(blocks), words), group)
    if any((digest, cut) != (table.digest, tuple(blocks)) for digest, cut, _ in given):
        told = "; ".join(f"rank {rank}: {words}" for rank, (*_, words) in zip(ranks, given, strict=True))
        raise RuntimeError(
            f"the ranks of a pipeline have different tables ({told}): give all of them the same schedule, stages and "
            "number of microbatches"
        )
