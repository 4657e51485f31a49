"""The edges of the autograd graph where layouts change; each edge's gradient follows from the layouts alone.

A value that is cut has its gradient cut the same way; a value that is whole, or a pending sum, has its gradient whole
on every rank. So the gradient of any redistribution is the redistribution between the gradients' layouts.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.comm_recorder import attributed
from hyper_parallel.core.dtensor.layout import Layout, Shape
from hyper_parallel.core.dtensor.mesh_transfer import launch_transfer, outside_shape, transfer_local
from hyper_parallel.core.dtensor.shard_sizes import finish_checks
from hyper_parallel.core.dtensor.tensor_redistribution import Done, launch_redistribution, redistribute_local
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.checks.taps import inside_of_lines, one_operator

_platform = get_platform()

# Note [Reductions with a gradient of their own]
# The gradient of a sum is the same for every summand, and an average's is up to a factor: a law of layouts is enough.
# Of a maximum, a minimum or a product every rank's block has a gradient of its own. So these are done, or made pending,
# one axis at a time by edges that know them; what is left for the redistribution itself is linear. As a gradient's
# layout a pending maximum has Replicate() like every pending reduction, but there the ranks' blocks are their own.
_NON_LINEAR = frozenset({"max", "min", "prod"})

# Note [Gradients of gradients]
# The gradient of a pending sum is whole, and the next thing it meets is the backward of the operator that made the
# summand, which varies from rank to rank. Differentiated once more, each rank has only its part of that: so the
# gradient leaves the edge through ``vary``, the identity whose own gradient is summed over the ranks.


@one_operator
def move(local: Any, source: Layout, target: Layout, shape: Shape) -> Any:
    """The block under ``target`` of a tensor with block ``local`` under ``source``, on one mesh or between two; no
    grad.
    """
    if source is target:
        return local
    finish_checks()
    if source.mesh == target.mesh:
        return redistribute_local(local, source, target, shape)
    return transfer_local(local, source, target, shape)


def begun_later() -> list[Any]:
    """Where :class:`Redistribute` leaves the handle of a move that it only launches."""
    inside_of_lines("a redistribution is started and completed later (async_op=True)")
    return []


def launch_move(local: Any, source: Layout, target: Layout, shape: Shape) -> Any:
    """As :func:`move`, but the last step is only launched: a handle whose ``wait()`` gives the block."""
    finish_checks()
    if source.mesh == target.mesh:
        return launch_redistribution(local, source, target, shape)
    if target.has_partial:
        return Done(transfer_local(local, source, target, shape))
    return launch_transfer(local, source, target, shape)


class Redistribute(_platform.Function):  # type: ignore[name-defined]
    """forward: ``source`` to ``target``; backward: the gradient from ``target``'s to ``source``'s gradient layout."""

    @staticmethod
    def forward(
        ctx: Any, tensor: Any, source: Layout, target: Layout, shape: Shape, in_flight: list[Any] | None = None
    ) -> Any:
        """With ``in_flight`` the move is only launched: its handle goes there, the result is memory to be filled."""
        ctx.edge = (source, target, shape)
        if in_flight is None:
            # What is moved may be a view of a larger buffer; as a view it could not be written to in place.
            return _platform.detached(move(_platform.detached(tensor), source, target, shape))
        in_flight.append(launch_move(_platform.detached(tensor), source, target, shape))
        return unset_block(tensor, target, shape)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        source, target, shape = ctx.edge
        gradient = _entering_edge(gradient, source, target)
        factor = _average_factor(target) / _average_factor(source)
        if factor != 1:
            gradient = gradient * _platform.number_like(factor, gradient)
        edge = (target.gradient(), source.gradient(), shape)
        gradient = attributed("backward of redistribute", redistribute_with_grad, gradient, *edge)
        return leaving_edge(gradient, source, target), None, None, None, None


class AsPartialExtreme(_platform.Function):  # type: ignore[name-defined]
    """forward: whole to a pending max, min or prod on an axis; backward: the summands' gradients, summed."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, source: Layout, target: Layout, axis: int, shape: Shape) -> Any:
        ctx.edge = (target.mesh, target.partials[axis], axis)
        return _platform.detached(move(_platform.detached(tensor), source, target, shape))

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        mesh, op, axis = ctx.edge
        if op == "prod" and not mesh.leads((axis,)):
            gradient = gradient * 0
        return _platform.differentiable_all_reduce(gradient, "sum", mesh.get_group(axis)), None, None, None, None


def unset_block(like: Any, layout: Layout, shape: Shape) -> Any:
    """Memory for this rank's block under ``layout``, with the dtype and device of ``like``."""
    inside = layout.mesh.get_coordinate() is not None
    return _platform.new_tensor(layout.local_shape(shape) if inside else outside_shape(shape), like.dtype, like.device)


def _average_factor(layout: Layout) -> int:
    factor = 1
    for size, op in zip(layout.mesh.shape, layout.partials, strict=True):
        if op == "avg":
            factor *= size
    return factor


def _sums(layout: Layout) -> list[int]:
    return [axis for axis, op in enumerate(layout.partials) if op in ("sum", "avg")]


def _entering_edge(gradient: Any, source: Layout, target: Layout) -> Any:
    """The gradient of what an edge made a pending sum; see Note [Gradients of gradients]."""
    if not target.has_partial or not _platform.needs_grad(gradient):
        return gradient
    pending = _sums(source)
    return _platform.count_on_one_rank(gradient, target.mesh, [axis for axis in _sums(target) if axis not in pending])


