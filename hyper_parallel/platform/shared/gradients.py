"""Backward and gradients in the same words on every framework.

A training step, the same text on PyTorch and on MindSpore::

    import hyper_parallel

    loss = loss_of(model, batch)
    hyper_parallel.backward(loss)
    gradients = [hyper_parallel.grad_of(parameter) for parameter in parameters]

or, as MindSpore's optimizers want it::

    step = hyper_parallel.value_and_grad(lambda batch: loss_of(model, batch), parameters)
    loss, gradients = step(batch)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hyper_parallel.platform.platform import get_platform

__all__ = ["backward", "grad_of", "parallelize_value_and_grad", "value_and_grad", "zero_grad"]


def backward(loss: Any, gradient: Any = None, retain_graph: bool = False, create_graph: bool = False) -> None:
    """Add the gradient of ``loss`` to every leaf it was computed from; :func:`grad_of` reads it there.

    Without ``gradient`` the loss has one element. A second backward adds to the first; :func:`zero_grad` starts anew.
    """
    get_platform().backward(loss, gradient, retain_graph, create_graph)


def value_and_grad(fn: Callable[..., Any], weights: Sequence[Any]) -> Callable[..., tuple[Any, tuple[Any, ...]]]:
    """A function that calls ``fn`` and gives ``(value, gradients of the weights)``.

    ``fn`` gives the scalar to differentiate, or a tuple that begins with it. A weight that it was not computed from has
    a gradient of zeros. What :func:`grad_of` says about the weights does not change.
    """
    return get_platform().value_and_grad(fn, weights)


def parallelize_value_and_grad(
    fn: Callable[..., Any], weights: Sequence[Any], sens: Any = None
) -> Callable[..., tuple[Any, tuple[Any, ...]]]:
    """:func:`value_and_grad` by its name in HyperParallel 1.0; gradients are those of ``sens`` times the scalar."""
    if sens is None:
        return value_and_grad(fn, weights)

    def scaled(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        value = fn(*args, **kwargs)
        return (value[0] if isinstance(value, tuple) else value) * sens, value

    step = value_and_grad(scaled, weights)

    def run(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
        (_, value), gradients = step(*args, **kwargs)
        return value, gradients

    return run


def grad_of(tensor: Any) -> Any:
    """The gradient that :func:`backward` has added up in a leaf, as ``tensor.grad`` on PyTorch; None before."""
    return get_platform().get_grad(tensor)


def zero_grad(tensors: Iterable[Any]) -> None:
    """Forget the gradients of these leaves."""
    platform = get_platform()
    for tensor in tensors:
        platform.set_grad(tensor, None)
