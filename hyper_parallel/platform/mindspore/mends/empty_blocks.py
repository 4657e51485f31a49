"""Tensors without elements: what MindSpore's kernels leave unset is set to zero here.

A rank may have no rows of a tensor. A kernel of MindSpore 2.10 on a CPU that is given no elements is not run at all,
and its result is whatever was in memory before::

    def empty(*shape):
        return Tensor(np.zeros(shape, np.float32))


    used = [empty(1000) + 7 for _ in range(20)]
    del used
    mint.matmul(empty(1, 0), empty(0, 1000))  # [[0, 7, 7, ...]]

Note [Sums over nothing]
    The sum over no rows, the product of matrices with an empty inner dim, and in backward the gradient of a weight from
    no rows are garbage, without an error. So where a local tensor is empty, sums and products are zeros made here, and
    operators whose results are empty hand zeros back to all their arguments. Zeros are right on Ascend too, so nothing
    is switched off there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, mint

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.base.tensors import is_differentiable, zeros
from hyper_parallel.platform.mindspore.mends import ACTIVE

# Kernels that end the process (SIGFPE) when they are given nothing.
_DEADLY = frozenset({"flip", "lu_unpack"})
REFUSALS = (RuntimeError, TypeError, ValueError, IndexError, AttributeError)  # what kernels raise


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


def results_of_nothing(
    func: Callable[..., Any], blocks: list[Any], kwargs: dict[str, Any], shapes: list[tuple[int, ...]]
) -> Any:
    """Results without elements, of these shapes, for which every argument gets a gradient of zeros.

    Kernels that refuse tensors without elements are given one row of zeros instead.
    """
    if not blocks:  # a local implementation of a rule, whose blocks are silent already
        return func()
    if func.__name__[-1:] == "_":
        return func(*blocks, **kwargs)
    with private_api.no_grad():
        try:
            if func.__name__ in _DEADLY:
                raise RuntimeError
            result = func(*blocks, **kwargs)
        except REFUSALS:
            private_api.start_recording()  # MindSpore stops recording when an operator fails
            named_rows = {name: with_row(value) for name, value in kwargs.items()}
            result = func(*map(with_row, blocks), **named_rows)
    tensors = tensors_in([*blocks, *kwargs.values()])
    if isinstance(result, Tensor):
        return zeros_of(shapes[0], result.dtype, *tensors)
    if isinstance(result, (tuple, list)):
        described = iter(shapes)
        made = [zeros_of(next(described), one.dtype, *tensors) if isinstance(one, Tensor) else one for one in result]
        return getattr(result, "_make", type(result))(made)
    return result


def tensors_in(values: Any) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found.extend(tensors_in(value))
    return found


# ---------------------------------------------------------------- sums

_sum = mint.sum  # As MindSpore has it: its module is given a replacement later, which looks for DTensors first.


def sum_along(input: Any, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """The sum along a dim, several, or all."""
    dim = None if dim is None or (isinstance(dim, (tuple, list)) and not dim) else dim
    if 0 in input.shape:
        return sum_of_nothing(input, dim, keepdim, dtype)
    return _sum(input, dim, keepdim, dtype=dtype)


def sum_of_nothing(input: Any, dim: Any, keepdim: bool, dtype: Any) -> Any:
    if dtype is None:
        dtype = input.dtype if "Float" in str(input.dtype) or "Complex" in str(input.dtype) else ms.int64
    return zeros_of(reduced_shape(input, dim, keepdim), dtype, input)


def reduced_shape(input: Any, dim: Any, keepdim: bool) -> list[int]:
    listed = range(input.ndim) if dim is None else dim if isinstance(dim, (tuple, list)) else (dim,)
    dims = {one % input.ndim for one in listed}
    return [1 if one in dims else size for one, size in enumerate(input.shape) if keepdim or one not in dims]


def _summing_nothing(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``Tensor.sum`` that gives zeros where there is nothing to add."""

    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if 0 in self.shape:
            names = {"axis": "dim", "keepdims": "keepdim"}
            return sum_along(self, *args, **{names.get(name, name): value for name, value in kwargs.items()})
        return plain(self, *args, **kwargs)

    return method


def install() -> None:
    """Let sums of MindSpore's tensors know those without elements."""
    if ACTIVE:
        Tensor.sum = _summing_nothing(Tensor.sum)
