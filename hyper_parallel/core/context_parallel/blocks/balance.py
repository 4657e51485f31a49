"""Balance without another order of the tokens: ranks r and n - 1 - r swap the second halves of their queries.

With causal attention the last rank's queries see nearly all keys and the first rank's nearly none. After the swap every
rank has as many of the ones as of the others. forward: half of the queries go to the partner and half of the outputs
come back, B H (s / 2) (D + V) e bytes a rank; backward: the same for their gradients.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.context_parallel.blocks.sequence_cut import SequenceCut
from hyper_parallel.core.context_parallel.blocks.visibility import Interval
from hyper_parallel.core.dtensor.comm_recorder import attributed
from hyper_parallel.platform import get_platform

_platform = get_platform()


def own_queries(intervals: tuple[Interval, ...]) -> tuple[tuple[Interval, ...], ...]:
    """The queries of each rank when all stay where they are."""
    return tuple((interval,) for interval in intervals)


def swapped_queries(intervals: tuple[Interval, ...]) -> tuple[tuple[Interval, ...], ...]:
    """The queries of each rank after the swap: its own first half and its partner's second.

    >>> swapped_queries(((0, 4), (4, 8)))
    (((0, 2), (6, 8)), ((4, 6), (2, 4)))
    """
    return tuple(
        ((start, _middle((start, stop))), (_middle(partner), partner[1]))
        for (start, stop), partner in zip(intervals, reversed(intervals), strict=True)
    )


def _middle(interval: Interval) -> int:
    return (interval[0] + interval[1] + 1) // 2


def _swap(block: Any, cut: SequenceCut, is_back: bool) -> Any:
    """The rows behind this rank's own first half go to the partner; the partner's come in their place."""
    partner = cut.num_ranks - 1 - cut.me
    parts: list[Any] = [None] * cut.num_ranks
    shapes: list[Any] = [None] * cut.num_ranks
    if partner == cut.me:  # of an odd number of ranks the one in the middle, which all the others expect to take part
        cut.exchange(parts, shapes, block).wait()
        return _platform.copied(block)
    kept = _middle(cut.mine) - cut.mine[0]
    mine, theirs = (cut.intervals[rank][1] - _middle(cut.intervals[rank]) for rank in (cut.me, partner))
    sent, coming = (theirs, mine) if is_back else (mine, theirs)
    parts[partner] = block.narrow(2, kept, sent) if sent else None
    shapes[partner] = (*block.shape[:2], coming, block.shape[3]) if coming else None
    came = cut.exchange(parts, shapes, block).wait()[partner]
    own = block.narrow(2, 0, kept)
    return _platform.copied(own) if came is None else _platform.cat([own, came], 2)


class _Swap(_platform.Function):  # type: ignore[name-defined]
    """forward: second halves are swapped; backward: they are swapped back."""

    @staticmethod
    def forward(ctx: Any, block: Any, cut: SequenceCut, is_back: bool) -> Any:
        ctx.how = (cut, is_back)
        return _swap(block, cut, is_back)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        cut, is_back = ctx.how
        return attributed("backward of attention: balance", _swap, gradient, cut, not is_back), None, None


def swap_queries(block: Any, cut: SequenceCut) -> Any:
    """This rank's queries after the swap, :func:`swapped_queries`; recorded."""
    return _Swap.apply(block, cut, False)


def swap_back(block: Any, cut: SequenceCut) -> Any:
    """The outputs of this rank's own queries, from those of the queries that it had; recorded."""
    return _Swap.apply(block, cut, True)
