"""Rows in groups on PyTorch: their order, and their products with one matrix per group.

Note [What grouped_mm cannot]
PyTorch 2.13's ``grouped_mm`` has no float64, wants rows of a multiple of 16 bytes, raises for 0 rows, and its backward
raises for a gradient that is expanded (as of a sum). Without memory it takes bfloat16 only. So the others are a loop
over the groups, no rows are zeros that keep the weight in the graph, and gradients are made contiguous. Rows behind the
last group would be memory that nobody has set: there are none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

_OF_KERNEL = frozenset({torch.float32, torch.bfloat16, torch.float16})


def order_by_key(keys: torch.Tensor, num_keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    nothing = torch.zeros(num_keys, dtype=torch.int64, device=keys.device)
    counts = nothing.scatter_add(0, keys.long(), torch.ones_like(keys, dtype=torch.int64))
    return torch.argsort(keys, stable=True), counts


def inverse_order(order: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(order.shape[0], dtype=order.dtype, device=order.device)
    return torch.zeros_like(order).scatter(0, order, positions)


def group_of_rows(counts: torch.Tensor, num_rows: int) -> torch.Tensor:
    places = torch.arange(num_rows, dtype=counts.dtype, device=counts.device)
    return torch.searchsorted(counts.cumsum(0), places, right=True)


def keys_within(keys: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    return torch.where((keys >= begin) & (keys < end), keys - begin, end - begin)


def replaced(keys: torch.Tensor, condition: torch.Tensor, other: int) -> torch.Tensor:
    return keys.masked_fill(condition, other)


def first_of_row(keys: torch.Tensor, width: int, other: int) -> torch.Tensor:
    rows = keys.reshape(-1, width)
    same = rows.unsqueeze(2) == rows.unsqueeze(1)  # (rows, place, other place)
    return rows.masked_fill(same.tril(-1).any(2), other).reshape(-1)


def take_rows(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return tensor.index_select(0, index)


def grouped_linear(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, counts: Any, is_transposed: bool
) -> torch.Tensor:
    dtype = _dtype_of_product(rows, [weight] if bias is None else [weight, bias])
    rows, weight, bias = rows.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    if not _has_kernel(rows, weight):
        return _in_a_loop(rows, weight, bias, counts.numbers(), is_transposed)
    ends = counts.tensor.cumsum(0)
    matrices = weight if is_transposed else weight.transpose(1, 2)
    product = _ContiguousGradient.apply(F.grouped_mm(rows, matrices, offs=ends.to(torch.int32)))
    if bias is None:
        return product
    # A product with ones where a row is of a group: unlike that of an index, its gradient is added in a fixed order.
    place = torch.arange(rows.shape[0], device=rows.device).unsqueeze(1)
    is_of_group = (place < ends) & (place >= ends - counts.tensor)
    return product + is_of_group.to(bias.dtype) @ bias


def no_rows(width: int, rows: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return rows.new_zeros(0, width, dtype=_dtype_of_product(rows, tensors)) + sum(map(_zero_of, tensors), rows.sum())


def _dtype_of_product(rows: torch.Tensor, tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """That of autocast, or of all of them; the same, or the same error, without rows: other ranks wait for this one."""
    kind = rows.device.type
    if rows.dtype != torch.float64 and not rows.is_meta and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    others = {str(tensor.dtype) for tensor in tensors} - {str(rows.dtype)}
    if others:
        raise ValueError(
            f"experts: tokens are {rows.dtype} and weights {', '.join(sorted(others))}; cast the ones to the others, "
            "or compute under torch.autocast"
        )
    return rows.dtype


def _zero_of(tensor: torch.Tensor) -> torch.Tensor:
    """A zero that keeps the tensor in the graph, whatever its values."""
    return tensor.masked_fill(torch.ones_like(tensor, dtype=torch.bool), 0).sum()


def _in_a_loop(
    rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, numbers: list[int], is_transposed: bool
) -> torch.Tensor:
    matrices = (weight.transpose(1, 2) if is_transposed else weight).unbind(0)
    biases = (None,) * len(matrices) if bias is None else bias.unbind(0)
    parts = zip(rows.split(numbers), matrices, biases, strict=True)
    return torch.cat([F.linear(part, matrix, offset) for part, matrix, offset in parts if part.shape[0]])


def _has_kernel(rows: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether ``grouped_mm`` takes these; see Note [What grouped_mm cannot]."""
    if rows.dtype not in _OF_KERNEL or weight.dtype != rows.dtype:
        return False
    if rows.is_meta and rows.dtype != torch.bfloat16:
        return False
    if rows.is_cuda and torch.cuda.get_device_capability(rows.device) < (8, 0):
        return False
    return all(size * rows.element_size() % 16 == 0 for size in (*weight.shape[1:], rows.shape[1]))


class _ContiguousGradient(torch.autograd.Function):
    """forward: identity; backward: the gradient in memory of its own; see Note [What grouped_mm cannot]."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.contiguous()
