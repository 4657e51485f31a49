"""The product of a linear layer, held where others may put something around it.

Note [Who holds the product]
A style, an adapter and a split backward all change what a linear layer computes, in any order. So each of them takes
over the product that the one before held, ``(x, weight, bias or None) -> output``, as ``linear`` of an object of its
own. An adapter holds the product of its layer, also where a style computes the output; else the layer's forward does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.platform import get_platform

_platform = get_platform()

Linear = Callable[[Any, Any, Any], Any]  # (x, weight, bias or None) -> the layer's output


class HoldsProduct:
    """What computes a linear layer's output; see Note [Who holds the product]."""

    linear: Linear


class LinearForward(HoldsProduct):
    """The forward function of a linear layer that is nothing but its product."""

    def __init__(self, linear: Linear) -> None:
        self.linear = linear

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        (x,) = args or kwargs.values()
        return self.linear(x, module.weight, module.bias)


class AroundProduct(HoldsProduct):
    """A product with something around it, for weights that are the layer's own."""

    def __call__(self, x: Any, weight: Any, bias: Any) -> Any:
        return self.linear(x, weight, bias)


def forward_with_product(module: Any) -> HoldsProduct | None:
    """The layer's forward function, if it holds the product."""
    forward = getattr(_platform.get_cell_construct(module), "__func__", None)
    return forward if isinstance(forward, HoldsProduct) else None


def linear_function(module: Any) -> Linear | None:
    """What a linear layer computes of input, weight and bias; None for a layer with a computation of its own."""
    forward = forward_with_product(module)
    return forward.linear if isinstance(forward, LinearForward) else _platform.linear_function(module)


def bare(linear: Linear) -> Linear:
    """The product without what was put around it: for weights that are made of parameters, and are none."""
    while isinstance(linear, AroundProduct):
        linear = linear.linear
    return linear
