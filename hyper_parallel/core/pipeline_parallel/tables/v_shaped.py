"""ZBV, V-Half and V-Min (Qi 2024): two stages a rank, down the ranks and up again, for zero bubble or little memory.

Note [A block that repeats]
V-Half and V-Min repeat one block of six slots for each microbatch: F, I, W of both stages. How far the block moves from
rank to rank, down and up, in forward and in backward, sets how long activations live. The gaps at the three turns are
searched: the first where no two actions of a rank share a slot, with the shortest lives.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from hyper_parallel.core.pipeline_parallel.action import Action, Kind
from hyper_parallel.core.pipeline_parallel.stage_map import StageMap
from hyper_parallel.core.pipeline_parallel.table import Table
from hyper_parallel.core.pipeline_parallel.tables.counts import demand_counts

_SLOTS = 6
Moves = tuple[int, int, int, int]


def v_half(ranks: int, microbatches: int) -> Table:
    """About half of 1F1B's activation memory and some 0.6 of its bubble."""
    return _repeated("v_half", ranks, microbatches, (2, 1, 2, 1))


def v_min(ranks: int, microbatches: int) -> Table:
    """About a third of 1F1B's activation memory; unless F = I = W the bubble grows with the microbatches."""
    return _repeated("v_min", ranks, microbatches, (1, 1, 1, 1))


def zbv(ranks: int, microbatches: int) -> Table:
    """1F1B's memory on rank 0 on every rank; no idle time inside a rank when F = I = W."""
    demand_counts("zbv", ranks=ranks, microbatches=microbatches)
    full = max(2 * ranks - 1, microbatches)  # The pipeline is filled; what is too many is left out again.
    rows = tuple(
        tuple(action for action in _zbv_row(rank, ranks, full) if (action.microbatch or 0) < microbatches)
        for rank in range(ranks)
    )
    return Table(StageMap.v(ranks), microbatches, rows, "zbv")


class Counter:
    """Actions of one rank, each kind and stage in the order of the microbatches."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.stages = (rank, 2 * ranks - 1 - rank)
        self._next: dict[tuple[Kind, int], int] = {}

    def count(self, kind: Kind, turn: int) -> int:
        """How many there were, of the stage on the way down (0) or up (1)."""
        return self._next.get((kind, turn), 0)

    def take(self, kind: Kind, turn: int) -> Action:
        """The next one."""
        number = self.count(kind, turn)
        self._next[kind, turn] = number + 1
        return Action(kind, self.stages[turn], number)


def _zbv_row(rank: int, ranks: int, microbatches: int) -> Iterator[Action]:
    counter = Counter(rank, ranks)
    take, count = counter.take, counter.count
    for _ in range(2 * (ranks - rank) - 1):
        yield take(Kind.F, 0)
    for _ in range(rank):
        yield take(Kind.F, 1)
        yield take(Kind.F, 0)
    for _ in range(ranks - rank):
        for kind in (Kind.F, Kind.I, Kind.W):
            yield take(kind, 1)
    while count(Kind.F, 1) < microbatches:
        if count(Kind.F, 0) < microbatches:
            yield take(Kind.F, 0)
        yield take(Kind.I, 0)
        yield take(Kind.W, 0)
        for kind in (Kind.F, Kind.I, Kind.W):
            yield take(kind, 1)
    for _ in range(rank):
        yield take(Kind.I, 0)
        yield take(Kind.I, 1)
    for _ in range(ranks - rank):
        yield take(Kind.I, 0)
        yield take(Kind.W, 0)
    for turn in (1, 0):
        while count(Kind.W, turn) < count(Kind.I, turn):
            yield take(Kind.W, turn)


def _repeated(name: str, ranks: int, microbatches: int, moves: Moves) -> Table:
    demand_counts(name, ranks=ranks, microbatches=microbatches)
    rows = []
    for rank, block in enumerate(_block(ranks, moves)):
        down, up = rank, 2 * ranks - 1 - rank
        owners = ((Kind.F, down), (Kind.F, up), (Kind.I, up), (Kind.I, down), (Kind.W, up), (Kind.W, down))
        timed = sorted(
            (slot + _SLOTS * one, kind.value, stage, one)
            for slot, (kind, stage) in zip(block, owners, strict=True)
            for one in range(microbatches)
        )
        rows.append(tuple(Action(Kind(kind), stage, one) for _, kind, stage, one in timed))
    return Table(StageMap.v(ranks), microbatches, tuple(rows), name)


@functools.cache
def _block(ranks: int, moves: Moves) -> tuple[tuple[int, ...], ...]:
    """The slots of F down, F up, I up, I down, W up, W down of each rank; see Note [A block that repeats]."""
    best: tuple[int, int, list[tuple[int, ...]]] | None = None
    for gaps in itertools.product(range(1, _SLOTS + 1), repeat=3):
        rows = [_with_weights(row) for row in _turns(ranks, moves, gaps)]
        if any(row is None for row in rows):
            continue
        found = [row for row in rows if row is not None]
        lives = max(row[4] - row[1] + row[5] - row[0] for row in found)
        if best is None or (lives, sum(gaps)) < best[:2]:
            best = (lives, sum(gaps), found)
    assert best is not None, f"no block of {ranks} ranks with moves {moves}"
    return tuple(best[2])


def _turns(ranks: int, moves: Moves, gaps: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    bottom = moves[0] * (ranks - 1) + gaps[0]
    top = bottom + moves[1] * (ranks - 1) + gaps[1]
    back = top + moves[2] * (ranks - 1) + gaps[2]
    for rank in range(ranks):
        left = ranks - 1 - rank
        yield moves[0] * rank, bottom + moves[1] * left, top + moves[2] * rank, back + moves[3] * left


def _with_weights(row: tuple[int, ...]) -> tuple[int, ...] | None:
    """The row with its weight gradients in the two free slots, as early as they can be; None if slots are shared."""
    free = set(range(_SLOTS)) - {slot % _SLOTS for slot in row}
    if len(free) != _SLOTS - len(row):
        return None
    up, down = row[2:]
    choices = [
        (up + (one - up) % _SLOTS, down + (other - down) % _SLOTS)
        for one, other in itertools.permutations(sorted(free))
    ]
    return (*row, *min(choices, key=sum))
