"""Gathered keys: every rank has its own queries and all keys.

forward: all-gather of keys and values, (n - 1) blocks of each sent per rank; backward: reduce-scatter of their
gradients, the same again. Per rank and layer, with B rows, K key heads, s tokens a rank, widths D and V, e bytes a
number: (n - 1) B K s (D + V) e in forward and as much in backward. Memory: all keys and values, and in backward their
gradients.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.context_parallel.blocks.alone import attend_alone
from hyper_parallel.core.context_parallel.blocks.scoring import Scoring
from hyper_parallel.core.context_parallel.blocks.visibility import Interval
from hyper_parallel.core.dtensor.autograd_edges import move
from hyper_parallel.core.dtensor.layout import Layout, Shape
from hyper_parallel.platform import get_platform

_platform = get_platform()


class _GatherKeys(_platform.Function):  # type: ignore[name-defined]
    """forward: all ranks' blocks of the sequence; backward: their gradients summed, and this rank's block of that."""

    @staticmethod
    def forward(ctx: Any, block: Any, layout: Layout, shape: Shape, axes: tuple[int, ...]) -> Any:
        whole = Layout.of(layout.mesh, [() if dim == 2 else cut for dim, cut in enumerate(layout.shard_axes)])
        pending = ["sum" if axis in axes else None for axis in range(layout.mesh.ndim)]
        ctx.edge = (whole.with_partials(pending), layout.gradient(), shape)
        return _platform.detached(move(_platform.detached(block), layout, whole.with_partials(layout.partials), shape))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return move(gradient, *ctx.edge), None, None, None


def attend_gathered(
    query: Any,
    key: Any,
    value: Any,
    sinks: Any,
    scoring: Scoring,
    layouts: tuple[Layout, Layout],
    shapes: tuple[Shape, Shape],
    axes: tuple[int, ...],
    intervals: tuple[Interval, ...],
) -> Any:
    """The output of this rank's queries; ``layouts`` and ``shapes`` are those of keys and values."""
    key = _GatherKeys.apply(key, layouts[0], shapes[0], axes)
    value = _GatherKeys.apply(value, layouts[1], shapes[1], axes)
    return attend_alone(query, key, value, sinks, scoring, intervals)
