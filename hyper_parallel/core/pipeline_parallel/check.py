"""The proof, before anything is started, that a table works on all ranks; see Note [Why one walk is a proof].

It ends even if every send and receive blocks; every stage computes every microbatch once and in order; nothing is used
before it came or after it was let go; no rank needs more than its budget.
"""

from __future__ import annotations

from collections.abc import Sequence

from hyper_parallel.core.pipeline_parallel.faults import Fault, TableError, at, fault_of_stuck
from hyper_parallel.core.pipeline_parallel.memory import Sizes, peaks
from hyper_parallel.core.pipeline_parallel.order import walk
from hyper_parallel.core.pipeline_parallel.rules import faults_of_lists
from hyper_parallel.core.pipeline_parallel.table import Table


def find_faults(table: Table, budget: float | Sequence[float] | None = None, sizes: Sizes | None = None) -> list[Fault]:
    """All that is wrong with a table; an empty list is the proof.

    ``budget`` is what a rank, or each rank, may have alive: bytes with ``sizes``, else chunks, the activations of one
    stage for one microbatch.
    """
    faults = faults_of_lists(table)
    if not faults:
        stuck = walk(table, blocking=True).stuck
        faults = [fault_of_stuck(table, stuck)] if stuck else []
    if not faults and budget is not None:
        faults = _over_budget(table, budget, sizes)
    return faults


def check(table: Table, budget: float | Sequence[float] | None = None, sizes: Sizes | None = None) -> None:
    """Raise :class:`TableError` with rank, line and who waits for whom unless the table is proven to work."""
    if faults := find_faults(table, budget, sizes):
        raise TableError(table, faults)


def _over_budget(table: Table, budget: float | Sequence[float], sizes: Sizes | None) -> list[Fault]:
    budgets = list(budget) if isinstance(budget, Sequence) else [budget] * table.num_ranks
    if len(budgets) != table.num_ranks:
        raise ValueError(f"budget of {len(budgets)} ranks for a table of {table.num_ranks}; give one number or all")
    unit = "chunks" if sizes is None else "bytes"
    lean = ", ".join(name for name in ("1f1b", "v_half", "v_min") if name != table.name)
    return [
        Fault(
            peak.place,
            f"{at(table, peak.place)}: {peak.size:g} {unit} are alive on rank {rank}, its budget is {most:g}; take a "
            f"schedule that keeps less ({lean}), more ranks, or smaller microbatches",
        )
        for rank, (peak, most) in enumerate(zip(peaks(table, sizes), budgets, strict=True))
        if peak.size > most
    ]
