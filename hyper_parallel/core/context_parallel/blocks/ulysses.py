"""Ulysses: between two all-to-alls each rank has the whole sequence for some of the heads.

forward: all-to-all of queries, keys and values to heads, attention, all-to-all of the output back; backward: the same
in reverse. With n ranks, B rows, s tokens a rank, H heads, K key heads of which K' = sum over the ranks of those they
use, widths D and V and e bytes a number, a rank sends about (n - 1) / n * B s (H (D + V) + K' (D + V)) e in each pass.

Where n divides the heads the bits are those of one device: the same kernel works on the same numbers. Ranks whose
heads share a key head each get it, and its gradients are added up; no rank needs a whole group of heads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.context_parallel.blocks.scoring import Scoring
from hyper_parallel.core.context_parallel.blocks.sequence_cut import SequenceCut
from hyper_parallel.core.context_parallel.blocks.visibility import Interval
from hyper_parallel.core.dtensor.comm_recorder import attributed
from hyper_parallel.core.dtensor.layout import chunk_interval
from hyper_parallel.platform import get_platform

_platform = get_platform()

Heads = tuple[Interval, ...]  # which heads each rank gets


def heads_of_ranks(num_heads: int, num_key_heads: int, num_ranks: int) -> tuple[Heads, Heads]:
    """The heads of each rank, and the key heads that they use.

    >>> heads_of_ranks(6, 3, 2), heads_of_ranks(4, 1, 2)
    ((((0, 3), (3, 6)), ((0, 2), (1, 3))), (((0, 2), (2, 4)), ((0, 1), (0, 1))))
    """
    shared = max(num_heads // num_key_heads, 1) if num_key_heads else 1
    heads = tuple(_interval(num_heads, num_ranks, rank) for rank in range(num_ranks))
    keys = tuple((low // shared, -(-high // shared)) if low < high else (0, 0) for low, high in heads)
    return heads, keys


def _interval(size: int, parts: int, index: int) -> Interval:
    start, length = chunk_interval(size, parts, index)
    return start, start + length


def _to_heads(block: Any, heads: Heads, cut: SequenceCut) -> Any:
    """(batch, all heads, own tokens, width) to (batch, own heads, all tokens, width)."""
    low, high = heads[cut.me]
    parts = [
        None if rank == cut.me or start == stop or not block.shape[2] else block.narrow(1, start, stop - start)
        for rank, (start, stop) in enumerate(heads)
    ]
    shapes = [
        None
        if rank == cut.me or low == high or start == stop
        else (block.shape[0], high - low, stop - start, block.shape[3])
        for rank, (start, stop) in enumerate(cut.intervals)
    ]
    started = cut.exchange(parts, shapes, block)
    own = block.narrow(1, low, high - low)
    came = started.wait()
    came[cut.me] = own
    found = [part for part in came if part is not None and part.shape[2]]
    if low == high or not found:
        tokens = cut.intervals[-1][1] - cut.intervals[0][0]
        return _platform.zeros((block.shape[0], high - low, tokens, block.shape[3]), block.dtype, block.device)
    return _platform.cat(found, 2) if len(found) > 1 else _platform.copied(found[0])


def _to_tokens(block: Any, heads: Heads, cut: SequenceCut, num_heads: int) -> Any:
    """The reverse of :func:`_to_heads`; where several ranks have a head, theirs are added up."""
    first = cut.intervals[0][0]
    low, high = heads[cut.me]
    start, stop = cut.mine
    parts = [
        None if rank == cut.me or low == high or begin == end else block.narrow(2, begin - first, end - begin)
        for rank, (begin, end) in enumerate(cut.intervals)
    ]
    shapes = [
        None
        if rank == cut.me or mine == end or start == stop
        else (block.shape[0], end - mine, stop - start, block.shape[3])
        for rank, (mine, end) in enumerate(heads)
    ]
    started = cut.exchange(parts, shapes, block)
    own = block.narrow(2, start - first, stop - start)
    came = started.wait()
    came[cut.me] = own if low < high else None
    found = [(heads[rank], part) for rank, part in enumerate(came) if part is not None]
    if start == stop or not num_heads:
        return _platform.zeros((block.shape[0], num_heads, stop - start, block.shape[3]), block.dtype, block.device)
    if all(before[0][1] == after[0][0] for before, after in itertools.pairwise(found)):
        pieces = [part for _, part in found]
    else:
        pieces = [_sum_of_head(found, head) for head in range(num_heads)]
    return _platform.cat(pieces, 1) if len(pieces) > 1 else _platform.copied(pieces[0])


def _sum_of_head(found: Sequence[tuple[Interval, Any]], head: int) -> Any:
    total = None
    for (low, high), part in found:
        if low <= head < high:
            mine = part.narrow(1, head - low, 1)
            total = mine if total is None else total + mine
    return total


class _ToHeads(_platform.Function):  # type: ignore[name-defined]
    """forward: all-to-all from tokens to heads; backward: all-to-all from heads to tokens, shared heads summed."""

    @staticmethod
    def forward(ctx: Any, block: Any, heads: Heads, cut: SequenceCut) -> Any:
        ctx.how = (heads, cut, block.shape[1])
        return _to_heads(block, heads, cut)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return attributed("backward of attention: ulysses", _to_tokens, gradient, *ctx.how), None, None


class _ToTokens(_platform.Function):  # type: ignore[name-defined]
    """forward: all-to-all from heads to tokens; backward: all-to-all from tokens to heads."""

    @staticmethod
    def forward(ctx: Any, block: Any, heads: Heads, cut: SequenceCut, num_heads: int) -> Any:
        ctx.how = (heads, cut)
        return _to_tokens(block, heads, cut, num_heads)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return attributed("backward of attention: ulysses", _to_heads, gradient, *ctx.how), None, None, None


def attend_ulysses(
    query: Any,
    key: Any,
    value: Any,
    sinks: Any,
    scoring: Scoring,
    cut: SequenceCut,
    attend: Callable[[Any, Any, Any, Any, Scoring], Any],
) -> Any:
    """The output of this rank's queries; ``attend`` computes it for this rank's heads and all tokens of ``cut``."""
    num_heads = query.shape[1]
    shared = max(num_heads // key.shape[1], 1) if key.shape[1] else 1
    heads, key_heads = heads_of_ranks(num_heads, key.shape[1], cut.num_ranks)
    low, high = heads[cut.me]
    query = _ToHeads.apply(query, heads, cut)
    key, value = _ToHeads.apply(key, key_heads, cut), _ToHeads.apply(value, key_heads, cut)
    used = [(head // shared) - key_heads[cut.me][0] for head in range(low, high)]
    if not _is_regular(used, key.shape[1]):
        index = _platform.index_tensor([used], key.device)[0]
        key, value = key.index_select(1, index), value.index_select(1, index)
    if sinks is not None:
        sinks = sinks.narrow(0, low, high - low)
    output = attend(query, key, value, sinks, scoring.of_heads(scoring.first_head + low))
    return _ToTokens.apply(output, heads, cut, num_heads)


def _is_regular(used: list[int], num_key_heads: int) -> bool:
    """Whether equal groups of heads use one key head after the other, which kernels know how to do."""
    if not used or not num_key_heads:
        return True
    each, rest = divmod(len(used), num_key_heads)
    return not rest and used == [head // each for head in range(len(used))]
