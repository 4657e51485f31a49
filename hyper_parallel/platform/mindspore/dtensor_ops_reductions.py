"""Neutral operators along dims: reductions, normalisations by them (softmax), running sums and products, orders."""

from __future__ import annotations

import builtins
from typing import Any

import mindspore as ms
from mindspore import mint, ops

from hyper_parallel.platform.mindspore import same_bits, tensors
from hyper_parallel.platform.mindspore.dtensor_empty import zeros_of
from hyper_parallel.platform.mindspore.dtensor_neutral import neutral
from hyper_parallel.platform.mindspore.start import on_ascend

# As MindSpore has them: its modules give replacements later (:mod:`dtensor_whole`), which look for DTensors first.
_softmax, _sum = ops.softmax, mint.sum


def _dims(dim: Any) -> Any:
    return None if dim is None or (isinstance(dim, (tuple, list)) and not dim) else dim


@neutral
def sum(input: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    if 0 in input.shape:
        return _sum_of_nothing(input, _dims(dim), keepdim, dtype)
    return _sum(input, _dims(dim), keepdim, dtype=dtype)


def _reduced_shape(input: Any, dim: Any, keepdim: bool) -> list[int]:
    listed = range(input.ndim) if dim is None else dim if isinstance(dim, (tuple, list)) else (dim,)
    dims = {one % input.ndim for one in listed}
    return [1 if one in dims else size for one, size in enumerate(input.shape) if keepdim or one not in dims]


def _sum_of_nothing(input: Any, dim: Any, keepdim: bool, dtype: Any) -> Any:
    """See Note [Sums over nothing] in ``dtensor_empty.py``."""
    if dtype is None:
        dtype = input.dtype if "Float" in str(input.dtype) or "Complex" in str(input.dtype) else ms.int64
    return zeros_of(_reduced_shape(input, dim, keepdim), dtype, input)


@neutral
def mean(input: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    return mint.mean(input, _dims(dim), keepdim, dtype=dtype)


@neutral
def nanmean(input: Any, axis: Any = None, keepdims: bool = False, *, dtype: Any = None) -> Any:
    """The mean of the elements that are numbers."""
    if input.dtype not in (ms.float16, ms.bfloat16, ms.float32, ms.float64):
        raise TypeError(f"For 'nanmean', input should be floating point dtype, but got {input.dtype}.")
    are_none = mint.isnan(input)
    total = sum(input.masked_fill(are_none, 0), axis, keepdims, dtype)
    return total / sum(mint.logical_not(are_none), axis, keepdims).to(total.dtype)


@neutral
def prod(input: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    if 0 in input.shape:
        return _sum_of_nothing(input, _dims(dim), keepdim, dtype) + 1
    return mint.prod(input, dim, keepdim, dtype=dtype) if dim is not None else mint.prod(input, dtype=dtype)


@neutral
def max(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return mint.max(input) if dim is None else mint.max(input, dim, keepdim)


@neutral
def min(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return mint.min(input) if dim is None else mint.min(input, dim, keepdim)


@neutral
def amax(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return mint.amax(input, () if dim is None else dim, keepdim)


@neutral
def amin(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return mint.amin(input, () if dim is None else dim, keepdim)


@neutral
def argmax(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return ops.argmax(input, dim, keepdim)


@neutral
def argmin(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    return ops.argmin(input, dim, keepdim)


@neutral
def any(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    if 0 in input.shape:
        return tensors.zeros(tuple(_reduced_shape(input, _dims(dim), keepdim)), dtype=ms.bool_)
    return ops.any(input, dim, keepdim)


@neutral
def all(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    if 0 in input.shape:
        return tensors.ones(tuple(_reduced_shape(input, _dims(dim), keepdim)), dtype=ms.bool_)
    return ops.all(input, dim, keepdim)


@neutral
def std(input: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False) -> Any:
    return std_mean(input, dim, unbiased, keepdim)[0]


@neutral
def var(input: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False) -> Any:
    dims = tuple(range(input.ndim)) if _dims(dim) is None else dim
    deviations = input - mint.mean(input, dims, True)
    count = input.numel() // builtins.max(1, mint.sum(input, dims).numel())
    return mint.sum(deviations * deviations, dims, keepdim) / (count - int(unbiased))


@neutral
def std_mean(input: Any, dim: Any = None, unbiased: bool = True, keepdim: bool = False) -> Any:
    dims = tuple(range(input.ndim)) if _dims(dim) is None else dim
    return mint.sqrt(var(input, dims, unbiased, keepdim)), mint.mean(input, dims, keepdim)


@neutral
def logsumexp(input: Any, dim: Any, keepdim: bool = False) -> Any:
    """Of logarithms that are the same on every rank; see ``same_bits.py``."""
    highest = mint.amax(input, dim, True).data
    highest = highest.masked_fill(ops.isinf(highest), 0)
    result = same_bits.log(_sum(mint.exp(input - highest), dim, keepdim))
    return result + (highest if keepdim else highest.reshape(result.shape))


@neutral
def softmax(input: Any, dim: Any, dtype: Any = None) -> Any:
    """If MindSpore's first one is over one element, it computes all gradients afterwards as for one element."""
    if dtype is not None:
        input = input.to(dtype)
    if 1 in input.shape and input.shape[dim] == 1 and not on_ascend():
        return input - input + 1
    return _softmax(input, dim)


@neutral
def log_softmax(input: Any, dim: Any, dtype: Any = None) -> Any:
    return ops.log_softmax(input if dtype is None else input.to(dtype), dim)


@neutral
def cumsum(input: Any, dim: int, dtype: Any = None) -> Any:
    if 0 in input.shape:
        return input * 1
    result = ops.cumsum(input, dim)
    return result if dtype is None else result.to(dtype)


@neutral
def cumprod(input: Any, dim: int) -> Any:
    return ops.cumprod(input, dim)


@neutral
def sort(input: Any, dim: int = -1, descending: bool = False) -> Any:
    return ops.sort(input, dim, descending)


@neutral
def argsort(input: Any, dim: int = -1, descending: bool = False) -> Any:
    return ops.argsort(input, dim, descending)


@neutral
def topk(input: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    return ops.topk(input, k, dim, largest, sorted)
