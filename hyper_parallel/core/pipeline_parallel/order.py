"""Whether a table comes to its end, and in which order: all ranks walked together, each along its own list.

Note [Why one walk is a proof]
A rank that may go on may still do so whatever the others do first, so all walks end at the same place. With
``blocking`` a send waits until its receiver stands at the receive, and the other way round: the strictest transport
there is. A table that ends there ends on every other.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from hyper_parallel.core.pipeline_parallel.action import SENDS, Action, Value
from hyper_parallel.core.pipeline_parallel.table import Table


class Place(NamedTuple):
    """An action of a table; lines count from 0 here and from 1 in texts."""

    rank: int
    line: int


class Event(NamedTuple):
    """Something that happens to a value: it is ``made``, ``sent`` or ``taken``."""

    what: str
    value: Value


@dataclass(frozen=True)
class Wait:
    """A rank that cannot go on: where it stands, and the place it waits for; None for what is nowhere in the table."""

    at: Place
    wanted: Place | None
    event: Event


@dataclass(frozen=True)
class Walk:
    """The steps in an order they can be done in, a meeting of sender and receiver as one step, and who is stuck."""

    steps: tuple[tuple[Place, ...], ...]
    stuck: tuple[Wait, ...]


def walk(table: Table, blocking: bool) -> Walk:
    """All ranks along their lists, as far as they come."""
    return _Walker(table, blocking).run()


def needed(table: Table, step: Action) -> tuple[Event, ...]:
    """What must have happened before a computation or a send."""
    if step.is_message:
        return (Event("made", step.value),) if step.kind in SENDS else ()
    if not step.is_computed or (value := table.needs(step)) is None:
        return ()
    if table.crosses(value) and table.has_messages:
        return Event("sent", value), Event("taken", value)
    return (Event("made", value),)


def caused(table: Table, step: Action) -> Event | None:
    """What happens by an action."""
    if step.is_message:
        return Event("sent" if step.kind in SENDS else "taken", step.value)
    if step.is_computed and (value := table.gives(step)) is not None:
        return Event("made", value)
    return None


class _Walker:
    def __init__(self, table: Table, blocking: bool) -> None:
        self.table, self.blocking = table, blocking
        self.at = [0] * table.num_ranks
        self.happened: set[Event] = set()
        self.waiting: dict[Event, list[int]] = {}
        self.awake = deque(range(table.num_ranks))
        self.steps: list[tuple[Place, ...]] = []

    def run(self) -> Walk:
        while self.awake:
            rank = self.awake.popleft()
            while self._advance(rank):
                pass
        return Walk(tuple(self.steps), tuple(self._stuck()))

    def _standing(self, rank: int) -> Action | None:
        actions = self.table.actions[rank]
        return actions[self.at[rank]] if self.at[rank] < len(actions) else None

    def _missing(self, action: Action) -> Event | None:
        for step in action.steps:
            for event in needed(self.table, step):
                if event not in self.happened:
                    return event
        return None

    def _advance(self, rank: int) -> bool:
        action = self._standing(rank)
        if action is None:
            return False
        if (event := self._missing(action)) is not None:
            self.waiting.setdefault(event, []).append(rank)
            return False
        ranks = [rank]
        if self.blocking and action.is_message:
            partner = partner_of(self.table, action, rank)
            other = self._standing(partner)
            if other is None or not _meet(action, other) or self._missing(other) is not None:
                return False  # The partner wakes this rank when it comes.
            ranks.append(partner)
            self.awake.append(partner)
        self.steps.append(tuple(Place(one, self.at[one]) for one in ranks))
        for one in ranks:
            done = self._standing(one)
            assert done is not None
            self.at[one] += 1
            for step in done.steps:
                if (event := caused(self.table, step)) is not None:
                    self.happened.add(event)
                    self.awake.extend(self.waiting.pop(event, ()))
        return True

    def _stuck(self) -> list[Wait]:
        causes: dict[Event, Place] = {}
        for rank, line, action in self.table:
            for step in action.steps:
                if (event := caused(self.table, step)) is not None:
                    causes.setdefault(event, Place(rank, line))
        waits = []
        for rank in range(self.table.num_ranks):
            if (standing := self._standing(rank)) is None:
                continue
            event = self._missing(standing)
            if event is None:
                step = standing.steps[0]
                event = Event("taken" if step.kind in SENDS else "sent", step.value)
            waits.append(Wait(Place(rank, self.at[rank]), causes.get(event), event))
        return waits


def partner_of(table: Table, action: Action, rank: int) -> int:
    """The rank at the other end of a message."""
    value = action.steps[0].value
    ends = (table.stages.rank_of[value.giver], table.stages.rank_of[value.taker])
    return ends[0] if ends[1] == rank else ends[1]


def _meet(one: Action, other: Action) -> bool:
    """Whether two actions are the two ends of the same messages."""
    return other.is_message and {(step.value, step.kind in SENDS) for step in one.steps} == {
        (step.value, step.kind not in SENDS) for step in other.steps
    }


def cycle_of(waits: tuple[Wait, ...]) -> tuple[Wait, ...]:
    """The ranks that wait for each other in a circle; else the chain to the one whose wish is nowhere."""
    by_rank = {wait.at.rank: wait for wait in waits}
    chain: list[Wait] = []
    wait: Wait | None = waits[0]
    while wait is not None and wait not in chain:
        chain.append(wait)
        wait = by_rank.get(wait.wanted.rank) if wait.wanted is not None else None
    return tuple(chain if wait is None else chain[chain.index(wait) :])
