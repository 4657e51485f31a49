"""``torch.autograd.backward`` and ``torch.autograd.grad`` for distributed tensors: plain autograd on the blocks.

Gradients go in and come out as DTensors laid out by the law: cut as the value is, whole where it is whole or pending.

Note [Interception stays on during backward]
Hooks, recomputed forward passes and users' autograd functions run inside the engine, and their operators on DTensors
must be dispatched. So the engine is not called with interception off. Instead it is never shown a DTensor: it starts
from plain aliases of the blocks, and the inputs it is asked about are given as edges of the graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from hyper_parallel.platform.shared.lawful_gradients import LawfulGradients
from hyper_parallel.platform.torch.base.dtensor_base import (
    DTensorBase,
    as_dtensor,
    detached,
    local_alias,
)
from hyper_parallel.platform.torch.communication.differentiable import vary
from hyper_parallel.platform.torch.dtensor.local_calls import zeros_kept_in_graph
from hyper_parallel.platform.torch.private_api import NoInterception

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
    asked = None if inputs is None else _edges(_as_tuple(inputs))
    torch.autograd.backward(starts, seeds, retain_graph, create_graph, inputs=asked)


def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Any, ...]:
    """As ``torch.autograd.grad``; the gradient of a DTensor is a DTensor."""
    if is_grads_batched:
        raise ValueError(
            "torch.autograd.grad of distributed tensors cannot take is_grads_batched=True: collectives cannot be "
            "vectorised; call it once for each gradient"
        )
    if materialize_grads and allow_unused is False:
        raise ValueError("torch.autograd.grad: materialize_grads=True needs allow_unused=True or None")
    starts, seeds = _starts(outputs, grad_outputs, "grad")
    wanted = _as_tuple(inputs)
    gradients = torch.autograd.grad(
        starts, _edges(wanted), seeds, retain_graph, create_graph, only_inputs, allow_unused or materialize_grads
    )
    found = tuple(
        labelled(gradient, type(tensor), tensor._layout, tensor._global_shape)
        if gradient is not None and isinstance(tensor, DTensorBase)
        else gradient
        for gradient, tensor in zip(gradients, wanted, strict=True)
    )
    if not materialize_grads:
        return found
    return tuple(
        torch.zeros_like(tensor) if gradient is None else gradient
        for gradient, tensor in zip(found, wanted, strict=True)
    )


class Root(LawfulGradients):
    """A node of the graph in place of the distributed tensor that it made."""

    def __init__(self, tensor: Any) -> None:
        with torch.enable_grad():
            self.edge = get_gradient_edge(local_alias(tensor))
        self._layout, self._global_shape = tensor._layout, tensor._global_shape


def graph_root(tensor: Any) -> Any:
    """What backward can start from in place of a computed tensor, whose memory may go."""
    if not isinstance(tensor, DTensorBase):
        return get_gradient_edge(tensor)
    return Root(_summed(tensor))


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, (torch.Tensor, GradientEdge, Root)) else tuple(value)


def _edges(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The inputs, with edges of the graph in place of DTensors."""
    return tuple(
        _edge(tensor, number) if isinstance(tensor, DTensorBase) else tensor for number, tensor in enumerate(inputs)
    )


def _edge(tensor: Any, number: int) -> GradientEdge:
    if not tensor.requires_grad:
        raise RuntimeError(
            f"input {number}, a distributed tensor of shape {tuple(tensor._global_shape)}, does not require grad"
        )
    with NoInterception():
        return get_gradient_edge(tensor)


def labelled(gradient: torch.Tensor, kind: type, layout: Any, shape: Any) -> Any:
    """The gradient of a tensor of that layout, of which the engine has the block, as a distributed tensor."""
    # One tensor may be the gradient of several inputs: each gets an alias of its own.
    pending = [axis for axis, op in enumerate(layout.partials) if op is not None]
    plain = count_on_one_rank(local_alias(gradient), layout.mesh, pending)
    return as_dtensor(kind, plain, layout.gradient(), shape)


def given_block(tensor: Any, gradient: Any) -> torch.Tensor:
    """The block of a gradient that the program gives for ``tensor``; see :func:`count_on_one_rank` for the way out.

    That of a pending sum is whole, and next meets the backward of an operator that varies: it enters through an edge.
    """
    block = local_alias(tensor.lawful_gradient(gradient))
    mesh, partials = tensor._layout.mesh, tensor._layout.partials
    axes = tuple(axis for axis, op in enumerate(partials) if op is not None and mesh.shape[axis] > 1)
    if not axes or not block.requires_grad or mesh.get_coordinate() is None:
        return block
    return vary(block, mesh.get_group(axes))


def count_on_one_rank(gradient: torch.Tensor, mesh: Any, axes: Sequence[int]) -> torch.Tensor:
    """The gradient of a value that is a pending sum over ``axes``, to be used as a whole value there.

    It comes out of an edge that sums its own gradient over the ranks, since what it meets there is the backward of an
    operator that varies. Used as a whole value it is the same on every rank, and must be counted by one: the others
    keep it in their graph with a gradient of zeros.
    """
    if not axes or not gradient.requires_grad or mesh.leads(axes):
        return gradient
    return gradient.detach() + zeros_kept_in_graph(gradient)


def _starts(tensors: Any, gradients: Any, name: str) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The tensors to start from, with the blocks of the gradients that they start with."""
    starts = _as_tuple(tensors)
    if gradients is None:
        given: Sequence[Any] = (None,) * len(starts)
    else:
        given = (gradients,) if isinstance(gradients, torch.Tensor) else tuple(gradients)
    if len(given) != len(starts):
        raise RuntimeError(f"{name}: got {len(starts)} tensors and {len(given)} gradients")
    pairs = [_start(tensor, gradient) for tensor, gradient in zip(starts, given, strict=True)]
    return tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)


def _start(tensor: Any, gradient: Any) -> tuple[Any, Any]:
    if isinstance(tensor, Root) and gradient is not None:
        return tensor.edge, given_block(tensor, gradient)
    if not isinstance(tensor, DTensorBase):
        return (tensor.edge if isinstance(tensor, Root) else tensor), gradient
    tensor = _summed(tensor)
    with torch.enable_grad():  # autograd's own code must not see the global shape
        start = local_alias(tensor)
    if gradient is not None:
        return start, given_block(tensor, gradient)
    if tensor._global_shape.numel() != 1:
        raise RuntimeError(
            "grad can be implicitly created only for scalar outputs, not for one of shape "
            f"{tuple(tensor._global_shape)}; pass the gradient to start with"
        )
    return start, torch.ones_like(detached(tensor))


def _summed(tensor: Any) -> Any:
    """A tensor whose gradient is the same for all its summands, if it is a pending sum."""
    if tensor._layout.reduced_later or any(op not in _SUMS for op in tensor._layout.partials):
        return tensor.reduce_partial()
    return tensor
