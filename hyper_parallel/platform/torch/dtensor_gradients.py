"""``torch.autograd.backward`` and ``torch.autograd.grad`` for distributed tensors: plain autograd on the blocks.

Gradients go in and come out as DTensors laid out by the law: cut as the value is, whole where it is whole or pending.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.platform.torch.dtensor_base import DTensorBase, _NoInterception, as_dtensor, detached, local_alias

# Reductions whose gradient is the same for every summand, so that a pending one can be the start of a backward pass.
_SUMS = frozenset({None, "sum"})


def backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """As ``torch.autograd.backward``."""
    starts, seeds = _starts(tensors, grad_variables if grad_tensors is None else grad_tensors, "backward")
    with _NoInterception():
        torch.autograd.backward(starts, seeds, retain_graph, create_graph, inputs=inputs)


def grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """As ``torch.autograd.grad``; the gradient of a DTensor is a DTensor."""
    starts, seeds = _starts(outputs, grad_outputs, "grad")
    wanted = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    with _NoInterception():
        gradients = torch.autograd.grad(starts, wanted, seeds, *args, **kwargs)
    return tuple(_labelled(gradient, tensor) for gradient, tensor in zip(gradients, wanted, strict=True))


def _labelled(gradient: torch.Tensor | None, tensor: Any) -> Any:
    if gradient is None or not isinstance(tensor, DTensorBase):
        return gradient
    # One tensor may be the gradient of several inputs: each gets an alias of its own.
    return as_dtensor(type(tensor), local_alias(gradient), tensor._layout.gradient(), tensor._global_shape)


def _starts(tensors: Any, gradients: Any, name: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The tensors to start from, with the blocks of the gradients that they start with."""
    starts = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    if gradients is None:
        given: Sequence[Any] = (None,) * len(starts)
    else:
        given = (gradients,) if isinstance(gradients, torch.Tensor) else tuple(gradients)
    if len(given) != len(starts):
        raise RuntimeError(f"{name}: got {len(starts)} tensors and {len(given)} gradients")
    pairs = [_start(tensor, gradient) for tensor, gradient in zip(starts, given, strict=True)]
    return tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)


def _start(tensor: Any, gradient: Any) -> tuple[Any, Any]:
    if not isinstance(tensor, DTensorBase):
        return tensor, gradient
    if any(op not in _SUMS for op in tensor._layout.partials):
        tensor = tensor.reduce_partial()
    with torch.enable_grad():  # autograd's own code must not see the global shape
        start = local_alias(tensor)
    if gradient is not None:
        return start, local_alias(tensor.lawful_gradient(gradient))
    if tensor._global_shape.numel() != 1:
        raise RuntimeError(
            "grad can be implicitly created only for scalar outputs, not for one of shape "
            f"{tuple(tensor._global_shape)}; pass the gradient to start with"
        )
    return start, torch.ones_like(detached(tensor))
