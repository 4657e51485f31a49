"""Rows in groups on MindSpore: their order, and their products with one matrix per group, in a loop.

Ascend has a kernel for the products (``grouped_matmul``); a CPU has none, and the loop is right on both.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.base.tensors import cat, zeros
from hyper_parallel.platform.mindspore.mends.empty_blocks import zeros_of


def order_by_key(keys: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    if not keys.shape[0]:
        return zeros((0,), ms.int64), zeros((num_keys,), ms.int64)
    keys = keys.astype(ms.int64)
    size = keys.shape[0]
    counts = (keys.reshape(-1, 1) == Tensor(np.arange(num_keys)).reshape(1, -1)).astype(ms.int64).sum(0)
    ordered = ops.sort(keys * size + Tensor(np.arange(size)))[1]  # MindSpore promises no order of equal ones
    return ordered.astype(ms.int64), counts


def inverse_order(order: Tensor) -> Tensor:
    if not order.shape[0]:
        return order
    return ops.sort(order)[1].astype(ms.int64)


def group_of_rows(counts: Tensor, num_rows: int) -> Tensor:
    if not num_rows:
        return zeros((0,), ms.int64)
    ends = ops.cumsum(counts, 0)
    return (Tensor(np.arange(num_rows)).reshape(-1, 1) >= ends.reshape(1, -1)).astype(ms.int64).sum(1)


def keys_within(keys: Tensor, begin: int, end: int) -> Tensor:
    if 0 in keys.shape:
        return keys
    is_within = ops.logical_and(keys >= begin, keys < end)
    return ops.select(is_within, keys - begin, ops.zeros_like(keys) + (end - begin))


def replaced(keys: Tensor, condition: Tensor, other: int) -> Tensor:
    return keys if 0 in keys.shape else ops.select(condition, ops.zeros_like(keys) + other, keys)


def first_of_row(keys: Tensor, width: int, other: int) -> Tensor:
    if 0 in keys.shape:
        return keys
    rows = keys.reshape(-1, width)
    same = (rows.reshape(-1, width, 1) == rows.reshape(-1, 1, width)).astype(ms.int64)
    before = (same * Tensor(np.tril(np.ones((width, width), np.int64), -1))).sum(2) > 0
    return replaced(rows, before, other).reshape(-1)


def take_rows(tensor: Tensor, index: Tensor) -> Tensor:
    if not index.shape[0]:
        return zeros((0, *tensor.shape[1:]), tensor.dtype)
    return ops.gather(tensor, index, 0)


def grouped_linear(rows: Tensor, weight: Tensor, bias: Tensor | None, counts: Any, is_transposed: bool) -> Tensor:
    return _GroupedLinear.apply(rows, weight, bias, tuple(counts.numbers()), is_transposed)


def no_rows(width: int, rows: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    return zeros_of((0, width), rows.dtype, rows, *tensors)


class _GroupedLinear(private_api.Function):
    """forward: ``rows @ weight[g].T + bias[g]`` by group; backward: ``d @ weight[g]``, ``d.T @ rows``, ``d``'s sum."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Any, numbers: tuple[int, ...], is_transposed: bool
    ) -> Any:
        ctx.save_for_backward(rows, weight)
        ctx.numbers, ctx.is_transposed, ctx.bias = numbers, is_transposed, bias
        products = []
        for group, begin, end in _spans(numbers):
            product = mint.matmul(rows[begin:end], weight[group] if is_transposed else weight[group].T)
            products.append(product if bias is None else product + bias[group])
        return cat(products)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        rows, weight = ctx.saved_tensors
        of_rows: list[Tensor] = []
        of_weight: dict[int, Tensor] = {}
        of_bias: dict[int, Tensor] = {}
        for group, begin, end in _spans(ctx.numbers):
            given, part, matrix = gradient[begin:end], rows[begin:end], weight[group]
            of_rows.append(mint.matmul(given, matrix.T if ctx.is_transposed else matrix))
            left, right = (part, given) if ctx.is_transposed else (given, part)
            of_weight[group], of_bias[group] = mint.matmul(left.T, right), given.sum(0)
        bias = None if ctx.bias is None else _stacked(of_bias, ctx.bias)
        return cat(of_rows), _stacked(of_weight, weight), bias, None, None


def _stacked(found: dict[int, Tensor], like: Tensor) -> Tensor:
    """One gradient out of those of the groups, zeros for those that have none."""
    nothing = zeros(like.shape[1:], like.dtype)
    return cat([found.get(group, nothing).reshape(1, *like.shape[1:]) for group in range(like.shape[0])])


def _spans(numbers: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """(group, first row, row behind the last) of the groups that have rows."""
    ends = list(itertools.accumulate(numbers, initial=0))
    return [(group, begin, end) for group, (begin, end) in enumerate(itertools.pairwise(ends)) if begin < end]
