"""Attention of queries over keys that this rank holds, whole: nothing is communicated."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.context_parallel.blocks.scoring import Scoring
from hyper_parallel.core.context_parallel.blocks.tiles import Found, Gradients, QueryTiles, zeros_like
from hyper_parallel.core.context_parallel.blocks.visibility import Interval
from hyper_parallel.platform import get_platform

_platform = get_platform()


class _Attend(_platform.Function):  # type: ignore[name-defined]
    """forward: output of the queries; backward: the gradients from output and log-sum-exp. Nothing travels."""

    @staticmethod
    def forward(
        ctx: Any, query: Any, key: Any, value: Any, sinks: Any, scoring: Scoring, intervals: tuple[Interval, ...]
    ) -> Any:
        tiles = QueryTiles(scoring, intervals)
        found = Found(tiles, query, value.shape[-1])
        found.add(key, value, (0, key.shape[-2]))
        output, sums = found.result(sinks)
        ctx.tiles, ctx.has_sinks = tiles, sinks is not None
        ctx.save_for_backward(query, key, value, output, sums, *([sinks] if sinks is not None else []))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        query, key, value, output, sums, *sinks = ctx.saved_tensors
        gradients = Gradients(ctx.tiles, gradient, query, output, sums)
        of_blocks = gradients.of_block(key, value, (0, key.shape[-2]))
        of_key, of_value = (
            zeros_like(whole) if part is None else _platform.tensor_type_cast(part, whole.dtype)
            for part, whole in zip(of_blocks, (key, value), strict=True)
        )
        of_sinks = gradients.of_sinks(sinks[0]) if ctx.has_sinks else None
        return gradients.of_query(), of_key, of_value, of_sinks, None, None


def attend_alone(
    query: Any, key: Any, value: Any, sinks: Any, scoring: Scoring, intervals: tuple[Interval, ...] | None = None
) -> Any:
    """The output of queries with these global indices over all keys; recorded."""
    intervals = ((0, query.shape[-2]),) if intervals is None else intervals
    if 0 in query.shape:
        intervals = ()
    return _Attend.apply(query, key, value, sinks, scoring, intervals)
