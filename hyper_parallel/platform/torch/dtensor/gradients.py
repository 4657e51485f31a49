"""Backward and gradients by name, spelled as on every framework; on PyTorch they are its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel.platform.torch.dtensor import dtensor_gradients
from hyper_parallel.platform.torch.private_api import ThreadValue, has_hooks_on_gradient

__all__ = [
    "backward",
    "get_grad",
    "graph_root",
    "has_gradient_hooks",
    "new_thread_value",
    "set_grad",
    "value_and_grad",
]

graph_root = dtensor_gradients.graph_root
has_gradient_hooks = has_hooks_on_gradient
new_thread_value = ThreadValue


def backward(tensors: Any, gradients: Any = None, retain_graph: bool = False, create_graph: bool = False) -> None:
    """Add the gradients of ``tensors`` to the leaves they were computed from; without ``gradients`` of scalars."""
    dtensor_gradients.backward(tensors, gradients, retain_graph or create_graph, create_graph)


def value_and_grad(
    fn: Callable[..., Any], weights: Sequence[torch.Tensor]
) -> Callable[..., tuple[Any, tuple[torch.Tensor, ...]]]:
    """A function that calls ``fn`` and gives ``(value, gradients of the weights)``.

    The value of ``fn`` is the scalar to differentiate, or a tuple that begins with it. A weight that it was not
    computed from has a gradient of zeros. ``grad`` of the weights is left as it is.
    """
    weights = tuple(weights)

    def run(*args: Any, **kwargs: Any) -> tuple[Any, tuple[torch.Tensor, ...]]:
        with torch.enable_grad():
            value = fn(*args, **kwargs)
        loss = value[0] if isinstance(value, tuple) else value
        found = torch.autograd.grad(loss, weights, allow_unused=True)
        return value, tuple(
            torch.zeros_like(weight) if gradient is None else gradient
            for weight, gradient in zip(weights, found, strict=True)
        )

    return run


def get_grad(tensor: torch.Tensor) -> torch.Tensor | None:
    """The gradient that backward has added up in the leaf so far; None before."""
    return tensor.grad


def set_grad(tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Replace the gradient; None forgets it."""
    tensor.grad = gradient
