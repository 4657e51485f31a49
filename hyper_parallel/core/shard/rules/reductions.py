"""Reductions that add up or count: sums, means, products, any and all. Over a cut dim a sum stays pending."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.shard.rule_kit.rule_table import rule
from hyper_parallel.core.shard.rule_kit.signature import (
    Labels,
    LocalCall,
    OpCall,
    Signature,
    TensorSpec,
    broadcast_labels,
    letters,
)
from hyper_parallel.core.shard.rules.sharded_letters import (
    all_reduced,
    arguments,
    block_region,
    group_of,
    is_sharded,
    num_elements,
)
from hyper_parallel.platform import get_platform

_platform = get_platform()
_ALONE = (frozenset({0}),)


def reduced_dims(ndim: int, dim: Any) -> tuple[int, ...]:
    """The dims that a reduction's ``dim`` argument means: None and an empty list mean all."""
    if dim is None or (isinstance(dim, (tuple, list)) and not dim):
        return tuple(range(ndim))
    listed = dim if isinstance(dim, (tuple, list)) else (dim,)
    return tuple(sorted({one for one in (checked_dim(ndim, int(item)) for item in listed) if one < ndim}))


def checked_dim(ndim: int, dim: int) -> int:
    """``dim`` counted from the front; of a tensor without dims 0 and -1 mean its one element."""
    if not -max(ndim, 1) <= dim < max(ndim, 1):
        raise IndexError(f"dim {dim} is out of range for a distributed tensor of {ndim} dims")
    return dim % max(ndim, 1)


def reduction(
    call: OpCall,
    dim: Any,
    keepdim: bool,
    *,
    partial: bool = False,
    local: Callable[[LocalCall], Any] | None = None,
    only_if_sharded: bool = True,
    linear: bool = False,
    unsharded: bool = False,
) -> Signature | None:
    """The signature of an operator that reduces ``dim`` of its first tensor; None when the results have other shapes.

    With ``partial`` cut dims leave a pending sum; else ``local`` reduces them itself, and without ``local``, or with
    ``unsharded``, they must be whole. With ``only_if_sharded`` the plain call does where none of them is cut.
    """
    shape = call.tensors[0].shape
    dims = reduced_dims(len(shape), dim)
    labels = letters(len(shape))
    removed = frozenset(label for one, label in enumerate(labels) if one in dims and label is not None)
    output = tuple(None if one in dims else label for one, label in enumerate(labels) if keepdim or one not in dims)
    expected = tuple(1 if one in dims else size for one, size in enumerate(shape) if keepdim or one not in dims)
    if any(tuple(result) != expected for result in call.outputs) or len(call.tensors) != 1:
        return None
    unsharded = unsharded or (local is None and not partial)
    given: Labels = tuple(None if one in dims and unsharded else label for one, label in enumerate(labels))
    return Signature(
        (given,),
        (output,) * len(call.outputs),
        reduces=dict.fromkeys(removed, "sum") if partial else {},
        handled=frozenset() if partial else removed,
        linear=_ALONE if linear else (),
        local=local,
        needs_local=(lambda planned: is_sharded(planned, removed)) if only_if_sharded else None,
    )


def labels_of(call: LocalCall) -> Labels:
    """The labels that :func:`reduction` gave the first tensor."""
    return letters(len(call.input_shapes[0]))


def reduced_group(call: LocalCall, dims: tuple[int, ...]) -> Any:
    """The group over which any of ``dims`` of the first tensor is cut, None when they are whole."""
    labels = labels_of(call)
    return group_of(call, [labels[dim] for dim in dims])


@rule("sum", "nansum", "count_nonzero")
def sums(call: OpCall) -> Signature | None:
    given = arguments(call, "input", "dim", "keepdim", dim=None, keepdim=False, dtype=None)
    linear = call.name == "sum" and (given["dtype"] is None or "float" in _platform.dtype_name(given["dtype"]))
    return reduction(call, given["dim"], bool(given["keepdim"]), partial=True, linear=linear)


def is_of_floats(call: OpCall, dtype: Any = None) -> bool:
    """Whether the first tensor, or ``dtype`` where one is asked for, is of a floating type. Of others an operator that
    is made for floating ones gives what one device gives, an error on every rank or its own idea, whatever the layout.
    """
    name = _platform.dtype_name(call.tensors[0].dtype if dtype is None else dtype)
    return name.startswith(("float", "bfloat", "complex"))