def leaving_edge(gradient: Any, source: Layout, target: Layout) -> Any:
    """The gradient of a sum that was pending before an edge and not behind it; see Note [Gradients of gradients]."""
    if not source.has_partial or not _platform.needs_grad(gradient) or source.mesh.get_coordinate() is None:
        return gradient
    pending = _sums(target) if source.mesh == target.mesh else []
    axes = tuple(axis for axis in _sums(source) if axis not in pending and source.mesh.shape[axis] > 1)
    return _platform.vary(gradient, source.mesh.get_group(axes)) if axes else gradient


def redistribute_with_grad(
    tensor: Any, source: Layout, target: Layout, shape: Shape, in_flight: list[Any] | None = None
) -> Any:
    """As :func:`move`, recording the gradient when ``tensor`` needs one. ``tensor`` is a block, plain or not.

    With ``in_flight`` the last step may be launched only; the list then has its handle, and the result is memory that
    the caller fills with what ``wait()`` gives.
    """
    if source is target:
        return tensor
    if not _platform.needs_grad(tensor):
        if in_flight is None:
            # What is moved may be a view of a larger buffer; as a view it could not be written to in place.
            return _platform.detached(move(_platform.detached(tensor), source, target, shape))
        in_flight.append(launch_move(_platform.detached(tensor), source, target, shape))
        return unset_block(tensor, target, shape)
    if source.mesh != target.mesh and target.has_partial:
        tensor, source = redistribute_with_grad(tensor, source, target.reduced(), shape), target.reduced()
        if target.mesh.get_coordinate() is None:
            return tensor
    if source.has_partial or target.has_partial:
        tensor, source = _reduce_non_linear(_platform.local_alias(tensor), source, target, shape)
        spread_axes = [
            axis for axis, op in enumerate(target.partials) if op in _NON_LINEAR and source.partials[axis] != op
        ]
        if spread_axes:
            return _spread_non_linear(tensor, source, target, spread_axes, shape)
        if source is target:
            return tensor
    return _platform.without_interception(Redistribute.apply, tensor, source, target, shape, in_flight)


def _reduce_non_linear(tensor: Any, source: Layout, target: Layout, shape: Shape) -> tuple[Any, Layout]:
    """Do the pending max, min and prod that ``target`` does not keep, and what must be done before them; last axis
    first.
    """
    kinds = {op for op in (*source.partials, *target.partials) if op is not None}
    keeps = source.mesh == target.mesh and (len(kinds) == 1 or source.partials == target.partials)
    done = [
        axis
        for axis, op in enumerate(source.partials)
        if op in _NON_LINEAR and not (keeps and target.partials[axis] == op)
    ]
    if not done:
        return tensor, source
    for axis in reversed(range(done[0], source.mesh.ndim)):
        op = source.partials[axis]
        if op is None:
            continue
        reduced = source.with_partials([None if a == axis else p for a, p in enumerate(source.partials)])
        if source.mesh.get_coordinate() is None:
            pass  # an empty block takes no part
        elif op not in _NON_LINEAR:
            tensor = _platform.without_interception(Redistribute.apply, tensor, source, reduced, shape)
        else:
            finish_checks()
            tensor = _platform.differentiable_all_reduce(tensor, op, source.mesh.get_group(axis))
        source = reduced
    return tensor, source


def _spread_non_linear(tensor: Any, source: Layout, target: Layout, axes: list[int], shape: Shape) -> Any:
    """To ``target``, in which a max, min or prod becomes pending on ``axes``."""
    kept = list(target.partials)
    for axis in axes:
        kept[axis] = None
    reached = target.with_partials(kept)
    if source is not reached:
        tensor = _platform.without_interception(Redistribute.apply, tensor, source, reached, shape)
    for axis in axes:
        kept[axis] = target.partials[axis]
        pending = target.with_partials(kept)
        if target.mesh.get_coordinate() is not None:
            tensor = _platform.without_interception(AsPartialExtreme.apply, tensor, reached, pending, axis, shape)
        reached = pending
    return tensor


class ToLocal(_platform.Function):  # type: ignore[name-defined]
    """forward: the block as it is; backward: the gradient from the layout it arrives in to the law's."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, arriving: Layout, wanted: Layout, shape: Shape) -> Any:
        ctx.edge = (arriving, wanted, shape)
        return _platform.detached(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return attributed("backward of to_local", redistribute_with_grad, gradient, *ctx.edge), None, None, None


class FromLocal(_platform.Function):  # type: ignore[name-defined]
    """forward: the block as it is; backward: the gradient from the law's layout to the one that was asked for."""

    @staticmethod
    def forward(ctx: Any, tensor: Any, lawful: Layout, wanted: Layout, shape: Shape) -> Any:
        ctx.edge = (lawful, wanted, shape)
        return _platform.detached(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return attributed("backward of from_local", redistribute_with_grad, gradient, *ctx.edge), None, None, None


class EmptyOutsideMesh(_platform.Function):  # type: ignore[name-defined]
    """forward: the empty block of a rank outside of the mesh instead of ``tensor``; backward: zeros.

    The rank stays in the graph: it takes part in the backward of a move from that mesh, in which others wait for it.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        ctx.original = (tuple(tensor.shape), tensor.dtype, tensor.device)
        return _platform.new_tensor(outside_shape(tuple(tensor.shape)), tensor.dtype, tensor.device)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return _ZerosOutsideMesh.apply(gradient, *ctx.original)


class _ZerosOutsideMesh(_platform.Function):  # type: ignore[name-defined]
    """forward: zeros for what :class:`EmptyOutsideMesh` was given; backward: an empty block."""

    @staticmethod
    def forward(ctx: Any, gradient: Any, shape: Shape, dtype: Any, device: Any) -> Any:
        return _platform.zeros(shape, dtype, device)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return EmptyOutsideMesh.apply(gradient), None, None, None
