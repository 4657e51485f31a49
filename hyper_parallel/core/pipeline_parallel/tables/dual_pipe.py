"""DualPipeV (DeepSeek 2025): two stages a rank in a V, forwards and backwards of different microbatches at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from hyper_parallel.core.pipeline_parallel.action import Action, Kind
from hyper_parallel.core.pipeline_parallel.stage_map import StageMap
from hyper_parallel.core.pipeline_parallel.table import Table
from hyper_parallel.core.pipeline_parallel.tables.counts import demand_counts, demand_microbatches


def dual_pipe_v(ranks: int, microbatches: int) -> Table:
    """Bubble at most (p-1)(F&B + B - 3W)/2 where F&B is the time of both at once; 2p+1 chunks alive."""
    demand_counts("dual_pipe_v", ranks=ranks, microbatches=microbatches)
    demand_microbatches("dual_pipe_v", ranks, microbatches)
    rows = tuple(tuple(_Row(rank, ranks, microbatches).actions()) for rank in range(ranks))
    return Table(StageMap.v(ranks), microbatches, rows, "dual_pipe_v")


class _Row:
    """The list of one rank; turn 0 is its stage on the way down, turn 1 on the way up."""

    def __init__(self, rank: int, ranks: int, microbatches: int) -> None:
        self.rank, self.left, self.microbatches, self.ranks = rank, ranks - 1 - rank, microbatches, ranks
        self.stages = (rank, 2 * ranks - 1 - rank)
        self.forwards, self.backwards = [0, 0], [0, 0]
        self.put_off: deque[Action] = deque()

    def forward(self, turn: int) -> Action:
        self.forwards[turn] += 1
        return Action(Kind.F, self.stages[turn], self.forwards[turn] - 1)

    def backward(self, turn: int, is_split: bool = False) -> Action:
        self.backwards[turn] += 1
        number = self.backwards[turn] - 1
        if is_split:
            self.put_off.append(Action(Kind.W, self.stages[turn], number))
        return Action(Kind.I if is_split else Kind.B, self.stages[turn], number)

    def both(self, turn: int) -> Action:
        return Action.overlap(self.forward(turn), self.backward(1 - turn))

    def actions(self) -> Iterator[Action]:
        for _ in range(2 * self.left):
            yield self.forward(0)
        for _ in range(self.rank + 1):
            yield self.forward(0)
            yield self.forward(1)
        for _ in range(self.left):
            yield self.backward(1, is_split=True)
            yield self.put_off.popleft()
            yield self.forward(1)
        for number in range(self.microbatches - 2 * self.ranks + self.rank + 1):
            if number == 0 and self.left == 0:  # Apart, the turn of the V hands its gradient on sooner.
                yield self.forward(0)
                yield self.backward(1)
            else:
                yield self.both(0)
            yield self.both(1)
        for _ in range(self.left):
            yield self.backward(1)
            yield self.both(1)
        yield from self._drained()

    def _drained(self) -> Iterator[Action]:
        # The later half of the last backwards leaves its weight gradients for the wait at the end.
        whole = self.rank + 1
        for number in range(2 * (self.rank + 1)):
            yield self.backward(1 - number % 2, is_split=number >= whole)
        for _ in range(self.left):
            if self.put_off:
                yield self.put_off.popleft()
            yield self.backward(0, is_split=True)
        yield from self.put_off
