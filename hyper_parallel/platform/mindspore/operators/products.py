"""Neutral operators that multiply matrices. With an empty dim anywhere the product is zeros made here."""

from __future__ import annotations

from typing import Any

from mindspore import mint

from hyper_parallel.platform.mindspore.mends.empty_blocks import aligned_sizes, zeros_of
from hyper_parallel.platform.mindspore.mends.row_products import is_row, product_by_matrices
from hyper_parallel.platform.mindspore.operators.table import neutral

# As MindSpore has them: its modules are given replacements later (``takes_over/``), which look for DTensors first.
_linear, _matmul = mint.nn.functional.linear, mint.matmul


@neutral
def matmul(input: Any, other: Any) -> Any:
    if 0 in input.shape or 0 in other.shape:
        return zeros_of(_product_shape(input, other), input.dtype, input, other)
    if is_row(input) or is_row(other):
        return product_by_matrices(_matmul, input, other, _product_shape(input, other))
    return _matmul(input, other)


def _product_shape(input: Any, other: Any) -> tuple[int, ...]:
    left, right = tuple(input.shape), tuple(other.shape)
    batch = [max(sizes) if 0 not in sizes else 0 for sizes in aligned_sizes(left[:-2], right[:-2])]
    rows = left[-2:-1] if len(left) > 1 else ()
    columns = right[-1:] if len(right) > 1 else ()
    return (*batch, *rows, *columns)


@neutral
def bmm(input: Any, other: Any) -> Any:
    return matmul(input, other) if 0 in input.shape or 0 in other.shape else mint.bmm(input, other)


@neutral
def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    if 0 in input.shape or 0 in weight.shape:
        product = zeros_of((*input.shape[:-1], *weight.shape[:-1]), input.dtype, input, weight)
        if bias is None:
            return product
        return zeros_of(product.shape, input.dtype, input, weight, bias) if 0 in product.shape else product + bias
    return _linear(input, weight, bias)


matmul.on_elements, linear.on_elements = _matmul, _linear
matmul.not_for = lambda tensor: 0 in tensor.shape or is_row(tensor)
