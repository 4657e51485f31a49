"""Largest and smallest elements, and where they are. Over a cut dim the blocks' own extremes are compared.

Ties are resolved as one device does: the gradient of ``amax``, and of ``max`` of everything, is shared evenly among all
equal elements, on whichever rank they are; ``max`` along a dim and ``argmax`` name the first. NaN wins.
"""

from __future__ import annotations

import math
from typing import Any

from hyper_parallel.core.shard.rule_kit.rule_table import rule
from hyper_parallel.core.shard.rule_kit.signature import (
    LocalCall,
    OpCall,
    Signature,
    TensorSpec,
    broadcast_labels,
    letters,
)
from hyper_parallel.core.shard.rules.reductions import labels_of, reduced_dims, reduced_group, reduction
from hyper_parallel.core.shard.rules.sharded_letters import all_reduced, arguments, block_region, varied
from hyper_parallel.platform import get_platform

_platform = get_platform()
_OPS = {"max": "max", "min": "min", "amax": "max", "amin": "min", "argmax": "max", "argmin": "min"}
_NOWHERE = 1 << 62  # behind every index, and exact also where numbers pass through floating point


def extreme_of_block(block: Any, dims: tuple[int, ...], op: str) -> Any:
    """The extreme of a block along ``dims``, which are kept; of nothing, the value that loses against all others."""
    if any(block.shape[dim] == 0 for dim in dims):
        shape = [1 if dim in dims else size for dim, size in enumerate(block.shape)]
        return _platform.full(
            shape, _platform.extreme_identity(block.dtype, op), dtype=block.dtype, device=block.device
        )
    if not dims:
        return block.clone()
    return block.amax(dim=dims, keepdim=True) if op == "max" else block.amin(dim=dims, keepdim=True)


class _SharedExtreme(_platform.Function):  # type: ignore[name-defined]
    """forward: the extreme over all blocks, an all-reduce; backward: shared among the equal elements of all blocks."""

    @staticmethod
    def forward(ctx: Any, block: Any, dims: tuple[int, ...], op: str, group: Any, names_nan: bool) -> Any:
        result = all_reduced(extreme_of_block(block, dims, op), op, group)
        ctx.save_for_backward(block, result)
        ctx.how = (dims, group, names_nan)
        return result.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        block, result = ctx.saved_tensors
        dims, group, names_nan = ctx.how
        attained = block.detach() == result
        if names_nan:
            attained = attained | (block.detach().isnan() & result.isnan())
        num_attained = all_reduced(attained.sum(dim=dims, keepdim=True), "sum", group)
        return varied(gradient, group) * attained / num_attained, None, None, None, None


def shared_extreme(block: Any, dims: tuple[int, ...], op: str, group: Any, keepdim: bool, names_nan: bool) -> Any:
    """The extreme of all blocks along ``dims``; the gradient goes to all equal elements.

    With ``names_nan`` that of a NaN goes to the NaNs; else every element gets a NaN.
    """
    result = _SharedExtreme.apply(block, dims, op, group, names_nan)
    return result if keepdim else result.squeeze(dims)


class _ReplacedBySum(_platform.Function):  # type: ignore[name-defined]
    """forward: ``total``, known to be the sum of all ranks' ``part``; backward: that of the sum, the identity."""

    @staticmethod
    def forward(ctx: Any, part: Any, total: Any, group: Any) -> Any:
        ctx.group = group
        return total.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return varied(gradient, ctx.group), None, None


@rule("amax", "amin", "aminmax")
def evenly_shared(call: OpCall) -> Signature | None:
    given = arguments(call, "input", "dim", "keepdim", dim=None, keepdim=False)
    return reduction(call, given["dim"], bool(given["keepdim"]), local=_aminmax if call.name == "aminmax" else _amax)


def _amax(call: LocalCall) -> Any:
    given = arguments(call, "input", "dim", "keepdim", dim=None, keepdim=False)
    dims = reduced_dims(len(call.input_shapes[0]), given["dim"])
    op = _OPS[_platform.get_op_name(call.func)]
    return shared_extreme(given["input"], dims, op, reduced_group(call, dims), bool(given["keepdim"]), False)


def _aminmax(call: LocalCall) -> Any:
    given = arguments(call, "input", "dim", "keepdim", dim=None, keepdim=False)
    dims = reduced_dims(len(call.input_shapes[0]), given["dim"])
    group = reduced_group(call, dims)
    results = [shared_extreme(given["input"], dims, op, group, bool(given["keepdim"]), False) for op in ("min", "max")]
    return _platform.result_like(call.func, results)


