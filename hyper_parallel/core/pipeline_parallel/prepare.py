"""From computations to a table that a rank can run: folded, with messages, gathers and reductions, and proven."""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.core.pipeline_parallel.check import check
from hyper_parallel.core.pipeline_parallel.folding import batch_messages, fold_backward
from hyper_parallel.core.pipeline_parallel.memory import Sizes
from hyper_parallel.core.pipeline_parallel.messages import add_messages
from hyper_parallel.core.pipeline_parallel.sharding import add_sharding
from hyper_parallel.core.pipeline_parallel.simulate import Times
from hyper_parallel.core.pipeline_parallel.table import Table


def prepare(
    table: Table,
    times: Times | None = None,
    *,
    batched: bool = False,
    sharded: bool = False,
    keep: int | None = None,
    reduce_each: bool = False,
    budget: float | Sequence[float] | None = None,
    sizes: Sizes | None = None,
) -> Table:
    """The table with everything that a rank needs to run it, proven by :func:`check`; the same on every rank.

    A table that has messages already, written by hand, keeps them. ``batched`` joins messages between the same two
    ranks, ``sharded`` adds UNSHARD, RESHARD and REDUCE (``keep``, ``reduce_each``: see :func:`add_sharding`).
    """
    if not table.has_messages:
        check(table)
        table = add_messages(fold_backward(table), times)
    if batched:
        table = batch_messages(table)
    if sharded:
        table = add_sharding(table, keep, reduce_each)
    check(table, budget, sizes)
    return table
