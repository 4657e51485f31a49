"""What each scheme costs a rank, and which is the cheapest: bytes, computation and memory from shapes alone.

Note [The model]
Time is that of forward and backward together on the slowest rank: its share of the scores at the speed of its device,
and the bytes that it sends at the speed of the slowest mesh axis (``set_axis_cost``). A ring computes while it sends; a
gather and Ulysses do not. Who sees whom is asked of the :class:`Visibility`: with causal order, windows and documents
ranks have unequal shares, and a ring sends less. The answer is the same on every rank of the sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hyper_parallel.core.context_parallel.blocks.balance import own_queries, swapped_queries
from hyper_parallel.core.context_parallel.blocks.sequence_cut import super_blocks
from hyper_parallel.core.context_parallel.blocks.ulysses import heads_of_ranks
from hyper_parallel.core.context_parallel.blocks.visibility import ALL, NONE, Interval, Visibility
from hyper_parallel.core.dtensor.layout import Shape
from hyper_parallel.core.dtensor.redistribution_plan import AxisCost

_FLOPS_PER_MICROSECOND = {"cpu": 2e4}
_FLOPS_OF_ACCELERATORS = 1e8
_PIECEWISE = 1.1  # many smaller kernels, and their results joined
_BACKWARD = 2.5  # as much computation as in forward


@dataclass(frozen=True)
class Candidate:
    """A scheme for a layer: ``bytes_sent`` and ``memory`` of the rank that has most, forward and backward together."""

    scheme: str
    is_balanced: bool  # the second halves of queries are swapped
    bytes_sent: int
    compute: float  # microseconds
    time: float
    memory: int  # what is needed besides queries, keys, values, the output and their gradients
    ulysses_size: int = 1

    @property
    def name(self) -> str:
        return f"{self.scheme} with swapped queries" if self.is_balanced else self.scheme


@dataclass(frozen=True)
class Problem:
    """Attention over a sharded sequence, as the ranks along it see it; heads are those of one rank."""

    query_shape: Shape  # batch, heads, all tokens, width
    key_shape: Shape
    value_shape: Shape
    intervals: tuple[Interval, ...]
    sizes: tuple[int, ...]  # of the mesh axes that shard the tokens
    item_size: int
    device_type: str
    costs: tuple[AxisCost, ...]

    def candidates(self, visible: Visibility) -> list[Candidate]:
        """All schemes that can do it."""
        own, swapped = own_queries(self.intervals), swapped_queries(self.intervals)
        found = []
        for queries, is_balanced in ((own, False), (swapped, True)):
            found.append(self._gather(visible, queries, is_balanced))
            found.append(self._ring(visible, queries, is_balanced))
        found.append(self._ulysses(visible))
        ulysses_size = self.ulysses_size()
        if ulysses_size is not None:
            found.append(self._hybrid(visible, ulysses_size))
        return found

    def ulysses_size(self) -> int | None:
        """How many ranks exchange heads in a hybrid: those of the last axis, or of one axis the largest divisor of its
        size that divides the heads; None where there is none."""
        if len(self.sizes) > 1:
            return self.sizes[-1]
        whole = self.sizes[0]
        fitting = [size for size in range(2, whole) if whole % size == 0 and self.query_shape[1] % size == 0]
        return max(fitting, default=None)

    # ---------------------------------------------------------------- the schemes

    @property
    def _largest(self) -> int:
        return max(stop - start for start, stop in self.intervals)

    def _block(self, tokens: int) -> int:
        """Bytes of the keys and values of some tokens."""
        batch, key_heads, _, width = self.key_shape
        return batch * key_heads * tokens * (width + self.value_shape[3]) * self.item_size

    def _halves(self) -> int:
        """Bytes of half of a rank's queries and outputs."""
        batch, heads, _, width = self.query_shape
        return batch * heads * (self._largest // 2) * (width + self.value_shape[3]) * self.item_size

    def _gather(self, visible: Visibility, queries: Sequence[Sequence[Interval]], is_balanced: bool) -> Candidate:
        num, block = len(self.intervals), self._block(self._largest)
        sent = 2 * (num - 1) * block + (2 * self._halves() if is_balanced else 0)
        compute = self._compute(visible, queries)
        calls = 4 + (4 if is_balanced else 0)
        time = compute + self._moving(sent, calls)
        return Candidate("gather", is_balanced, sent, compute, time, 4 * num * block)

    def _ring(self, visible: Visibility, queries: tuple[tuple[Interval, ...], ...], is_balanced: bool) -> Candidate:
        num, block = len(self.intervals), self._block(self._largest)
        sees = visible.who_sees_whom(queries, self.intervals)
        most = 0
        for rank, (start, stop) in enumerate(self.intervals):
            gives = sum(sees[other][rank] for other in range(num) if other != rank)
            gets = [self.intervals[other] for other in range(num) if other != rank and sees[rank][other]]
            home = sum(self._block(high - low) for low, high in gets)
            most = max(most, 2 * gives * self._block(stop - start) + home)
        sent = most + (2 * self._halves() if is_balanced else 0)
        compute = self._compute(visible, queries)
        extra = self._moving(2 * self._halves(), 4) if is_balanced else 0
        not_hidden = max(0.0, self._moving(most, 0) - compute)
        time = _PIECEWISE * compute + not_hidden + extra + self._moving(0, 6 * (num - 1))
        return Candidate("ring", is_balanced, sent, compute, time, 4 * block)

    def _head_bytes(self, num: int) -> int:
        """Bytes that a rank sends when ``num`` ranks exchange tokens for heads and back, in one pass."""
        batch, num_heads, _, width = self.query_shape
        heads, key_heads = heads_of_ranks(num_heads, self.key_shape[1], num)
        others = slice(1, None)  # the first rank has as many heads as any
        count = sum(high - low for low, high in heads[others]) + sum(high - low for low, high in key_heads[others])
        return batch * count * self._largest * (width + self.value_shape[3]) * self.item_size

    def _ulysses(self, visible: Visibility) -> Candidate:
        num = len(self.intervals)
        share = heads_of_ranks(self.query_shape[1], self.key_shape[1], num)[0][0]
        everything = ((0, self.intervals[-1][1]),)
        compute = self._compute(visible, (everything,), (share[1] - share[0]) / max(self.query_shape[1], 1))
        sent = 2 * self._head_bytes(num)
        time = compute + self._moving(sent, 8)
        return Candidate("ulysses", False, sent, compute, time, sent)

    def _hybrid(self, visible: Visibility, ulysses_size: int) -> Candidate:
        blocks = super_blocks(self.intervals, ulysses_size)
        heads, key_heads = heads_of_ranks(self.query_shape[1], self.key_shape[1], ulysses_size)
        num_heads, num_keys = heads[0][1] - heads[0][0], key_heads[0][1] - key_heads[0][0]
        inner = Problem(
            (self.query_shape[0], num_heads, *self.query_shape[2:]),
            (self.key_shape[0], num_keys, *self.key_shape[2:]),
            (self.value_shape[0], num_keys, *self.value_shape[2:]),
            blocks,
            (len(blocks),),
            self.item_size,
            self.device_type,
            self.costs,
        )
        ring = inner._ring(visible, own_queries(blocks), False)
        sent = 2 * self._head_bytes(ulysses_size)
        time = ring.time + self._moving(sent, 8)
        memory = ring.memory + sent
        return Candidate("hybrid", False, ring.bytes_sent + sent, ring.compute, time, memory, ulysses_size)

    # ---------------------------------------------------------------- what they are made of

    def _compute(self, visible: Visibility, queries: Sequence[Sequence[Interval]], share: float = 1.0) -> float:
        """Microseconds of the rank with most scores; ``share`` of the heads."""
        batch, heads, _, width = self.query_shape
        flops = 2 * batch * heads * share * (width + self.value_shape[3]) * (1 + _BACKWARD)
        scores = max(_num_scores(visible, mine, self.intervals) for mine in queries)
        return flops * scores / _FLOPS_PER_MICROSECOND.get(self.device_type, _FLOPS_OF_ACCELERATORS)

    def _moving(self, num_bytes: int, calls: int) -> float:
        slowest = min(cost.bandwidth for cost in self.costs)
        return num_bytes / slowest + calls * max(cost.latency for cost in self.costs)


def _num_scores(visible: Visibility, queries: Sequence[Interval], keys: Sequence[Interval]) -> float:
    """About how many scores these queries have with all keys."""
    total = 0.0
    for mine in queries:
        for theirs in keys:
            relation = visible.relation(mine, theirs)
            if relation != NONE:
                area = (mine[1] - mine[0]) * (theirs[1] - theirs[0])
                total += area if relation == ALL else area * _share(visible, mine, theirs)
    return total


def _share(visible: Visibility, queries: Interval, keys: Interval) -> float:
    """About which share of the pairs of two intervals see each other, from some of the queries; remembered."""
    asked = ("share", queries, keys)
    if asked not in visible.known:
        visible.known[asked] = _find_share(visible, queries, keys)
    return visible.known[asked]


def _find_share(visible: Visibility, queries: Interval, keys: Interval) -> float:
    positions, documents, valid = (visible.hosted.get(name) for name in ("positions", "documents", "valid"))
    rows = np.linspace(queries[0], queries[1] - 1, min(queries[1] - queries[0], 64)).astype(np.int64)
    columns = np.arange(*keys)
    mine, theirs = rows[None] + visible.offset, columns[None]
    if positions is not None:
        mine, theirs = positions[:, rows], positions[:, columns]
    ahead = theirs[:, None, :] - mine[:, :, None]
    seen = np.ones_like(ahead, bool)
    if visible.right is not None:
        seen = seen & (ahead <= visible.right)
    if visible.left is not None:
        seen = seen & (ahead >= -visible.left)
    if documents is not None:
        seen = seen & (documents[:, rows, None] == documents[:, None, columns])
    if valid is not None:
        seen = seen & (valid[:, None, columns] != 0)
    return float(seen.mean()) if seen.size else 0.0


def cheapest(
    candidates: Sequence[Candidate], scheme: str, memory_cap: float = math.inf, balance: bool | None = None
) -> Candidate:
    """The fastest of those that are asked for; with "auto" of those that need no more memory than ``memory_cap``, or
    where all need more, the one that needs least."""
    asked = [candidate for candidate in candidates if scheme in ("auto", candidate.scheme)]
    asked = [one for one in asked if balance in (None, one.is_balanced)] or asked
    fitting = [candidate for candidate in asked if candidate.memory <= memory_cap or scheme != "auto"]
    if not fitting:
        return min(asked, key=lambda candidate: (candidate.memory, candidate.time))
    return min(fitting, key=lambda candidate: candidate.time)


def described(candidates: Sequence[Candidate], chosen: Candidate) -> str:
    """The candidates as a table, cheapest first, with the chosen one marked."""
    rows = [("scheme", "bytes sent", "memory", "computation", "modelled time")]
    for candidate in sorted(candidates, key=lambda one: one.time):
        mark = " <- chosen" if candidate is chosen else ""
        rows.append(
            (
                candidate.name,
                str(candidate.bytes_sent),
                str(candidate.memory),
                f"{candidate.compute:.1f} us",
                f"{candidate.time:.1f} us{mark}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
