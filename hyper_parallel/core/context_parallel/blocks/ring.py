"""Ring attention: queries stay, blocks of keys and values come to them, and no rank ever holds more than a few blocks.

At step t each rank sends its own keys and values straight to the rank t places on that sees any of them, while it
computes with those that came at the step before. They travel in pieces of a block, so that in flight there is little. A
pair of ranks that do not see each other sends nothing.

forward: n - 1 steps of keys and values; backward: the same again, and n - 1 steps in which the gradients of a block go
straight home. With B rows, K key heads, s tokens a rank, widths D and V and e bytes a number, a step sends
B K s (D + V) e: (n - 1) B K s (D + V) e in forward and twice that in backward where all ranks see all others. Under a
causal mask the ranks send half of it on average; in zigzag order, where their work is equal, three quarters: from a
rank's last stretch only those go that begin before it.

Note [Gradients go home at once]
A gradient that travels on from rank to rank and collects the others' needs n steps to come home. Here each rank's part
goes to its owner when it is computed, rounded to the type of the keys once, and is added up there in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.context_parallel.blocks.merge import working_precision
from hyper_parallel.core.context_parallel.blocks.scoring import Scoring
from hyper_parallel.core.context_parallel.blocks.sequence_cut import Exchange, SequenceCut
from hyper_parallel.core.context_parallel.blocks.tiles import Found, Gradients, QueryTiles, zeros_like
from hyper_parallel.core.context_parallel.blocks.visibility import Interval, Visibility
from hyper_parallel.core.dtensor.comm_recorder import attributed
from hyper_parallel.core.dtensor.layout import Shape, chunk_interval
from hyper_parallel.platform import get_platform

_platform = get_platform()

Queries = tuple[tuple[Interval, ...], ...]  # the tokens of each rank's queries


class _Steps:
    """Which keys go where at which step; the same on every rank.

    The first step is that of a rank's own keys, which lie there. From then on keys travel in pieces, of which those
    that no rank sees are left out.
    """

    def __init__(
        self,
        cut: SequenceCut,
        queries: Queries,
        visible: Visibility,
        shapes: tuple[Shape, Shape],
    ) -> None:
        self._cut = cut
        self._shapes = shapes
        count = _num_pieces(cut.intervals, queries, visible)
        self._pieces = tuple(_pieces_of(interval, count) for interval in cut.intervals)
        flat = tuple(piece for pieces in self._pieces for piece in pieces)
        sees = visible.who_sees_whom(queries, flat)
        num = cut.num_ranks
        self._sees = [[sees[rank][owner * count : (owner + 1) * count] for owner in range(num)] for rank in range(num)]
        self._schedule = [(0, 0)]
        for distance in range(1, num):
            for piece in range(count):
                if any(self._sees[rank][(rank - distance) % num][piece] for rank in range(num)):
                    self._schedule.append((distance, piece))
        self.num_steps = len(self._schedule)

    def keys(self, step: int) -> Interval:
        """Which keys this rank has at a step, if they come."""
        distance, piece = self._schedule[step]
        return self._pieces[(self._cut.me - distance) % self._cut.num_ranks][piece] if distance else self._cut.mine

    def send_keys(self, step: int, blocks: tuple[Any, Any]) -> list[Exchange] | None:
        """Start bringing the keys and values of a step; None behind the last one."""
        if step >= self.num_steps:
            return None
        distance, piece = self._schedule[step]
        me, num = self._cut.me, self._cut.num_ranks
        target, owner = (me + distance) % num, (me - distance) % num
        parts = [_rows(block, self._pieces[me][piece], self._cut.mine[0]) for block in blocks]
        sends, comes = self._sees[target][me][piece], self._sees[me][owner][piece]
        return self._start(target if sends else None, parts, owner if comes else None, self._pieces[owner][piece])

    def send_home(self, step: int, gradients: Sequence[Any]) -> list[Exchange] | None:
        """Start bringing the gradients of a step's keys to their owner; None for its own."""
        distance, piece = self._schedule[step]
        if not distance:
            return None
        me, num = self._cut.me, self._cut.num_ranks
        giver, owner = (me + distance) % num, (me - distance) % num
        goes, comes = self._sees[me][owner][piece], self._sees[giver][me][piece]
        return self._start(owner if goes else None, gradients, giver if comes else None, self._pieces[me][piece])

    def place_at_home(self, step: int) -> int:
        """Where in a rank's own block the gradients begin that come home for a step."""
        return self._pieces[self._cut.me][self._schedule[step][1]][0] - self._cut.mine[0]

    def _start(self, target: int | None, blocks: Sequence[Any], giver: int | None, keys: Interval) -> list[Exchange]:
        """Both tensors on their way, where they are equally wide in one message."""
        shapes = [(*whole[:2], keys[1] - keys[0], whole[3]) for whole in self._shapes]
        if shapes[0] == shapes[1]:
            shapes = [(2 * shapes[0][0], *shapes[0][1:])]
            blocks = [_platform.cat(list(blocks))] if target is not None else blocks[:1]
        started = []
        for block, shape in zip(blocks, shapes, strict=True):
            parts: list[Any] = [None] * self._cut.num_ranks
            expected: list[Shape | None] = [None] * self._cut.num_ranks
            if target is not None:
                parts[target] = block
            if giver is not None:
                expected[giver] = shape
            started.append(self._cut.exchange(parts, expected, block))
        return started


