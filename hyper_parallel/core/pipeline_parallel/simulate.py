"""When each rank does what: a table with times for its actions gives a timeline, its bubble, and idle times.

Each action starts as soon as its rank is free and what it needs is there. A message takes ``message`` from the moment
both its ends are posted, while the ranks go on; with ``blocking`` both ranks stand still until it is over. UNSHARD,
RESHARD and REDUCE take no time here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from hyper_parallel.core.pipeline_parallel.action import SENDS, Action, Kind, Value
from hyper_parallel.core.pipeline_parallel.faults import TableError, fault_of_stuck
from hyper_parallel.core.pipeline_parallel.order import Place, walk
from hyper_parallel.core.pipeline_parallel.table import Table


@dataclass(frozen=True)
class Times:
    """What one microbatch costs **all** stages of one rank, in any unit; a stage of v on its rank takes the v-th part.

    ``stages`` scales single stages (a heavy head: 1, 1, 1, 1.5), ``overlap`` is the time of a forward and a whole
    backward at once, their sum when it is not given.
    """

    forward: float = 1.0
    input_gradient: float = 1.2
    weight_gradient: float = 0.8
    message: float = 0.0
    overlap: float | None = None
    stages: Sequence[float] | None = None

    def __post_init__(self) -> None:
        given = {"forward": self.forward, "input_gradient": self.input_gradient, "message": self.message}
        given |= {"weight_gradient": self.weight_gradient, "overlap": self.overlap or 0.0}
        for name, time in given.items():
            if not (math.isfinite(time) and time >= 0):
                raise ValueError(f"times: {name} is {time}; give a number of at least 0")

    @classmethod
    def parse(cls, text: str) -> Times:
        """``1,1.2,.8``: forward, input gradient, weight gradient, and the time of a message if there is a fourth."""
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        if len(numbers) not in (3, 4):
            raise ValueError(f"times {text!r}: write forward, input gradient, weight gradient (, message): 1,1.2,.8")
        forward, inputs, weights, message = (*numbers, 0.0)[:4]
        return cls(forward, inputs, weights, message)

    def of(self, step: Action, share: float) -> float:
        """The time of a computation on a stage that is ``share`` of its rank."""
        time = {
            Kind.F: self.forward,
            Kind.I: self.input_gradient,
            Kind.W: self.weight_gradient,
            Kind.B: self.input_gradient + self.weight_gradient,
        }[step.kind]
        return time * share * (1.0 if self.stages is None else self.stages[step.stage])


@dataclass(frozen=True)
class Span:
    """An action of a rank from ``start`` to ``end``."""

    start: float
    end: float
    action: Action
    place: Place


@dataclass(frozen=True)
class Timeline:
    """What was computed when on each rank."""

    table: Table
    spans: tuple[tuple[Span, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """From the first start to the last end of all ranks."""
        return max(spans[-1].end for spans in self.spans if spans)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """How long each rank computes."""
        return tuple(math.fsum(span.end - span.start for span in spans) for spans in self.spans)

    @property
    def extra(self) -> float:
        """How much longer the step takes than the busiest rank computes."""
        return self.makespan - max(self.busy)

    @property
    def bubble(self) -> float:
        """``extra`` as a part of the step."""
        return self.extra / self.makespan if self.makespan else 0.0

    @property
    def idle_inside(self) -> tuple[float, ...]:
        """How long each rank waits between its first start and its last end."""
        spans = zip(self.spans, self.busy, strict=True)
        return tuple(own[-1].end - own[0].start - busy if own else 0.0 for own, busy in spans)


def simulate(table: Table, times: Times | None = None, blocking: bool = False) -> Timeline:
    """When each rank of a table does what; a table that never ends is an error that names who waits for whom."""
    times = Times() if times is None else times
    if times.stages is not None and len(times.stages) != table.stages.num_stages:
        raise ValueError(f"times of {len(times.stages)} stages for a table of {table.stages.num_stages}; give all")
    done = walk(table, blocking and table.has_messages)
    if done.stuck:
        raise TableError(table, [fault_of_stuck(table, done.stuck)])
    return _Clock(table, times, blocking).run(done.steps)


class _Clock:
    def __init__(self, table: Table, times: Times, blocking: bool) -> None:
        self.table, self.times, self.blocking = table, times, blocking
        self.now = [0.0] * table.num_ranks
        self.made: dict[Value, float] = {}
        self.posted: dict[Value, float] = {}
        self.spans: list[list[Span]] = [[] for _ in range(table.num_ranks)]
        self.share = [1 / len(table.stages.stages_of(rank)) for rank in table.stages.rank_of]

    def run(self, steps: tuple[tuple[Place, ...], ...]) -> Timeline:
        for places in steps:
            action = self.table.actions[places[0].rank][places[0].line]
            if action.is_computed:
                self._compute(action, places[0])
            elif action.is_message:
                self._pass_on(action, places)
        return Timeline(self.table, tuple(map(tuple, self.spans)))

    def _pass_on(self, action: Action, places: tuple[Place, ...]) -> None:
        start = max(self.now[place.rank] for place in places)
        for step in action.steps:
            if step.kind in SENDS:
                start = max(start, self.made[step.value])
        for step in action.steps:
            self.posted[step.value] = max(start, self.posted.get(step.value, 0.0))
        if self.blocking:
            for place in places:
                self.now[place.rank] = start + self.times.message

    def _arrival(self, step: Action) -> float:
        value = self.table.needs(step)
        if value is None:
            return 0.0
        if not self.table.crosses(value):
            return self.made[value]
        return (self.posted if self.table.has_messages else self.made)[value] + self.times.message

    def _compute(self, action: Action, place: Place) -> None:
        start = max(self.now[place.rank], *(self._arrival(step) for step in action.steps))
        time = sum(self.times.of(step, self.share[step.stage]) for step in action.steps)
        if action.parts and self.times.overlap is not None and {step.kind for step in action.parts} == {Kind.F, Kind.B}:
            time = self.times.overlap * self.share[action.stage]
        end = self.now[place.rank] = start + time
        for step in action.steps:
            if (value := self.table.gives(step)) is not None:
                self.made[value] = end
        self.spans[place.rank].append(Span(start, end, action, place))
