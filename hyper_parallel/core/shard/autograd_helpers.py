"""Asking autograd for gradients of and by DTensors, and autograd functions of users that are given them.

Note [A function of your own sees whole tensors]
The ``forward`` and ``backward`` of an autograd function are programs like any other: given DTensors, their operators
are dispatched. So such a function needs no rule. What is added here is the edge to the engine, which knows blocks
only: the gradients that come into ``backward`` are labelled as DTensors that lie as the law says, those that it
returns are brought to the layouts of the inputs' gradients, and saved tensors get their labels back. A ``DFunction``
works on blocks instead.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.skip_dispatch import is_skipped, skipping
from hyper_parallel.platform import get_platform

_platform = get_platform()

Label = tuple[Layout, Any]  # layout and global shape


# ---------------------------------------------------------------------------------------------------------------------
# torch.autograd.grad and torch.autograd.backward
# ---------------------------------------------------------------------------------------------------------------------

_GRAD_NAMES = ("outputs", "inputs", "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused")
_BACKWARD_NAMES = ("tensors", "grad_tensors", "retain_graph", "create_graph", "grad_variables", "inputs")


def grad(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``torch.autograd.grad``: gradients of DTensors lie as the law says."""
    if func.__name__ == "__get__":  # reading the attribute of that name
        return args[0].grad
    given = dict(zip(_GRAD_NAMES, args, strict=False)) | kwargs
    if given.get("is_grads_batched"):
        raise ValueError(
            "torch.autograd.grad of distributed tensors cannot take is_grads_batched=True: collectives cannot be "
            "vectorised; call it once for each gradient"
        )
    outputs, inputs = _as_tuple(given.pop("outputs")), _as_tuple(given.pop("inputs"))
    seeds = _seeds("grad_outputs", outputs, given.pop("grad_outputs", None))
    found = _platform.without_interception(func, outputs, inputs, seeds, **given)
    return tuple(_labelled(gradient, tensor) for gradient, tensor in zip(found, inputs, strict=True))


