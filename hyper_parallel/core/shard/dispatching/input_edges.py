"""Bringing an argument into the layout that an operator wants, with the gradient that the law asks for.

An operator varies along an axis when any input is not whole there. Every whole input then gets only a part of its
gradient on each rank: it enters through an edge that is the identity forward and sums the parts backward.

Note [One reduce-scatter instead of two steps]
A block that was gathered and then enters a varying operator has a gradient that must be summed and then cut again. The
edge knows both: the gradient arrives as a pending sum on the varying axes and leaves in the layout before the gather,
and the planner makes that one reduce-scatter. A tensor that was gathered earlier, by ``redistribute``, remembers what
it was gathered from (``_gathered_from``), so the choice is made here, at its first use: the edge leads to the tensor
before the gather and takes the values of the one behind it.

Note [Remembering the edge]
q, k and v computed from one input must cost one backward all-reduce, not three. So a computed tensor keeps its edges,
by the axes they vary along, for as long as it lives and is not written to. A leaf does not: its edge would keep the
leaf alive, a circle that nobody collects.

Note [Remembering the reduction]
Likewise a partial value that several operators read is reduced once: it remembers the reduced one, and with it the
edges of that. A gathered value is not remembered, since a shard that kept its whole would save no memory; one that is
reduced has the size of the partial value.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.autograd_edges import leaving_edge, move, redistribute_with_grad
from hyper_parallel.core.dtensor.comm_recorder import attributed
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout, Shape
from hyper_parallel.platform import get_platform

_platform = get_platform()


class _SumGradients(_platform.Function):  # type: ignore[name-defined]
    """forward: ``source`` to ``target``; backward: the gradient, a pending sum along some axes, to ``wanted``."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Any, values: Any, source: Layout, target: Layout, arriving: Layout, shape: Shape
    ) -> Any:
        ctx.edge = (arriving, source.gradient(), shape)
        ctx.layouts = (source, target)
        if values is not None:
            return _platform.detached(values)
        return move(_platform.detached(tensor), source, target, shape)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        reduced = attributed("backward: summed where the operator varies", redistribute_with_grad, gradient, *ctx.edge)
        return leaving_edge(reduced, *ctx.layouts), None, None, None, None, None


def _reduced(tensor: DTensor, target: Layout) -> DTensor:
    """A partial value under ``target``; see Note [Remembering the reduction]."""
    needs_grad = _platform.needs_grad(tensor)
    if (needs_grad and tensor.is_leaf) or not _platform.counts_writes(tensor):
        return tensor.redistribute(target.mesh, target)
    key = (target, needs_grad)
    remembered = tensor.__dict__.get("_edges")
    if remembered is not None:
        reduced, versions = remembered.get(key, (None, None))
        if reduced is not None and versions == (tensor._version, reduced._version):
            return reduced
    else:
        remembered = tensor._edges = {}
    reduced = tensor.redistribute(target.mesh, target)
    remembered[key] = (reduced, (tensor._version, reduced._version))
    return reduced


def bring_input(tensor: DTensor, target: Layout, axes: tuple[int, ...]) -> Any:
    """The block of ``tensor`` under ``target`` for an operator that varies along ``axes``, on which it is whole."""
    source = tensor._layout
    if source.has_partial and source is not target:
        tensor, source = _reduced(tensor, target), target
    if not axes or not _platform.needs_grad(tensor):
        if source is target:
            return tensor
        return redistribute_with_grad(tensor, source, target, tuple(tensor._global_shape))
    shape = tuple(tensor._global_shape)
    key = (target, axes)
    remembered = tensor.__dict__.get("_edges")
    if remembered is not None:
        entered, version = remembered.get(key, (None, None))
        if entered is not None and version == tensor._version:
            return entered
    partial = {*axes, *target.reduced_later}
    arriving = target.with_partials(["sum" if axis in partial else None for axis in range(target.mesh.ndim)])
    values = None
    start, start_layout = tensor, source
    origin = tensor.__dict__.get("_gathered_from")
    if source is target:
        values = tensor
        if origin is not None and origin[1] == tensor._version:
            start, start_layout = origin[0], origin[0]._layout
    entered = _platform.without_interception(_SumGradients.apply, start, values, start_layout, target, arriving, shape)
    if not tensor.is_leaf:
        if remembered is None:
            remembered = tensor._edges = {}
        remembered[key] = (entered, tensor._version)
    return entered
