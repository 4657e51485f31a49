"""A linear layer whose weight is cut: where communication and matrix product meet.

Note [The seam]
:func:`multiply` is the one place where a gather stands before a product and a reduction behind it. A platform whose
device can do both at once (chunks of the gather against chunks of the product) replaces this function and nothing else.

Note [The bias behind the sum]
Ranks that hold summands of the output must not all add the bias, and if one of them does, its gradient has to be sent
to the others. So a whole bias is added to the sum, where every rank has it anyway. A bias that is cut on another axis
(2-D tensor parallelism), or a sum that is to stay pending, gets it from one rank.
"""

from __future__ import annotations

import functools
from typing import Any

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.modules.boundary import InputBoundary, OutputBoundary
from hyper_parallel.core.modules.linear_layers import HoldsProduct, Linear
from hyper_parallel.core.modules.lora import Adapter
from hyper_parallel.platform import get_platform

_platform = get_platform()


class Projection(HoldsProduct):
    """The forward function of a linear layer whose parameters are cut."""

    def __init__(
        self,
        linear: Linear,
        on_input: InputBoundary,
        on_output: OutputBoundary,
        bias_behind: bool,
        adapter: Adapter | None = None,
    ) -> None:
        self.linear, self.on_input, self.on_output, self.bias_behind = linear, on_input, on_output, bias_behind
        self.adapter = adapter

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        (x,) = args or kwargs.values()
        linear = self.linear if self.adapter is None else functools.partial(self.adapter.multiply, module)
        out = multiply(x, self.on_input, linear, module.weight, module.bias, self.on_output, self.bias_behind)
        return self.on_output.plain(out) if self.on_output.local and isinstance(out, DTensor) else out


def multiply(
    x: Any,
    on_input: InputBoundary,
    linear: Linear,
    weight: Any,
    bias: Any,
    on_output: OutputBoundary,
    bias_behind: bool,
) -> Any:
    """Bring the input where the product wants it, multiply, and bring the result where it is wanted.

    ``bias_behind`` adds the bias to the sum, see Note [The bias behind the sum].
    forward: the gather of ``on_input``, the reduction of ``on_output``; backward: their gradients.
    """
    x = on_input(x)
    if bias is None or not bias_behind:
        return on_output.move(linear(x, weight, bias))
    return plus_bias(on_output.move(linear(x, weight, None)), bias)


def plus_bias(out: DTensor, bias: DTensor) -> DTensor:
    """``out`` plus the bias, in the precision of ``out``: under autocast that is not the bias's own."""
    return out + (bias if bias.dtype == out.dtype else bias.to(out.dtype))
