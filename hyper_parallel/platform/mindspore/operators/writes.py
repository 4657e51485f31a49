"""Neutral operators that write into their first argument, by ``copy_``, which does so on a CPU too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import mint, ops

from hyper_parallel.platform.mindspore.mends.in_place import copy_
from hyper_parallel.platform.mindspore.operators.table import neutral

neutral(copy_)


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
