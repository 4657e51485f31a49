"""A pass: sends and receives of a table of computations, all on one line in the order of simulated time.

Note [One line]
Computations are put in the order of their simulated ends, each message behind the computation that makes its value and
before the one that needs it; the send and the receive enter the lists of their ranks at that point. So every list is a
part of one sequence, and the table ends even if each send and receive blocks. A receive stands at most one action
before its data is there: nothing waits behind it, and no buffer is held for long.
"""

from __future__ import annotations

import heapq

from hyper_parallel.core.pipeline_parallel.action import Action, Value, receiving, sending
from hyper_parallel.core.pipeline_parallel.order import Place
from hyper_parallel.core.pipeline_parallel.simulate import Span, Times, simulate
from hyper_parallel.core.pipeline_parallel.table import Table

_Key = tuple[int, int, int, int]


def add_messages(table: Table, times: Times | None = None) -> Table:
    """The table with its sends and receives; see Note [One line]. ``times`` decide the order, not whether it ends."""
    if table.has_messages:
        raise ValueError(f"table {table.name} has messages already; add them to computations only")
    others = [action for _, _, action in table if not action.is_computed]
    if others:
        raise ValueError(f"table {table.name} has {others[0]}; place UNSHARD and REDUCE behind the messages")
    return _Line(table, simulate(table, times).spans).drawn()


class _Line:
    def __init__(self, table: Table, spans: tuple[tuple[Span, ...], ...]) -> None:
        self.table = table
        self.rows: list[list[Action]] = [[] for _ in spans]
        lengths = [span.end - span.start for row in spans for span in row if span.end > span.start]
        unit = min(lengths, default=1.0) / 1e6  # Ends that differ by rounding alone are equal.
        self.ends = [[round(span.end / unit) for span in row] for row in spans]
        self.missing: dict[Place, int] = {}
        self.takers: dict[Value, Place] = {}
        for rank, line, action in table:
            place = Place(rank, line)
            values = [value for step in action.steps if (value := table.needs(step)) is not None]
            self.missing[place] = len(values) + (line > 0)
            self.takers.update(dict.fromkeys(values, place))
        self.heap: list[tuple[_Key, Place | Value]] = []

    def drawn(self) -> Table:
        for rank, actions in enumerate(self.table.actions):
            if actions:
                self._release(Place(rank, 0), 0)
        while self.heap:
            _, what = heapq.heappop(self.heap)
            if isinstance(what, Place):
                self._put(what)
            else:
                rank_of = self.table.stages.rank_of
                self.rows[rank_of[what.giver]].append(sending(what))
                self.rows[rank_of[what.taker]].append(receiving(what))
                self._release(self.takers[what])
        table = self.table
        return Table(table.stages, table.microbatches, tuple(map(tuple, self.rows)), table.name)

    def _release(self, place: Place, count: int = 1) -> None:
        self.missing[place] -= count
        if self.missing[place] == 0:
            heapq.heappush(self.heap, ((self.ends[place.rank][place.line], 0, place.rank, place.line), place))

    def _put(self, place: Place) -> None:
        action = self.table.actions[place.rank][place.line]
        self.rows[place.rank].append(action)
        for step in action.steps:
            value = self.table.gives(step)
            if value is None or value not in self.takers:
                continue
            if self.table.crosses(value):
                key = (self.ends[place.rank][place.line], 1, value.tag(self.table.microbatches), 0)
                heapq.heappush(self.heap, (key, value))
            else:
                self._release(self.takers[value])
        if place.line + 1 < len(self.table.actions[place.rank]):
            self._release(Place(place.rank, place.line + 1))