@rule("max", "min")
def max_min(call: OpCall) -> Signature | None:
    given = arguments(call, "input", "dim", "keepdim", dim=None, keepdim=False)
    if len(call.tensors) == 2 or isinstance(given["dim"], TensorSpec) or "other" in given:
        output = call.outputs[0]
        return Signature(broadcast_labels([spec.shape for spec in call.tensors], output), (letters(len(output)),))
    is_full = given["dim"] is None
    return reduction(call, given["dim"], bool(given["keepdim"]), local=_full_extreme if is_full else _extreme_of_dim)


def _full_extreme(call: LocalCall) -> Any:
    block = call.args[0] if call.args else call.kwargs["input"]
    dims = reduced_dims(len(call.input_shapes[0]), None)
    return shared_extreme(block, dims, _OPS[_platform.get_op_name(call.func)], reduced_group(call, dims), False, True)


def _extreme_of_dim(call: LocalCall) -> Any:
    given = arguments(call, "input", "dim", "keepdim", keepdim=False)
    block = given["input"]
    (dim,) = reduced_dims(block.ndim, given["dim"])
    group = reduced_group(call, (dim,))
    offset = block_region(call, labels_of(call), call.input_shapes[0]).offsets[dim]
    size = block.shape[dim]
    best, index = _first_of_all(block.detach(), dim, offset, _OPS[_platform.get_op_name(call.func)], group)
    if _platform.needs_grad(block):
        is_mine = (index >= offset) & (index < offset + size)
        if size:
            part = block.gather(dim, (index - offset).clamp(0, size - 1)).masked_fill(is_mine.logical_not(), 0)
        else:
            part = block.sum(dim=dim, keepdim=True)
        best = _ReplacedBySum.apply(part, best, group)
    results = [best, index] if given["keepdim"] else [best.squeeze(dim), index.squeeze(dim)]
    return _platform.result_like(call.func, results)


def _first_of_all(block: Any, dim: int, offset: int, op: str, group: Any) -> tuple[Any, Any]:
    """The extreme of all blocks along ``dim``, which is kept, and its first index in the global tensor."""
    if block.shape[dim]:
        own, index = (block.max if op == "max" else block.min)(dim=dim, keepdim=True)
        index = index + offset
    else:
        own = extreme_of_block(block, (dim,), op)
        index = _platform.full(tuple(own.shape), _NOWHERE, dtype=_platform.str_to_dtype("int64"), device=own.device)
    return _agree(own, index, op, group)


def _agree(own: Any, index: Any, op: str, group: Any) -> tuple[Any, Any]:
    best = all_reduced(own.clone(), op, group)
    attained = (own == best) | (own.isnan() & best.isnan())
    return best, all_reduced(index.masked_fill(attained.logical_not(), _NOWHERE), "min", group)


@rule("argmax", "argmin", by_dtype=True)
def arg_extreme(call: OpCall) -> Signature | None:
    """Of bools what one device gives, which may be an error, whatever the layout."""
    if _platform.dtype_name(call.tensors[0].dtype) == "bool":
        return None
    given = arguments(call, "input", "dim", "keepdim", dim=None, keepdim=False)
    return reduction(call, given["dim"], bool(given["keepdim"]), local=_arg_extreme)


def _arg_extreme(call: LocalCall) -> Any:
    given = arguments(call, "input", "dim", "keepdim", dim=None, keepdim=False)
    block, shape = given["input"].detach(), call.input_shapes[0]
    dims = reduced_dims(len(shape), given["dim"])
    group = reduced_group(call, dims)
    op = _OPS[_platform.get_op_name(call.func)]
    offsets = block_region(call, labels_of(call), shape).offsets
    if given["dim"] is not None:
        _, index = _first_of_all(block, dims[0], offsets[dims[0]], op, group)
        return index if given["keepdim"] else index.squeeze(dims[0])
    own = extreme_of_block(block, dims, op)
    if block.numel():
        flat = _platform.tensor_type_cast((block.argmax if op == "max" else block.argmin)(), "int64").reshape(own.shape)
        index = _global_flat_index(flat, tuple(block.shape), offsets, shape)
    else:
        index = _platform.full(tuple(own.shape), _NOWHERE, dtype=_platform.str_to_dtype("int64"), device=own.device)
    _, index = _agree(own, index, op, group)
    return index if given["keepdim"] else index.squeeze(dims)


def _global_flat_index(
    flat: Any, block_shape: tuple[int, ...], offsets: tuple[int, ...], shape: tuple[int, ...]
) -> Any:
    """The place in the flattened global tensor of the element at place ``flat`` of the flattened block."""
    index: Any = 0
    for dim in reversed(range(len(shape))):
        index = index + (flat % block_shape[dim] + offsets[dim]) * math.prod(shape[dim + 1 :])
        flat = flat // block_shape[dim]
    return index
