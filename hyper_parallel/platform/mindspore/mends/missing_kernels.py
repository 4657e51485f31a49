"""Methods of tensors for which MindSpore 2.10 has no kernel on a CPU, by operators that have one::

Tensor([1.0]).clone()  # The kernel Clone unregistered.
Tensor([1.0]).scatter_add(0, Tensor([0]), Tensor([1.0]))  # The kernel ScatterAddExt unregistered.
Tensor([1.0]).index_add(0, Tensor([0]), Tensor([1.0]))  # The kernel ScatterAddExt unregistered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import Tensor, ops

from hyper_parallel.platform.mindspore.mends import ACTIVE
from hyper_parallel.platform.mindspore.mends.empty_blocks import zeros_of

__all__ = ["clone", "index_added", "install"]


def clone(input: Any) -> Any:
    return ops.logical_or(input, input) if input.dtype == ms.bool_ else input * 1


def index_added(plain: Callable[..., Any], input: Any, dim: int, index: Any, source: Any) -> Any:
    """``plain``, MindSpore's ``index_add``, into a copy. It has no kernel for tensors without elements."""
    if 0 in input.shape or 0 in source.shape:
        return clone(input) + zeros_of((), input.dtype, source)
    return plain(clone(input), index, source, dim)


def _scatter_add(self: Any, dim: int, index: Any, src: Any) -> Any:
    return ops.tensor_scatter_elements(self, index, src, dim, "add")


def _index_add(plain: Callable[..., Any]) -> Callable[..., Any]:
    """``index_add`` in PyTorch's order too, which is a new tensor and takes positions of any integer."""

    @functools.wraps(plain)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 3 and isinstance(args[0], int) and not kwargs:
            dim, index, source = args
            return index_added(ops.index_add, self, dim, index.to(ms.int32), source)
        return plain(self, *args, **kwargs)

    return method


def install() -> None:
    """Give MindSpore's tensors the methods."""
    if ACTIVE:
        Tensor.clone = clone
        Tensor.scatter_add = _scatter_add
        Tensor.index_add = _index_add(Tensor.index_add)
