"""What is wrong with a table, in words: where, what, and the ranks that wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hyper_parallel.core.pipeline_parallel.action import Value
from hyper_parallel.core.pipeline_parallel.order import Place, Wait, cycle_of
from hyper_parallel.core.pipeline_parallel.table import Table

_MOST_SHOWN = 5


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong: its place (none for what is missing everywhere), and the circle of a deadlock."""

    place: Place | None
    text: str
    cycle: tuple[Place, ...] = ()

    def __str__(self) -> str:
        return self.text


class TableError(ValueError):
    """A table that must not be started; ``faults`` has everything that is wrong with it."""

    def __init__(self, table: Table, faults: Sequence[Fault]) -> None:
        self.faults = tuple(faults)
        shown = "\n".join(f"  {fault}" for fault in self.faults[:_MOST_SHOWN])
        more = len(self.faults) - _MOST_SHOWN
        super().__init__(
            f"table {table.name} on {table.num_ranks} ranks is refused:\n{shown}"
            + (f"\n  and {more} more" if more > 0 else "")
        )


def at(table: Table, place: Place) -> str:
    """``rank 0 line 14 0SEND_F1``."""
    return f"rank {place.rank} line {place.line + 1} {table.actions[place.rank][place.line]}"


def value_in_words(value: Value) -> str:
    """
    >>> value_in_words(Value(0, False, 3))
    'the gradient 1->0 of microbatch 3'
    """
    what = "gradient" if not value.is_forward else "activation"
    return f"the {what} {value.giver}->{value.taker} of microbatch {value.microbatch}"


def fault_of_stuck(table: Table, waits: tuple[Wait, ...]) -> Fault:
    """The deadlock as a fault: each rank of the circle, where it stands and what it waits for."""
    circle = cycle_of(waits)
    lines = []
    for wait in circle:
        wish = f"{at(table, wait.at)} waits for {value_in_words(wait.event.value)}"
        if wait.wanted is None:
            lines.append(f"{wish}, which nobody has {wait.event.what}; that action is missing from the table")
        else:
            lines.append(f"{wish}, which is {wait.event.what} by {at(table, wait.wanted)}")
    ends = circle[-1].wanted is None
    head = "never ends: " if ends else f"deadlock of {len(circle)} rank{'s' * (len(circle) > 1)}: "
    return Fault(circle[0].at, head + ";\n    ".join(lines), tuple(wait.at for wait in circle))
