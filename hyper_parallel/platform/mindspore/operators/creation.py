"""Neutral operators that make a tensor like a given one: copies, constants of its shape or dtype, its values."""

from __future__ import annotations

from typing import Any

from mindspore import ops

from hyper_parallel.platform.mindspore.base import tensors
from hyper_parallel.platform.mindspore.mends.missing_kernels import clone
from hyper_parallel.platform.mindspore.operators.table import neutral

neutral(clone)


@neutral
def contiguous(input: Any) -> Any:
    return input.contiguous()


@neutral
def zeros_like(input: Any, dtype: Any = None) -> Any:
    return tensors.zeros(tuple(input.shape), dtype=dtype or input.dtype)


@neutral
def ones_like(input: Any, dtype: Any = None) -> Any:
    return tensors.ones(tuple(input.shape), dtype=dtype or input.dtype)


@neutral
def full_like(input: Any, fill_value: Any, dtype: Any = None) -> Any:
    return ops.full(tuple(input.shape), fill_value, dtype=dtype or input.dtype)


@neutral
def new_zeros(input: Any, size: Any, dtype: Any = None) -> Any:
    return tensors.zeros(tuple(size), dtype=dtype or input.dtype)


@neutral
def new_ones(input: Any, size: Any, dtype: Any = None) -> Any:
    return tensors.ones(tuple(size), dtype=dtype or input.dtype)


@neutral
def detach(input: Any) -> Any:
    return input.data
