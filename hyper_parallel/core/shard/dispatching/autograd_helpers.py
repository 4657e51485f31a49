"""Autograd functions of users that are given DTensors.

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
from typing import Any

from hyper_parallel.core.dtensor.autograd_edges import leaving_edge
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.skip_dispatch import is_skipped, skipping
from hyper_parallel.platform import get_platform

_platform = get_platform()

Label = tuple[Layout, Any]  # layout and global shape


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _label(block: Any, label: Label) -> Any:
    if isinstance(block, DTensor):
        if block._layout is label[0]:
            return block
        block = _platform.local_alias(block)
    return _platform.as_dtensor(DTensor, block, *label)


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
            gradient if label is None or gradient is None else _gradient(gradient, label)
            for gradient, label in zip(gradients, ctx.labels_of_outputs, strict=True)
        ]
        results = _as_tuple(own_backward(_Context(ctx), *labelled))
        inputs = ctx.labels_of_inputs
        given = (*results, *(None,) * (len(inputs) - len(results)))
        return tuple(_returned(original.__name__, result, label) for result, label in zip(given, inputs, strict=False))

    members: dict[str, Any] = {"backward": staticmethod(backward)}
    members |= {"setup_context": staticmethod(setup_context)} if takes_setup else {"forward": staticmethod(forward)}
    return type(original.__name__, (original,), members)


def _gradient(block: Any, label: Label) -> Any:
    """The gradient of a value with that label as a DTensor."""
    layout, shape = label
    pending = [axis for axis, op in enumerate(layout.partials) if op is not None]
    whole = _platform.count_on_one_rank(_platform.local_alias(block), layout.mesh, pending)
    return _label(whole, (layout.gradient(), shape))


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
            "make the function a DFunction, which works on local tensors"
        )
    return leaving_edge(_platform.local_alias(result.redistribute(layout.mesh, layout)), label[0], layout)


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
