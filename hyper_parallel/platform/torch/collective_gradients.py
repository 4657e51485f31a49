"""The autograd functions behind the collectives with gradients. Each backward is another function of this file, so that
gradients of gradients are right too; arguments are checked by the callers.

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

from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.platform.torch import collectives, group_facts, groups

Sizes = tuple[int, ...]


# --- shards and slabs, without gradients ---


def handed_out(result: torch.Tensor) -> torch.Tensor:
    """The result of a collective as another tensor object over the same memory, for an autograd function to return.

    The backend's work keeps the tensor it was given. When that very object becomes part of a graph, the process group
    is sometimes never freed (PyTorch 2.13: about one time in ten), its threads outlive the interpreter, and the rank
    aborts at exit. An alias keeps the two apart; not a view, which could not be written to in place.
    """
    return result.detach()


def chunk_sizes(length: int, num_chunks: int) -> Sizes:
    block = -(-length // num_chunks)
    return tuple(max(0, min(block, length - index * block)) for index in range(num_chunks))


def _padded(data: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    missing = length - data.shape[dim]
    if missing == 0:
        return data
    padding = data.new_zeros((*data.shape[:dim], missing, *data.shape[dim + 1 :]))
    return torch.cat((data, padding), dim)


def _gather(data: torch.Tensor, group: dist.ProcessGroup, sizes: Sizes, dim: int) -> torch.Tensor:
    longest = max(sizes)
    if dim == 0 and min(sizes) == longest:
        return handed_out(collectives.all_gather_into_tensor(data, group))
    slabs = collectives.all_gather_into_tensor(_padded(data, dim, longest).unsqueeze(0), group)
    return torch.cat([slab.narrow(dim, 0, size) for slab, size in zip(slabs, sizes, strict=True)], dim)


def _slice(data: torch.Tensor, group: dist.ProcessGroup, sizes: Sizes, dim: int) -> torch.Tensor:
    # A copy, so that a slice kept as `parameter.grad` does not keep the whole gradient in memory.
    rank = group.rank()
    part = data.narrow(dim, sum(sizes[:rank]), sizes[rank])
    return part.clone(memory_format=torch.contiguous_format)


def _reduce_scatter(data: torch.Tensor, op: str, group: dist.ProcessGroup, sizes: Sizes, dim: int) -> torch.Tensor:
    longest = max(sizes)
    if dim == 0 and min(sizes) == longest:
        return handed_out(collectives.reduce_scatter_tensor(data, group, op=op))
    slabs = torch.stack([_padded(part, dim, longest) for part in data.split(sizes, dim)])
    chunk = collectives.reduce_scatter_tensor(slabs.flatten(0, 1), group, op=op)
    size = sizes[group.rank()]
    return chunk if size == longest else chunk.narrow(dim, 0, size).contiguous()


def _all_reduce(data: torch.Tensor, op: str, group: dist.ProcessGroup) -> torch.Tensor:
    return handed_out(collectives.all_reduce(data.clone(memory_format=torch.contiguous_format), group, op=op))


# --- the autograd functions; each backward calls another one of them ---


class AllReduceLinear(torch.autograd.Function):
    """forward: all-reduce by sum or avg; backward: identity (sum), 1/n (avg)."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, op: str, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.op, ctx.group = op, group
        return _all_reduce(data, op, group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.op == "avg":
            grad = grad / ctx.group.size()
        return Vary.apply(grad, ctx.group), None, None


class Vary(torch.autograd.Function):
    """forward: identity; backward: all-reduce (sum)."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return data.view_as(data)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return AllReduceLinear.apply(grad, "sum", ctx.group), None


class AllReduceExtreme(torch.autograd.Function):
    """forward: all-reduce by max or min; backward: the gradient, shared among the ranks that attain the result."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, op: str, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        result = _all_reduce(data, op, group)
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(data == result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (attained,) = ctx.saved_tensors
        num_attained = _all_reduce(attained.to(torch.int32), "sum", ctx.group)
        return Vary.apply(grad, ctx.group) * attained / num_attained, None, None


class AllReduceProduct(torch.autograd.Function):
    """forward: all-reduce by product; backward: the gradient times the product of the other ranks' values.

    The other values are gathered and multiplied instead of dividing the result by this rank's: a zero is no exception.
    """

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        ctx.save_for_backward(data)
        return _all_reduce(data, "prod", group)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (data,) = ctx.saved_tensors
        rank, num_ranks = ctx.group.rank(), ctx.group.size()
        factors = AllGather.apply(data.unsqueeze(0), ctx.group, (1,) * num_ranks, 0, "reduce_scatter")
        others = torch.cat((factors[:rank], factors[rank + 1 :])).prod(0)
        return Vary.apply(grad, ctx.group) * others.conj(), None


class AllGather(torch.autograd.Function):
    """forward: all-gather; backward: slice or reduce-scatter, as `gradient` says."""

    @staticmethod
    def forward(
        ctx: Any, data: torch.Tensor, group: dist.ProcessGroup, sizes: Sizes, dim: int, gradient: str
    ) -> torch.Tensor:
        ctx.group, ctx.sizes, ctx.dim, ctx.gradient = group, sizes, dim, gradient
        return _gather(data, group, sizes, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.gradient == "slice":
            mine = Slice.apply(grad, ctx.group, ctx.sizes, ctx.dim)
        else:
            mine = ReduceScatterLinear.apply(grad, "sum", ctx.group, ctx.sizes, ctx.dim)
        return mine, None, None, None, None


class Slice(torch.autograd.Function):
    """forward: this rank's part of a whole value; backward: all-gather."""

    @staticmethod
    def forward(ctx: Any, data: torch.Tensor, group: dist.ProcessGroup, sizes: Sizes, dim: int) -> torch.Tensor:
        ctx.group, ctx.sizes, ctx.dim = group, sizes, dim
        return _slice(data, group, sizes, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return AllGather.apply(grad, ctx.group, ctx.sizes, ctx.dim, "slice"), None, None, None


class ReduceScatterLinear(torch.autograd.Function):
    """forward: reduce-scatter by sum or avg; backward: all-gather (1/n of it for avg)."""

    @staticmethod
    def forward(
        ctx: Any, data: torch.Tensor, op: str, group: dist.ProcessGroup, sizes: Sizes, dim: int
    ) -> torch.Tensor:
        ctx.op, ctx.group, ctx.sizes, ctx.dim = op, group, sizes, dim
        return _reduce_scatter(data, op, group, sizes, dim)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if ctx.op == "avg":
            grad = grad / ctx.group.size()
        whole = AllGather.apply(grad, ctx.group, ctx.sizes, ctx.dim, "reduce_scatter")
        return whole, None, None, None, None


class ReduceScatterExtreme(torch.autograd.Function):
    """forward: reduce-scatter by max or min; backward: all-gather, shared among the ranks that attain the result."""

    @staticmethod
    def forward(
        ctx: Any, data: torch.Tensor, op: str, group: dist.ProcessGroup, sizes: Sizes, dim: int
    ) -> torch.Tensor:
        ctx.group, ctx.sizes, ctx.dim = group, sizes, dim
        chunk = _reduce_scatter(data, op, group, sizes, dim)
        ctx.save_for_backward(data, chunk)
        return chunk

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        data, chunk = ctx.saved_tensors
        place = (ctx.group, ctx.sizes, ctx.dim)
        with torch.no_grad():
            attained = data == _gather(chunk, *place)
            num_attained = _reduce_scatter(attained.to(torch.int32), "sum", *place)
        shares = AllGather.apply(grad / num_attained, *place, "reduce_scatter")
        return shares * attained, None, None, None, None


class AllToAllSingle(torch.autograd.Function):
    """forward: all-to-all of rows; backward: all-to-all with the splits, (sent, received) or None for even, swapped."""

    @staticmethod
    def forward(
        ctx: Any, data: torch.Tensor, splits: tuple[Sizes, Sizes] | None, group: dist.ProcessGroup, asynchronous: bool
    ) -> torch.Tensor:
        ctx.splits, ctx.group, ctx.asynchronous = splits, group, asynchronous
        sent, received = splits or (None, None)
        shape = data.shape if received is None else (sum(received), *data.shape[1:])
        output, work = collectives.all_to_all_single(data, shape, group, asynchronous, received, sent)
        if work is not None:
            # On an accelerator this makes the current stream wait, not the host.
            work.wait()
        return handed_out(output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        swapped = None if ctx.splits is None else ctx.splits[::-1]
        return AllToAllSingle.apply(grad, swapped, ctx.group, ctx.asynchronous), None, None, None


class Exchange(torch.autograd.Function):
    """forward: send mine to the peer, give the peer's; backward: the same."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, peer_rank: int, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.peer_rank, ctx.group = peer_rank, group
        received = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        if tensor.numel() == 0:
            return received
        groups.wait_until_connected(group)
        if group_facts.observers:
            group_facts.notify_observers("p2p_exchange", group, tensor, False)
        # As bytes, which every backend moves. In one batch: two ranks that each send first and receive after would
        # block each other on an accelerator.
        sent = group_facts.as_bytes(group_facts.contiguous(tensor))
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, peer_rank, group),
                dist.P2POp(dist.irecv, group_facts.as_bytes(received), peer_rank, group),
            ]
        )
        for work in works:
            work.wait()
        return handed_out(received)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return Exchange.apply(grad, ctx.peer_rank, ctx.group), None, None
