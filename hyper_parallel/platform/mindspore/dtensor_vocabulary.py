"""Methods of tensors that the rules use and MindSpore's tensors lack, or have without a kernel for a CPU.

The rules of ``core/`` compute with methods that tensors of both frameworks have. The few that are missing here are
added to MindSpore's tensor class; two that exist take the other framework's keywords besides their own, and ``clone``,
which has no kernel on a CPU, is given one there. A few functions are mended. What worked before works as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.mindspore import dtensor_ops_reductions as reductions
from hyper_parallel.platform.mindspore import dtensor_ops_shapes, dtensor_whole
from hyper_parallel.platform.mindspore.dtensor_ops_creation import clone
from hyper_parallel.platform.mindspore.dtensor_ops_positions import index_added
from hyper_parallel.platform.mindspore.start import on_ascend


def _detach(self: Any) -> Any:
    """The same memory without gradient history."""
    return self.data


def _is_complex(self: Any) -> bool:
    return "Complex" in str(self.dtype)


def _sum_to_size(self: Any, *size: Any) -> Any:
    """The sum over the dims that ``size`` lacks or has with size 1."""
    wanted = tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
    missing = self.ndim - len(wanted)
    dims = [
        *range(missing),
        *(missing + dim for dim, length in enumerate(wanted) if length != self.shape[missing + dim]),
    ]
    summed = mint.sum(self, tuple(dims), True) if dims else self
    return summed.reshape(wanted)


def _nansum(self: Any, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    return reductions.sum(self.masked_fill(mint.isnan(self), 0), dim, keepdim, dtype)


for _name, _method in {
    "detach": _detach,
    "is_complex": _is_complex,
    "sum_to_size": _sum_to_size,
}.items():
    if not hasattr(Tensor, _name):
        setattr(Tensor, _name, _method)


def _with_keywords(plain: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """``plain``, but calls that name ``dim`` or ``keepdim`` go to ``ours``."""

    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "dim" in kwargs or "keepdim" in kwargs:
            return ours(self, *args, **kwargs)
        return plain(self, *args, **kwargs)

    return method


def _narrow(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``narrow`` that gives no rows where none are asked for, and a gradient to a block without elements."""

    @functools.wraps(plain)
    def method(self: Any, dim: int, start: int, length: int) -> Any:
        has_elements = length and 0 not in self.shape
        return plain(self, dim, start, length) if has_elements else dtensor_ops_shapes.narrow(self, dim, start, length)

    return method


def _sum(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``sum`` that gives zeros where there is nothing to add; see Note [Sums over nothing] in ``dtensor_empty.py``."""

    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if 0 in self.shape:
            names = {"axis": "dim", "keepdims": "keepdim"}
            return reductions.sum(self, *args, **{names.get(name, name): value for name, value in kwargs.items()})
        return plain(self, *args, **kwargs)

    return method


def _scatter_add(self: Any, dim: int, index: Any, src: Any) -> Any:
    """The elements of ``src`` added where ``index`` says; MindSpore's own has no kernel on a CPU."""
    return ops.tensor_scatter_elements(self, index, src, dim, "add")


def _index_add(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``index_add`` in the other framework's order too, which is a new tensor and takes positions of any integer."""

    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 3 and isinstance(args[0], int) and not kwargs:
            dim, index, source = args
            return index_added(ops.index_add, self, dim, index.to(ms.int32), source)
        return plain(self, *args, **kwargs)

    return method


Tensor.narrow = _narrow(Tensor.narrow)
Tensor.nansum = _with_keywords(Tensor.nansum, _nansum)
Tensor.amax = _with_keywords(Tensor.amax, reductions.amax)
Tensor.amin = _with_keywords(Tensor.amin, reductions.amin)
if not on_ascend():
    Tensor.clone = clone
    Tensor.scatter_add = _scatter_add
    Tensor.index_add = _index_add(Tensor.index_add)
    Tensor.sum = _sum(Tensor.sum)

dtensor_whole.mend_functions()