@rule("mean", by_dtype=True)
def mean(call: OpCall) -> Signature | None:
    given = arguments(call, "input", "dim", "keepdim", dim=None, keepdim=False, dtype=None)
    if not is_of_floats(call, given["dtype"]):
        return None
    return reduction(call, given["dim"], bool(given["keepdim"]), partial=True, local=_mean, linear=True)


def _mean(call: LocalCall) -> Any:
    """The block's mean by its share of the elements, so that half-precision sums do not overflow."""
    given = arguments(call, "input", "dim", "keepdim", dim=None, keepdim=False, dtype=None)
    block, shape = given["input"], call.input_shapes[0]
    dims = reduced_dims(len(shape), given["dim"])
    num_here, num_all = num_elements(call, labels_of(call), shape, dims)
    if num_here == 0 < num_all:
        return block.sum(dim=dims, keepdim=bool(given["keepdim"]), dtype=given["dtype"])
    result = call.func(*call.args, **call.kwargs)
    return result if num_all == 0 else result * _platform.number_like(num_here / num_all, result)


@rule("nanmean", by_dtype=True)
def nanmean(call: OpCall) -> Signature | None:
    given = arguments(call, "input", "dim", "keepdim", dim=None, keepdim=False)
    if not is_of_floats(call):
        return None
    return reduction(call, given["dim"], bool(given["keepdim"]), partial=True, local=_nanmean)


def _nanmean(call: LocalCall) -> Any:
    given = arguments(call, "input", "dim", "keepdim", dim=None, keepdim=False, dtype=None)
    block, keepdim = given["input"], bool(given["keepdim"])
    dims = reduced_dims(len(call.input_shapes[0]), given["dim"])
    num_here = block.isnan().logical_not().sum(dim=dims, keepdim=keepdim)
    num_all = all_reduced(num_here, "sum", reduced_group(call, dims))
    return block.nansum(dim=dims, keepdim=keepdim, dtype=given["dtype"]) / num_all


@rule("prod")
def prod(call: OpCall) -> Signature | None:
    given = arguments(call, "input", "dim", "keepdim", dim=None, keepdim=False)
    return reduction(call, given["dim"], bool(given["keepdim"]), local=_prod)


def _prod(call: LocalCall) -> Any:
    given = arguments(call, "input", "dim", dim=None)
    dims = reduced_dims(len(call.input_shapes[0]), given["dim"])
    part = call.func(*call.args, **call.kwargs)
    group = reduced_group(call, dims)
    return part if group is None else _platform.differentiable_all_reduce(part, "prod", group)


@rule("any", "all")
def any_all(call: OpCall) -> Signature | None:
    given = arguments(call, "input", "dim", "keepdim", dim=None, keepdim=False)
    op = "max" if call.name == "any" else "min"
    return reduction(call, given["dim"], bool(given["keepdim"]), local=lambda local: _any_all(local, op))


def _any_all(call: LocalCall, op: str) -> Any:
    given = arguments(call, "input", "dim", dim=None)
    dims = reduced_dims(len(call.input_shapes[0]), given["dim"])
    return all_reduced(call.func(*call.args, **call.kwargs), op, reduced_group(call, dims))


@rule("sum_to_size")
def sum_to_size(call: OpCall) -> Signature:
    """The dims that the result lacks or has with size 1 are summed."""
    shape, wanted = call.tensors[0].shape, call.outputs[0]
    labels = letters(len(shape))
    missing = len(shape) - len(wanted)
    output = tuple(labels[missing + dim] if shape[missing + dim] == size else None for dim, size in enumerate(wanted))
    summed = {label: "sum" for label in labels if label is not None and label not in output}
    return Signature((labels,), (output,), reduces=summed, linear=_ALONE, local=_sum_to_size)


def _sum_to_size(call: LocalCall) -> Any:
    """The sum over the dims that shrink: a block of size 1 is summed too, which gives integers their dtype."""
    block, shape, wanted = call.args[0], call.input_shapes[0], call.output_shapes[0]
    sizes = (0,) * (len(shape) - len(wanted)) + tuple(wanted)
    dims = tuple(dim for dim, size in enumerate(sizes) if size != shape[dim])
    summed = block.sum(dim=dims, keepdim=True) if dims else block
    return summed.reshape(call.local_output_shape())