def backward(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """``torch.autograd.backward``."""
    given = dict(zip(_BACKWARD_NAMES, args, strict=False)) | kwargs
    outputs = _as_tuple(given.pop("tensors"))
    deprecated = given.pop("grad_variables", None)
    given_seeds = given.pop("grad_tensors", None)
    seeds = _seeds("grad_tensors", outputs, deprecated if given_seeds is None else given_seeds)
    _platform.without_interception(func, outputs, seeds, **given)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _seeds(argument: str, outputs: tuple[Any, ...], given: Any) -> tuple[Any, ...]:
    """The gradients to start with, laid out by the law; ones for a whole or pending number."""
    seeds = (None,) * len(outputs) if given is None else _as_tuple(given)
    if len(seeds) != len(outputs):
        raise ValueError(f"{len(outputs)} outputs and {len(seeds)} gradients in {argument}: give one for each output")
    return tuple(
        _seed(argument, number, output, seed) for number, (output, seed) in enumerate(zip(outputs, seeds, strict=True))
    )


def _seed(argument: str, number: int, output: Any, seed: Any) -> Any:
    if not isinstance(output, DTensor):
        return seed.full_tensor() if isinstance(seed, DTensor) else seed
    if seed is None:
        if not output.requires_grad:
            return None
        if output.numel() != 1:
            raise RuntimeError(
                f"grad can be implicitly created only for scalar outputs, not for one of shape {tuple(output.shape)}"
            )
        block = _platform.full_like(_platform.detached(output), 1.0)
        return _platform.as_dtensor(DTensor, block, output.layout.gradient(), output._global_shape)
    if not isinstance(seed, DTensor):
        if not _platform.is_tensor(seed) or seed.ndim or output.ndim:
            raise TypeError(
                f"{argument}[{number}] is a {type(seed).__name__}, but output {number} is a distributed tensor of "
                f"shape {tuple(output.shape)}; use distribute_tensor (every rank holds it whole) or from_local"
            )
        return _platform.as_dtensor(DTensor, _platform.alias(seed), output.layout.gradient(), output._global_shape)
    if seed._global_shape != output._global_shape:
        raise ValueError(
            f"{argument}[{number}] has shape {tuple(seed.shape)}, but output {number} has {tuple(output.shape)}"
        )
    return seed.redistribute(output.device_mesh, output.layout.gradient())


def _labelled(gradient: Any, tensor: Any) -> Any:
    """What the engine gave for ``tensor`` as a DTensor."""
    if gradient is None or not isinstance(tensor, DTensor):
        return gradient
    return _label(gradient, (tensor.layout.gradient(), tensor._global_shape))


def _label(block: Any, label: Label) -> Any:
    if isinstance(block, DTensor):
        if block._layout is label[0]:
            return block
        block = _platform.local_alias(block)
    return _platform.as_dtensor(DTensor, block, *label)


SPECIAL_AUTOGRAD = {"grad": grad, "backward": backward}


# ---------------------------------------------------------------------------------------------------------------------
# Autograd functions of users
# ---------------------------------------------------------------------------------------------------------------------


class _Running(threading.local):
    """The labels of the results of the functions that this thread is running."""

    def __init__(self) -> None:
        self.labels: list[list[Label | None]] = []


_running = _Running()


def run_function(function: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``function.apply`` on DTensors; see Note [A function of your own sees whole tensors]."""
    if skipping.exceptions and is_skipped(function.apply):  # type: ignore[attr-defined]
        return _platform.call_on_blocks(function.apply, args, kwargs)  # type: ignore[attr-defined]
    _running.labels.append([])
    try:
        result = _platform.apply_function(_on_distributed(function), args, kwargs)
    finally:
        labels = _running.labels.pop()
    # An input that forward returns as it is comes back as another, plain tensor.
    if isinstance(result, (list, tuple)):
        return type(result)(
            value if label is None or isinstance(value, DTensor) else _label(value, label)
            for value, label in zip(result, labels, strict=True)
        )
    return result if labels[0] is None or isinstance(result, DTensor) else _label(result, labels[0])


def _label_of(value: Any) -> Label | None:
    return (value._layout, value._global_shape) if isinstance(value, DTensor) else None


def _remember(ctx: Any, inputs: tuple[Any, ...], outputs: Any) -> None:
    ctx.labels_of_inputs = [_label_of(value) for value in inputs]
    ctx.labels_of_outputs = [_label_of(value) for value in _as_tuple(outputs)]
    _running.labels[-1][:] = ctx.labels_of_outputs


@functools.cache
def _on_distributed(function: type) -> type:
    """The function with its edges to the engine labelled."""
    original: Any = function
    takes_setup = getattr(original, "setup_context", None) is not getattr(_platform.Function, "setup_context", None)

    def forward(ctx: Any, *args: Any) -> Any:
        result = original.forward(_Context(ctx), *args)
        _remember(ctx, args, result)
        return result

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        original.setup_context(_Context(ctx), inputs, output)
        _remember(ctx, inputs, output)

    own_backward = original.backward if original.backward is not _platform.Function.backward else original.vjp

    def backward(ctx: Any, *gradients: Any) -> Any:
        labelled = [
            gradient if label is None or gradient is None else _label(_platform.alias(gradient), _by_law(label))
            for gradient, label in zip(gradients, ctx.labels_of_outputs, strict=True)
        ]
        results = _as_tuple(own_backward(_Context(ctx), *labelled))
        inputs = ctx.labels_of_inputs
        given = (*results, *(None,) * (len(inputs) - len(results)))
        return tuple(_returned(original.__name__, result, label) for result, label in zip(given, inputs, strict=False))

    members: dict[str, Any] = {"backward": staticmethod(backward)}
    members |= {"setup_context": staticmethod(setup_context)} if takes_setup else {"forward": staticmethod(forward)}
    return type(original.__name__, (original,), members)


def _by_law(label: Label) -> Label:
    return label[0].gradient(), label[1]


def _returned(name: str, result: Any, label: Label | None) -> Any:
    """A gradient that ``backward`` returned, as the engine wants it."""
    if result is None or not _platform.is_tensor(result):
        return result
    if label is None:
        return result.full_tensor() if isinstance(result, DTensor) else result
    layout = label[0].gradient()
    if not isinstance(result, DTensor):
        raise TypeError(
            f"the backward of {name} returned a plain tensor of shape {tuple(result.shape)} for a distributed input of "
            f"shape {tuple(label[1])}: compute it from the gradients and saved tensors, which are distributed, or "
            "make the function a DFunction, which works on blocks"
        )
    return _platform.local_alias(result.redistribute(layout.mesh, layout))


class _Context:
    """The engine's context, which gives saved tensors back with their labels."""

    __slots__ = ("_ctx",)

    def __init__(self, ctx: Any) -> None:
        object.__setattr__(self, "_ctx", ctx)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ctx, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._ctx, name, value)

    def save_for_backward(self, *tensors: Any) -> None:
        self._ctx.labels_of_saved = [_label_of(tensor) for tensor in tensors]
        self._ctx.save_for_backward(*tensors)

    @property
    def saved_tensors(self) -> tuple[Any, ...]:
        labels = getattr(self._ctx, "labels_of_saved", ())
        return tuple(
            tensor if label is None or tensor is None or isinstance(tensor, DTensor) else _label(tensor, label)
            for tensor, label in zip(self._ctx.saved_tensors, labels, strict=True)
        )


_platform.set_function_handler(run_function)
