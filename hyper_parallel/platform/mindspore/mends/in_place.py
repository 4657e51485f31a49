"""Writing to a tensor in place.

In MindSpore 2.10 most in-place operators leave a tensor on a CPU as it is, ``copy_`` through a view is lost, ``copy_``
from a view takes the whole memory behind it, and a leaf that is written by ``copy_`` without being recorded is a leaf
no longer::

    x = Tensor(np.ones(2, np.float32))
    x.add_(x)  # x is [1, 1]
    y = Tensor(np.zeros((2, 2), np.float32))
    y.T.copy_(Tensor(np.ones((2, 2), np.float32)))  # y is [[0, 0], [0, 0]]

But pointer and strides of every tensor, views included, are right and public (``memory.py``). So what is to be changed
in place is changed through them. The autograd tape does not see such a write: it is for leaves and results, outside of
recorded computations, as gradients, parameters, buffers and the results of collectives are.
"""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, ops

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.base.memory import copy_into, memory_of
from hyper_parallel.platform.mindspore.mends import ACTIVE
from hyper_parallel.platform.mindspore.mends.missing_kernels import clone

__all__ = ["copy_", "write"]


def write(target: Tensor, values: Tensor) -> None:
    """Copy the values of a tensor of the same dtype and shape into ``target``, outside of the tape."""
    if ACTIVE:
        copy_into(target, memory_of(values))
    else:
        with private_api.no_grad():
            target.copy_(values)


def copy_(input: Any, src: Any) -> Any:
    """``input.copy_(src)``, recorded where operators are."""
    if not ACTIVE:
        return input.copy_(src)
    if private_api.is_recording():
        return input.copy_(clone(src))
    values = src if src.dtype == input.dtype else src.to(input.dtype)
    if tuple(values.shape) != tuple(input.shape):
        values = ops.broadcast_to(values, tuple(input.shape))
    copy_into(input, memory_of(values))
    return input