@rule("trace")
def trace(call: OpCall) -> Signature:
    return Signature((letters(2),), ((),), reduces={"a": "sum", "b": "sum"}, linear=_ALONE, local=_trace)


def _trace(call: LocalCall) -> Any:
    """The part of the global diagonal that runs through this block."""
    block = call.args[0] if call.args else call.kwargs["input"]
    rows, columns = block_region(call, labels_of(call), call.input_shapes[0]).offsets
    return block.diagonal(rows - columns).sum()


@rule("median", "nanmedian")
def unsharded_dim(call: OpCall) -> Signature | None:
    """Needs all elements of the dim at once; the other dims may be cut."""
    given = arguments(call, "input", "dim", "keepdim", dim=None, keepdim=False)
    return reduction(call, given["dim"], bool(given["keepdim"]))


@rule("mode")
def unsharded_last_dim(call: OpCall) -> Signature | None:
    given = arguments(call, "input", "dim", "keepdim", dim=-1, keepdim=False)
    return reduction(call, given["dim"], bool(given["keepdim"]))


@rule("quantile", "nanquantile")
def quantile(call: OpCall) -> Signature | None:
    """The quantiles, when they are several, are the first dim of the result."""
    given = arguments(call, "input", "q", "dim", "keepdim", dim=None, keepdim=False)
    spec, dims = given["input"], reduced_dims(given["input"].ndim, given["dim"])
    labels = letters(spec.ndim)
    if not isinstance(spec, TensorSpec) or given["dim"] is None:
        kept: Labels = (None,) * len(call.outputs[0])
        return Signature(tuple((None,) * one.ndim for one in call.tensors), (kept,))
    inputs: tuple[Labels, ...] = (tuple(None if one in dims else label for one, label in enumerate(labels)),)
    inputs += tuple((None,) * one.ndim for one in call.tensors[1:])
    kept = tuple(
        None if one in dims else label for one, label in enumerate(labels) if given["keepdim"] or one not in dims
    )
    return Signature(inputs, ((*(None,) * (len(call.outputs[0]) - len(kept)), *kept),), local=_quantile)


def _quantile(call: LocalCall) -> Any:
    """An empty block, which the function refuses, gives an empty block that is as much in the graph as the others.

    Only between two neighbours, which is linear in it, does ``q`` have a gradient.
    """
    given = arguments(call, "input", "q", interpolation="linear")
    if given["input"].numel() or not math.prod(call.input_shapes[0]):
        return call.func(*call.args, **call.kwargs)
    result = given["input"].sum()
    if _platform.is_tensor(given["q"]) and given["interpolation"] == "linear":
        result = result + given["q"].sum()
    return result.expand(call.local_output_shape())


@rule("cosine_similarity")
def cosine_similarity(call: OpCall) -> Signature | None:
    given = arguments(call, "x1", "x2", "dim", "eps", dim=1)
    return _along_dim(call, int(given["dim"]), keepdim=False)


@rule("pairwise_distance")
def pairwise_distance(call: OpCall) -> Signature | None:
    given = arguments(call, "x1", "x2", "p", "eps", "keepdim", keepdim=False)
    return _along_dim(call, -1, bool(given["keepdim"]))


def _along_dim(call: OpCall, dim: int, keepdim: bool) -> Signature | None:
    """Two broadcast tensors, reduced together along a dim that stays whole."""
    ndim = max((spec.ndim for spec in call.tensors), default=0)
    if len(call.tensors) != 2:
        return None
    if ndim == 0:
        return Signature(((), ()), ((),) * len(call.outputs))
    shape = tuple(
        max(
            (
                spec.shape[spec.ndim - back]
                for spec in call.tensors
                if spec.ndim >= back and spec.shape[spec.ndim - back] != 1
            ),
            default=1,
        )
        for back in range(ndim, 0, -1)
    )
    dim %= ndim
    gone = letters(ndim)[dim]
    inputs = broadcast_labels([spec.shape for spec in call.tensors], shape)
    inputs = tuple(tuple(None if label == gone else label for label in labels) for labels in inputs)
    output = tuple(None if one == dim else label for one, label in enumerate(letters(ndim)) if keepdim or one != dim)
    return Signature(inputs, (output,)) if len(output) == len(call.outputs[0]) else None
