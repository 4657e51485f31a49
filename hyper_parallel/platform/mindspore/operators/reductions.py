"""Neutral operators along dims: reductions, normalisations by them (softmax), running sums and products, orders."""

from __future__ import annotations

import builtins
from typing import Any

import mindspore as ms
from mindspore import mint, ops

from hyper_parallel.platform.mindspore.base import tensors
from hyper_parallel.platform.mindspore.mends import same_bits, softmax_of_one
from hyper_parallel.platform.mindspore.mends.empty_blocks import reduced_shape, sum_along, sum_of_nothing
from hyper_parallel.platform.mindspore.operators.table import neutral


def _dims(dim: Any) -> Any:
    return None if dim is None or (isinstance(dim, (tuple, list)) and not dim) else dim


@neutral
def sum(input: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    return sum_along(input, dim, keepdim, dtype)


@neutral
def mean(input: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    return mint.mean(input, _dims(dim), keepdim, dtype=dtype)


@neutral
def prod(input: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    if 0 in input.shape:
        return sum_of_nothing(input, _dims(dim), keepdim, dtype) + 1
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
        return tensors.zeros(tuple(reduced_shape(input, _dims(dim), keepdim)), dtype=ms.bool_)
    return ops.any(input, dim, keepdim)


@neutral
def all(input: Any, dim: Any = None, keepdim: bool = False) -> Any:
    if 0 in input.shape:
        return tensors.ones(tuple(reduced_shape(input, _dims(dim), keepdim)), dtype=ms.bool_)
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
    result = same_bits.log(sum_along(mint.exp(input - highest), dim, keepdim))
    return result + (highest if keepdim else highest.reshape(result.shape))


@neutral
def softmax(input: Any, dim: Any, dtype: Any = None) -> Any:
    return softmax_of_one.softmax(input if dtype is None else input.to(dtype), dim)


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
