"""Neutral operators that write into their first argument.

MindSpore's own in-place operators do not change a tensor on a CPU. ``copy_`` does and is recorded, but a leaf that is
written by it without being recorded is a leaf no longer; so such a write goes into the memory itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import mint, ops

from hyper_parallel.platform.mindspore import memory, private_api
from hyper_parallel.platform.mindspore.dtensor_neutral import neutral
from hyper_parallel.platform.mindspore.dtensor_ops_creation import clone
from hyper_parallel.platform.mindspore.start import on_ascend


@neutral
def copy_(input: Any, src: Any) -> Any:
    if on_ascend():
        return input.copy_(src)
    if private_api.is_recording():
        return input.copy_(clone(src))  # of a view MindSpore takes the whole memory
    values = src if src.dtype == input.dtype else src.to(input.dtype)
    if tuple(values.shape) != tuple(input.shape):
        values = ops.broadcast_to(values, tuple(input.shape))
    memory.copy_into(input, memory.memory_of(values))
    return input


@neutral
def zero_(input: Any) -> Any:
    return copy_(input, ops.zeros_like(input))


@neutral
def fill_(input: Any, value: Any) -> Any:
    return copy_(input, ops.zeros_like(input) + value)


def _in_place(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The form of an operator that writes its result into its first argument."""

    def write(input: Any, *args: Any, **kwargs: Any) -> Any:
        result = function(input, *args, **kwargs)
        return copy_(input, result if result.dtype == input.dtype else result.to(input.dtype))

    write.__name__ = name
    return write


for _name, _function in {
    "add_": lambda x, y, alpha=1: x + (y if alpha == 1 else y * alpha),
    "sub_": lambda x, y, alpha=1: x - (y if alpha == 1 else y * alpha),
    "mul_": lambda x, y: x * y,
    "div_": lambda x, y: x / y,
    "exp_": mint.exp,
    "sqrt_": mint.sqrt,
    "neg_": mint.neg,
    "relu_": mint.nn.functional.relu,
    "clamp_": mint.clamp,
    "masked_fill_": lambda x, mask, value: x.masked_fill(mask, value),
}.items():
    neutral(_in_place(_name, _function))
