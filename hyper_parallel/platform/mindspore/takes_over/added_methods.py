"""Methods of tensors that the rules use and MindSpore's tensors lack.

The rules of ``core/`` compute with methods that tensors of both frameworks have. The few that are missing here are
added to MindSpore's tensor class, and two that exist take PyTorch's keywords besides their own. What is wrong on a CPU
is mended (``mends/``). What worked before works as before.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mindspore import Tensor, mint

from hyper_parallel.platform.mindspore.mends import empty_blocks, missing_kernels
from hyper_parallel.platform.mindspore.operators import reductions as reductions
from hyper_parallel.platform.mindspore.operators import shapes
from hyper_parallel.platform.mindspore.takes_over import whole_functions


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
        return plain(self, dim, start, length) if has_elements else shapes.narrow(self, dim, start, length)

    return method


Tensor.narrow = _narrow(Tensor.narrow)
Tensor.nansum = _with_keywords(Tensor.nansum, _nansum)
Tensor.amax = _with_keywords(Tensor.amax, reductions.amax)
Tensor.amin = _with_keywords(Tensor.amin, reductions.amin)
empty_blocks.install()
missing_kernels.install()
whole_functions.mend_functions()
