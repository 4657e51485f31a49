"""The autograd functions behind the collectives with gradients. Each backward is another function of this file, so that
gradients of gradients are right too; arguments are checked by the callers (``differentiable.py``).

``make_functions`` gives them for one framework: the base class of its autograd functions, its collectives, and the few
functions of tensors that are needed (:class:`Framework`).

Note [Which gradient a collective gets]
    On the ranks of a group a value either *varies* (each rank its own shard, or its own addend of a pending sum) or is
    *whole* (the same on every rank). The gradient of a shard is a shard; the gradient of an addend and of a whole value
    is whole. From that the pairs follow, and each is the other's backward:

        all-reduce                         <->  vary (identity)
        all-gather to a value used whole   <->  slice
        all-gather to a value that varies  <->  reduce-scatter
        all-to-all, exchange               <->  the same, reversed

    An all-reduce's gradient is the identity and not another all-reduce: the result is whole, and its gradient is whole
    already. It is `vary` and not nothing at all because what comes next, the backward of the op that made the addend,
    varies: the second derivative has to be summed over the ranks there.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class Framework:
    """What the autograd functions need from a framework."""

    Function: Any
    collectives: Any  # all_reduce, all_gather_into_tensor, reduce_scatter_tensor, all_to_all_single
    exchange: Callable[[Any, int, Any], Any]  # (tensor, world rank of the peer, group) -> the peer's tensor
    cat: Callable[[Sequence[Any], int], Any]
    narrow: Callable[[Any, int, int, int], Any]
    zeros: Callable[[Sequence[int], Any], Any]  # of a shape, with the dtype and device of a tensor
    own_copy: Callable[[Any], Any]  # in contiguous memory of its own
    alias: Callable[[Any], Any]  # another tensor over the same memory
    handed_out: Callable[[Any], Any]  # the result of a collective, for an autograd function to return
    equal: Callable[[Any, Any], Any]
    as_integers: Callable[[Any], Any]  # bools as int32
    conjugate: Callable[[Any], Any]
    no_grad: Callable[[], AbstractContextManager[Any]]


def chunk_sizes(length: int, num_chunks: int) -> Sizes:
    block = -(-length // num_chunks)
    return tuple(max(0, min(block, length - index * block)) for index in range(num_chunks))


def shape_with(data: Any, dim: int, length: int) -> Sizes:
    return (*data.shape[:dim], length, *data.shape[dim + 1 :])


def make_functions(framework: Framework) -> SimpleNamespace:
    """The autograd functions of a framework, by name."""
    collectives = framework.collectives

    # --- shards and slabs, without gradients ---

    def padded(data: Any, dim: int, length: int) -> Any:
        missing = length - data.shape[dim]
        if missing == 0:
            return data
        padding = framework.zeros((*data.shape[:dim], missing, *data.shape[dim + 1 :]), data)
        return framework.cat((data, padding), dim)

    def gather(data: Any, group: Any, sizes: Sizes, dim: int) -> Any:
        longest = max(sizes)
        if dim == 0 and min(sizes) == longest:
            return framework.handed_out(collectives.all_gather_into_tensor(data, group))
        slabs = collectives.all_gather_into_tensor(
            padded(data, dim, longest).reshape(1, *shape_with(data, dim, longest)), group
        )
        return framework.cat([framework.narrow(slabs[place], dim, 0, size) for place, size in enumerate(sizes)], dim)

    def slice_of_mine(data: Any, group: Any, sizes: Sizes, dim: int) -> Any:
        # A copy, so that a slice kept as `parameter.grad` does not keep the whole gradient in memory.
        rank = group.rank()
        return framework.own_copy(framework.narrow(data, dim, sum(sizes[:rank]), sizes[rank]))

    def reduce_scatter(data: Any, op: str, group: Any, sizes: Sizes, dim: int) -> Any:
        longest = max(sizes)
        if dim == 0 and min(sizes) == longest:
            return framework.handed_out(collectives.reduce_scatter_tensor(data, group, op=op))
        starts = [sum(sizes[:place]) for place in range(len(sizes))]
        parts = [framework.narrow(data, dim, begin, size) for begin, size in zip(starts, sizes, strict=True)]
        slabs = framework.cat(
            [padded(part, dim, longest).reshape(1, *shape_with(data, dim, longest)) for part in parts], 0
        )
        chunk = collectives.reduce_scatter_tensor(slabs, group, op=op).reshape(shape_with(data, dim, longest))
        size = sizes[group.rank()]
        return chunk if size == longest else framework.own_copy(framework.narrow(chunk, dim, 0, size))

    def all_reduce(data: Any, op: str, group: Any) -> Any:
        return framework.handed_out(collectives.all_reduce(framework.own_copy(data), group, op=op))

    # --- the autograd functions; each backward calls another one of them ---

    Function: Any = framework.Function

    class AllReduceLinear(Function):
        """forward: all-reduce by sum or avg; backward: identity (sum), 1/n (avg)."""

        @staticmethod
        def forward(ctx: Any, data: Any, op: str, group: Any) -> Any:
            ctx.op, ctx.group = op, group
            return all_reduce(data, op, group)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any | None, ...]:
            if ctx.op == "avg":
                grad = grad / ctx.group.size()
            return Vary.apply(grad, ctx.group), None, None

    class Vary(Function):
        """forward: identity; backward: all-reduce (sum)."""

        @staticmethod
        def forward(ctx: Any, data: Any, group: Any) -> Any:
            ctx.group = group
            return framework.alias(data)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any | None, ...]:
            return AllReduceLinear.apply(grad, "sum", ctx.group), None

    class AllReduceExtreme(Function):
        """forward: all-reduce by max or min; backward: the gradient, shared among the ranks that attain the result."""

        @staticmethod
        def forward(ctx: Any, data: Any, op: str, group: Any) -> Any:
            ctx.group = group
            result = all_reduce(data, op, group)
            if ctx.needs_input_grad[0]:
                ctx.save_for_backward(framework.equal(data, result))
            return result

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any | None, ...]:
            (attained,) = ctx.saved_tensors
            num_attained = all_reduce(framework.as_integers(attained), "sum", ctx.group)
            return Vary.apply(grad, ctx.group) * attained / num_attained, None, None

    class AllReduceProduct(Function):
        """forward: all-reduce by product; backward: the gradient times the product of the other ranks' values.

        The other values are gathered and multiplied instead of dividing the result by this rank's: zeros are right too.
        """

        @staticmethod
        def forward(ctx: Any, data: Any, group: Any) -> Any:
            ctx.group = group
            ctx.save_for_backward(data)
            return all_reduce(data, "prod", group)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any | None, ...]:
            (data,) = ctx.saved_tensors
            rank, num_ranks = ctx.group.rank(), ctx.group.size()
            factors = AllGather.apply(data.reshape(1, *data.shape), ctx.group, (1,) * num_ranks, 0, "reduce_scatter")
            parts = [framework.narrow(factors, 0, place, 1) for place in range(num_ranks) if place != rank]
            others = functools.reduce(operator.mul, parts).reshape(tuple(data.shape))
            return Vary.apply(grad, ctx.group) * framework.conjugate(others), None

    class AllGather(Function):
        """forward: all-gather; backward: slice or reduce-scatter, as `gradient` says."""

        @staticmethod
        def forward(ctx: Any, data: Any, group: Any, sizes: Sizes, dim: int, gradient: str) -> Any:
            ctx.group, ctx.sizes, ctx.dim, ctx.gradient = group, sizes, dim, gradient
            return gather(data, group, sizes, dim)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any | None, ...]:
            if ctx.gradient == "slice":
                mine = Slice.apply(grad, ctx.group, ctx.sizes, ctx.dim)
            else:
                mine = ReduceScatterLinear.apply(grad, "sum", ctx.group, ctx.sizes, ctx.dim)
            return mine, None, None, None, None

    class Slice(Function):
        """forward: this rank's part of a whole value; backward: all-gather."""

        @staticmethod
        def forward(ctx: Any, data: Any, group: Any, sizes: Sizes, dim: int) -> Any:
            ctx.group, ctx.sizes, ctx.dim = group, sizes, dim
            return slice_of_mine(data, group, sizes, dim)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any | None, ...]:
            return AllGather.apply(grad, ctx.group, ctx.sizes, ctx.dim, "slice"), None, None, None

    class ReduceScatterLinear(Function):
        """forward: reduce-scatter by sum or avg; backward: all-gather (1/n of it for avg)."""

        @staticmethod
        def forward(ctx: Any, data: Any, op: str, group: Any, sizes: Sizes, dim: int) -> Any:
            ctx.op, ctx.group, ctx.sizes, ctx.dim = op, group, sizes, dim
            return reduce_scatter(data, op, group, sizes, dim)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any | None, ...]:
            if ctx.op == "avg":
                grad = grad / ctx.group.size()
            whole = AllGather.apply(grad, ctx.group, ctx.sizes, ctx.dim, "reduce_scatter")
            return whole, None, None, None, None

    class ReduceScatterExtreme(Function):
        """forward: reduce-scatter by max or min; backward: all-gather, shared among the ranks that attain it."""

        @staticmethod
        def forward(ctx: Any, data: Any, op: str, group: Any, sizes: Sizes, dim: int) -> Any:
            ctx.group, ctx.sizes, ctx.dim = group, sizes, dim
            chunk = reduce_scatter(data, op, group, sizes, dim)
            ctx.save_for_backward(data, chunk)
            return chunk

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any | None, ...]:
            data, chunk = ctx.saved_tensors
            place = (ctx.group, ctx.sizes, ctx.dim)
            with framework.no_grad():
                attained = framework.equal(data, gather(chunk, *place))
                num_attained = reduce_scatter(framework.as_integers(attained), "sum", *place)
            shares = AllGather.apply(grad / num_attained, *place, "reduce_scatter")
            return shares * attained, None, None, None, None

    class AllToAllSingle(Function):
        """forward: all-to-all of rows; backward: the same with the splits, (sent, received) or None for even,
        swapped.
        """

        @staticmethod
        def forward(ctx: Any, data: Any, splits: tuple[Sizes, Sizes] | None, group: Any, asynchronous: bool) -> Any:
            ctx.splits, ctx.group, ctx.asynchronous = splits, group, asynchronous
            sent, received = splits or (None, None)
            shape = data.shape if received is None else (sum(received), *data.shape[1:])
            output, work = collectives.all_to_all_single(data, shape, group, asynchronous, received, sent)
            if work is not None:
                # On an accelerator this makes the current stream wait, not the host.
                work.wait()
            return framework.handed_out(output)

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any | None, ...]:
            swapped = None if ctx.splits is None else ctx.splits[::-1]
            return AllToAllSingle.apply(grad, swapped, ctx.group, ctx.asynchronous), None, None, None

    class Exchange(Function):
        """forward: send mine to the peer, give the peer's; backward: the same."""

        @staticmethod
        def forward(ctx: Any, tensor: Any, peer_rank: int, group: Any) -> Any:
            ctx.peer_rank, ctx.group = peer_rank, group
            return framework.handed_out(framework.exchange(tensor, peer_rank, group))

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any | None, ...]:
            return Exchange.apply(grad, ctx.peer_rank, ctx.group), None, None

    return SimpleNamespace(
        AllGather=AllGather,
        AllReduceExtreme=AllReduceExtreme,
        AllReduceLinear=AllReduceLinear,
        AllReduceProduct=AllReduceProduct,
        AllToAllSingle=AllToAllSingle,
        Exchange=Exchange,
        ReduceScatterExtreme=ReduceScatterExtreme,
        ReduceScatterLinear=ReduceScatterLinear,
        Slice=Slice,
        Vary=Vary,
    )