_SMALLEST_PIECE = 256  # tokens; kernels take much longer over fewer keys


def _num_pieces(intervals: tuple[Interval, ...], queries: Queries, visible: Visibility) -> int:
    """In how many pieces keys travel: in flight are then parts of blocks only.

    Two at least where coordinates say who sees whom: in zigzag order some ranks see the first half of a block only.
    """
    most = 2 if len(intervals) == 2 or any(len(mine) > 1 for mine in queries) else 4
    longest = max(stop - start for start, stop in intervals)
    least = 2 if not visible.only_index and longest > 1 else 1
    return max(least, min(most, longest // _SMALLEST_PIECE))


def _pieces_of(interval: Interval, count: int) -> tuple[Interval, ...]:
    start, stop = interval
    places = [chunk_interval(stop - start, count, piece) for piece in range(count)]
    return tuple((start + low, start + low + length) for low, length in places)


def _rows(block: Any, keys: Interval, first: int) -> Any:
    length = keys[1] - keys[0]
    return block if length == block.shape[-2] else block.narrow(-2, keys[0] - first, length)


def _came(started: list[Exchange] | None) -> tuple[Any, ...]:
    """The two tensors that came, if any."""
    if started is None:
        return ()
    found = [part for exchange in started for part in exchange.wait() if part is not None]
    if len(found) == 1:
        rows = found[0].shape[0] // 2
        return found[0].narrow(0, 0, rows), found[0].narrow(0, rows, rows)
    return tuple(found)


class _Ring(_platform.Function):  # type: ignore[name-defined]
    """forward: n - 1 steps of keys and values; backward: these again, and n - 1 steps of their gradients."""

    @staticmethod
    def forward(
        ctx: Any, query: Any, key: Any, value: Any, sinks: Any, scoring: Scoring, cut: SequenceCut, queries: Queries
    ) -> Any:
        steps = _Steps(cut, queries, scoring.visible, (key.shape, value.shape))
        tiles = QueryTiles(scoring, () if 0 in query.shape else queries[cut.me])
        found = Found(tiles, query, value.shape[-1])
        key, value = key.contiguous(), value.contiguous()
        arrived: tuple[Any, ...] = (key, value)
        for step in range(steps.num_steps):
            started = steps.send_keys(step + 1, (key, value))
            if arrived:
                found.add(arrived[0], arrived[1], steps.keys(step))
            arrived = _came(started)
        output, sums = found.result(sinks)
        ctx.how = (tiles, steps)
        ctx.save_for_backward(query, key, value, output, sums, *([sinks] if sinks is not None else []))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return attributed("backward of attention: ring", _backward, ctx, gradient)


def _backward(ctx: Any, gradient: Any) -> Any:
    query, key, value, output, sums, *sinks = ctx.saved_tensors
    tiles, steps = ctx.how
    gradients = Gradients(tiles, gradient, query, output, sums)
    arrived: tuple[Any, ...] = (key, value)
    totals: list[Any] = []
    going_home = None

    def at_home(step: int) -> None:
        for index, part in enumerate(_came(going_home)):
            totals[index] = _platform.add_rows(working_precision(totals[index]), part, steps.place_at_home(step))

    for step in range(steps.num_steps):
        started = steps.send_keys(step + 1, (key, value))
        parts: Sequence[Any] = (key, value)  # of the right type where nothing is sent
        if arrived:
            found = gradients.of_block(arrived[0], arrived[1], steps.keys(step))
            parts = [_typed(part, like) for part, like in zip(found, arrived, strict=True)]
            del found
        if step == 0:
            totals = list(parts)
        at_home(step - 1)
        arrived = _came(started)
        going_home = steps.send_home(step, parts)
        del parts, started
    at_home(steps.num_steps - 1)
    of_key, of_value = (_typed(total, like) for total, like in zip(totals, (key, value), strict=True))
    of_sinks = gradients.of_sinks(sinks[0]) if sinks else None
    return gradients.of_query(), of_key, of_value, of_sinks, None, None, None


def _typed(part: Any, like: Any) -> Any:
    return zeros_like(like) if part is None else _platform.tensor_type_cast(part, like.dtype)


def attend_ring(
    query: Any, key: Any, value: Any, sinks: Any, scoring: Scoring, cut: SequenceCut, queries: Queries
) -> Any:
    """The output of this rank's queries, ``queries[cut.me]``, over the keys that ``cut`` shards; recorded."""
    return _Ring.apply(query, key, value, sinks, scoring, cut, queries)
