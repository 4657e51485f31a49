"""Backward passes from distributed tensors: MindSpore's tape on the local tensors.

Gradients go in and come out as DTensors laid out by the law: sharded as the value is, replicated where it is replicated
or partial.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from mindspore import Tensor

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.dtensor import gradients as plain
from hyper_parallel.platform.mindspore.dtensor.local_calls import zeros_kept_in_graph
from hyper_parallel.platform.mindspore.dtensor.tensor_type import (
    DTensorBase,
    as_dtensor,
    detached,
    local_alias,
    plain_kind,
)
from hyper_parallel.platform.mindspore.operators.creation import ones_like, zeros_like

# Reductions whose gradient is the same for every summand, so that a partial one can be the start of a backward pass.
_SUMS = frozenset({None, "sum"})


needs_grad, requires_grad = plain.needs_grad, plain.requires_grad


def is_leaf(tensor: Any) -> bool:
    """Whether ``tensor`` was made by the program and not by an operator that is recorded."""
    return private_api.is_leaf(tensor)


def write_mark(tensor: Any) -> tuple[Any, Any]:
    """(a value that changes when the plain tensor is written to, its place in the graph)."""
    return private_api.version_of(tensor), None if private_api.is_leaf(tensor) else private_api.grad_node(tensor)


def count_on_one_rank(gradient: Any, mesh: Any, axes: Sequence[int]) -> Any:
    """The gradient of a value that is a pending sum over ``axes``, to be used as a whole value there: one rank counts
    it, the others keep it in their graph with a gradient of zeros.
    """
    if not axes or not needs_grad(gradient) or mesh.leads(axes):
        return gradient
    return detached(gradient) + zeros_kept_in_graph(gradient)


def backward(
    tensors: Any, gradients: Any = None, retain_graph: bool = False, create_graph: bool = False, inputs: Any = ()
) -> None:
    """Add the gradients of ``tensors`` to the leaves they were computed from; without ``gradients`` of scalars.

    A replicated or partial distributed loss is seeded with 1.
    """
    roots, seeds = _starts("backward", tensors, gradients)
    plain.backward(roots, seeds, retain_graph, create_graph, tuple(local_alias(one) for one in _as_tuple(inputs)))


def grad(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    allow_unused: bool = False,
) -> tuple[Any, ...]:
    """The gradients of ``outputs`` with respect to ``inputs``; of distributed tensors, laid out by the law."""
    roots, seeds = _starts("grad", outputs, grad_outputs)
    wanted = _as_tuple(inputs)
    found = plain.grad(
        roots, tuple(local_alias(one) for one in wanted), seeds, retain_graph, create_graph, allow_unused
    )
    return tuple(_labelled(gradient, tensor) for gradient, tensor in zip(found, wanted, strict=True))


def value_and_grad(fn: Callable[..., Any], weights: Sequence[Any]) -> Callable[..., tuple[Any, tuple[Any, ...]]]:
    """A function that calls ``fn`` and gives ``(value, gradients of the weights)``.

    The value of ``fn`` is the scalar to differentiate, or a tuple that begins with it. A weight that it was not
    computed from has a gradient of zeros. ``grad`` of the weights is left as it is.
    """
    weights = tuple(weights)

    def run(*args: Any, **kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
        was_recording = private_api.is_recording()
        private_api.start_recording()
        private_api.set_recording(True)
        try:
            value = fn(*args, **kwargs)
        finally:
            private_api.set_recording(was_recording)
        loss = value[0] if isinstance(value, tuple) else value
        found = grad(loss, weights, allow_unused=True)
        return value, tuple(
            _labelled(zeros_like(local_alias(weight)), weight) if gradient is None else gradient
            for weight, gradient in zip(weights, found, strict=True)
        )

    return run


def graph_root(tensor: Any) -> Any:
    """The tensor itself: the tape starts from tensors."""
    return tensor


def has_gradient_hooks(tensor: Any) -> bool:
    """Whether the tensor has hooks on its gradient."""
    return bool(local_alias(tensor).hooks())


class _ThreadValue(threading.local):
    value: Any = None


def new_thread_value(name: str) -> Any:
    """A value of each thread; backward runs in the thread that asks for it."""
    del name
    return _ThreadValue()


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)


def _starts(name: str, tensors: Any, gradients: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The blocks to start from, with the blocks of the gradients that they start with."""
    starts = _as_tuple(tensors)
    given = (None,) * len(starts) if gradients is None else _as_tuple(gradients)
    if len(given) != len(starts):
        raise ValueError(f"{name}: {len(starts)} tensors but {len(given)} gradients; give one for each, or None")
    pairs = [_start(tensor, gradient) for tensor, gradient in zip(starts, given, strict=True)]
    return tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs)


def _start(tensor: Any, gradient: Any) -> tuple[Any, Any]:
    if not isinstance(tensor, DTensorBase):
        return tensor, gradient
    if tensor._layout.reduced_later or any(op not in _SUMS for op in tensor._layout.partials):
        tensor = tensor.reduce_partial()
    if gradient is not None:
        return local_alias(tensor), local_alias(tensor.lawful_gradient(gradient))
    if tensor.numel() != 1:
        raise RuntimeError(
            "grad can be implicitly created only for scalar outputs, not for one of shape "
            f"{tuple(tensor._global_shape)}; pass the gradient to start with"
        )
    block = local_alias(tensor)
    return block, ones_like(block)


def _labelled(gradient: Any, tensor: Any) -> Any:
    """The gradient of ``tensor`` as the program sees it: a DTensor for a DTensor."""
    if gradient is None or not isinstance(tensor, DTensorBase):
        return gradient
    pending = [axis for axis, op in enumerate(tensor._layout.partials) if op is not None]
    block = count_on_one_rank(gradient, tensor._layout.mesh, pending)
    return as_dtensor(plain_kind(type(tensor)), block, tensor._layout.gradient(), tensor._global_shape)


def _backward_of_dtensor(
    self: Any, gradient: Any = None, retain_graph: bool = False, create_graph: bool = False, inputs: Any = ()
) -> None:
    """The gradients of all leaves: a replicated or partial loss is seeded with 1, other tensors need a ``gradient``."""
    backward(self, None if gradient is None else (gradient,), retain_graph, create_graph, inputs)


DTensorBase.backward = _backward_of_dtensor


def get_grad(tensor: Any) -> Any:
    """The gradient that backward has added up in the leaf so far; None before."""
    return tensor.grad if isinstance(tensor, DTensorBase) else plain.get_grad(tensor)


def set_grad(tensor: Any, gradient: Any) -> None:
    """Replace the gradient; None forgets it."""
    if isinstance(tensor, DTensorBase):
        tensor.grad = gradient
    else:
        plain.set_grad(tensor, gradient)
