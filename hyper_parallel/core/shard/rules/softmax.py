"""Softmax and its relatives. Over a cut dim two numbers per row travel, the maximum and the sum, never the row."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.shard.rule_kit.rule_table import rule
from hyper_parallel.core.shard.rule_kit.signature import LocalCall, OpCall, Signature, letters, without
from hyper_parallel.core.shard.rules.extremes import extreme_of_block
from hyper_parallel.core.shard.rules.reductions import checked_dim, reduced_dims, reduced_group, reduction
from hyper_parallel.core.shard.rules.sharded_letters import (
    all_reduced,
    arguments,
    group_of,
    in_working_precision,
    is_sharded,
    refuse_integers,
    shared_sum,
    varied,
)
from hyper_parallel.platform import get_platform

_platform = get_platform()


class _ShardedSoftmax(_platform.Function):  # type: ignore[name-defined]
    """forward: two all-reduces, the rows' maxima and sums; backward: one all-reduce, of the rows' sums."""

    @staticmethod
    def forward(ctx: Any, block: Any, dim: int, of_logarithm: bool, group: Any) -> Any:
        highest = all_reduced(extreme_of_block(block, (dim,), "max"), "max", group)
        shifted = block - highest
        powers = shifted.exp()
        total = all_reduced(powers.sum(dim=dim, keepdim=True), "sum", group)
        result = shifted - _platform.logarithm(total) if of_logarithm else powers / total
        ctx.save_for_backward(result)
        ctx.how = (dim, of_logarithm, group)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (result,) = ctx.saved_tensors
        dim, of_logarithm, group = ctx.how
        if of_logarithm:
            total = shared_sum(gradient.sum(dim=dim, keepdim=True), group)
            return gradient - result.exp() * total, None, None, None
        total = shared_sum((gradient * result).sum(dim=dim, keepdim=True), group)
        return result * (gradient - total), None, None, None


class _ShardedLogSumExp(_platform.Function):  # type: ignore[name-defined]
    """forward: two all-reduces, the rows' maxima and sums; backward: nothing travels."""

    @staticmethod
    def forward(ctx: Any, block: Any, dims: tuple[int, ...], group: Any) -> Any:
        highest = all_reduced(extreme_of_block(block, dims, "max"), "max", group)
        # An infinite maximum is not subtracted: inf - inf would make a NaN of a row whose sum is infinite or zero.
        highest = highest.masked_fill(highest.isinf(), 0)
        total = all_reduced((block - highest).exp().sum(dim=dims, keepdim=True), "sum", group)
        result = _platform.logarithm(total) + highest
        ctx.save_for_backward(block, result)
        ctx.group = group
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        block, result = ctx.saved_tensors
        powers = (block - varied(result, ctx.group)).exp()
        return varied(gradient, ctx.group) * powers, None, None


def sharded_logsumexp(block: Any, dims: tuple[int, ...], group: Any) -> Any:
    """log of the sum of exp along ``dims``, which are kept, over all blocks of the group; whole on every rank."""
    return _ShardedLogSumExp.apply(block, dims, group)


@rule("softmax", "log_softmax")
def softmax(call: OpCall) -> Signature | None:
    given = arguments(call, "input", "dim", dim=None)
    spec, dim = call.tensors[0], given["dim"]
    if not isinstance(dim, int):
        return None
    labels = letters(spec.ndim)
    along = labels[checked_dim(spec.ndim, dim) :][:1]
    return Signature((labels,), (labels,), local=_softmax, needs_local=lambda planned: is_sharded(planned, along))


@rule("_safe_softmax")
def safe_softmax(call: OpCall) -> Signature:
    """Softmax that gives zeros for a row of -inf; the rows stay whole."""
    given = arguments(call, "input", "dim")
    ndim = call.tensors[0].ndim
    labels = without(letters(ndim), (checked_dim(ndim, given["dim"]),))
    return Signature((labels,), (labels,))


def _softmax(call: LocalCall) -> Any:
    given = arguments(call, "input", "dim")
    block = given["input"]
    # The third argument is a dtype of Tensor.softmax, but a stack level of the function that is written in Python.
    third = call.args[2] if len(call.args) > 2 and not isinstance(call.args[2], int) else None
    dtype = call.args[3] if len(call.args) > 3 else call.kwargs.get("dtype", third)
    if dtype is not None:
        block = block.to(dtype)
    refuse_integers(call, block)
    dim = given["dim"] % block.ndim
    of_logarithm = _platform.get_op_name(call.func) == "log_softmax"
    group = group_of(call, (letters(block.ndim)[dim],))
    return _ShardedSoftmax.apply(in_working_precision(block), dim, of_logarithm, group).to(block.dtype)


@rule("logsumexp", by_dtype=True)
def logsumexp(call: OpCall) -> Signature | None:
    if _platform.dtype_name(call.tensors[0].dtype).startswith("complex"):
        return None  # there is no largest one to begin with
    given = arguments(call, "input", "dim", "keepdim", keepdim=False)
    return reduction(call, given["dim"], bool(given["keepdim"]), local=_logsumexp)


def _logsumexp(call: LocalCall) -> Any:
    given = arguments(call, "input", "dim", "keepdim", keepdim=False)
    block = given["input"]
    if not block.is_floating_point():
        block = block.to(_platform.default_dtype())
    dims = reduced_dims(len(call.input_shapes[0]), given["dim"])
    result = sharded_logsumexp(in_working_precision(block), dims, reduced_group(call, dims)).to(block.dtype)
    return result if given["keepdim"] else result.squeeze(dims)
