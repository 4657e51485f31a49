"""Blocks without elements: what MindSpore's kernels on a CPU leave unset is set to zero here.

Note [Sums over nothing]
A rank may have no rows of a tensor. A kernel of MindSpore 2.10 on a CPU that is given no elements is not run at all,
and its result is whatever was in memory before: the sum over no rows, the product of matrices with an empty inner dim,
and in backward the gradient of a weight from no rows are garbage, without an error. So where a block is empty, sums and
products are zeros made here, and operators whose results are empty hand zeros back to all their arguments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import Tensor

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.tensors import is_differentiable, zeros


class _Nothing(private_api.Function):
    """forward: zeros of a shape; backward: zeros for every tensor that was given.

    Differentiated once more these belong to the graph as they do on the ranks that have elements, which may wait for
    this one there. Their values do not count, so they may have been written to since (``ctx.saved_tensors`` refuses).
    """

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], dtype: Any, *tensors: Any) -> Any:
        ctx.given = tensors
        return zeros(shape, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        given = ctx.given
        return None, None, *(zeros_of(tensor.shape, tensor.dtype, gradient, *given) for tensor in given)


class _Silent(private_api.Function):
    """forward: identity; backward: zeros, whatever arrives."""

    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Any:
        return tensor.view(tensor.shape)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return zeros_of(gradient.shape, gradient.dtype, gradient)


def zeros_of(shape: Sequence[int], dtype: Any, *tensors: Any) -> Any:
    """Zeros that keep the tensors that need a gradient in the graph, with gradients of zeros.

    Bools and whole numbers have no part in backward, though MindSpore says that a comparison requires a gradient.
    """
    recorded = [tensor for tensor in tensors if isinstance(tensor, Tensor) and _has_gradient(tensor)]
    if not recorded or not private_api.is_recording():
        return zeros(tuple(shape), dtype=dtype)
    return _Nothing.apply(tuple(shape), dtype, *recorded)


def with_row(value: Any) -> Any:
    """The value with zeros for each tensor without elements in it, of size 1 where that has size 0."""
    if type(value) is list or type(value) is tuple:
        return type(value)([with_row(item) for item in value])
    if not isinstance(value, Tensor) or not has_no_elements(value):
        return value
    return zeros_of([size or 1 for size in value.shape], value.dtype, value)


def _has_gradient(tensor: Any) -> bool:
    return is_differentiable(tensor) and private_api.requires_grad(tensor)


def silent(value: Any) -> Any:
    """The value, with every tensor in it that needs a gradient getting zeros."""
    if isinstance(value, Tensor):
        needed = value.numel() and private_api.is_recording() and private_api.requires_grad(value)
        return _Silent.apply(value) if needed else value
    if type(value) is list or type(value) is tuple:
        return type(value)([silent(item) for item in value])
    return value


def has_no_elements(tensor: Any) -> bool:
    return 0 in tensor.shape


def aligned_sizes(first: Sequence[int], second: Sequence[int]) -> list[tuple[int, int]]:
    """The sizes of two shapes in pairs from the last dim, with 1 where one has no dim."""
    longest = max(len(first), len(second))
    padded = [(1,) * (longest - len(shape)) + tuple(shape) for shape in (first, second)]
    return list(zip(*padded, strict=True))
