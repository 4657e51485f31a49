"""Seeing all that a module does while it is recorded: a mode for what is called, and one for what runs.

Note [Two modes]
The function mode sees each function of PyTorch before the dispatcher of distributed tensors does, and again where the
dispatcher calls it on blocks, with interception off: those calls, and calls on plain tensors, are the lines. Autograd
functions and the platform's collectives, which no mode sees, are looked at where they are called. The dispatch mode
proves that nothing was missed: an operator that reaches a kernel while no line runs came by another way, and what it
made would be missing on the tape.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from hyper_parallel.platform.checks.taps import tapped_by
from hyper_parallel.platform.contract.collectives import Collectives
from hyper_parallel.platform.torch.base.dtensor_base import DTensorBase
from hyper_parallel.platform.torch.communication import collectives
from hyper_parallel.platform.torch.communication.pretend_groups import PretendGroup
from hyper_parallel.platform.torch.private_api import DispatchMode, NoInterception, is_intercepting
from hyper_parallel.platform.torch.takes_over import function_calls
from hyper_parallel.platform.torch.takes_over.addressed_draws import generator_mark

__all__ = ["is_framework_constant", "recording_calls"]

_CONSTANTS = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    dist.ProcessGroup,
    dist.ReduceOp,
    PretendGroup,
)

# About a tensor and not about its values; they are asked again where a tape is used (guards), or depend on what is.
# fmt: off
_ABOUT_TENSORS = frozenset({
    "shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "__len__", "stride",
    "dtype", "device", "layout", "is_contiguous", "is_floating_point", "is_complex", "is_signed", "is_leaf",
    "requires_grad", "grad_fn", "_version", "data_ptr", "element_size", "itemsize", "nbytes", "is_cuda", "is_cpu",
    "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_xla", "is_mps", "is_npu", "is_conj",
    "is_neg", "is_inference", "untyped_storage", "storage", "result_type", "can_cast", "promote_types",
    "is_same_size", "names", "output_nr", "retains_grad", "_base", "_backward_hooks", "get_device", "is_pinned",
    "is_shared", "is_sparse_csr", "_is_view", "is_set_to", "__hash__", "is_tensor", "is_storage", "has_names",
    "dense_dim", "sparse_dim", "is_coalesced", "_post_accumulate_grad_hooks",
})
# fmt: on


def is_framework_constant(value: Any) -> bool:
    """Whether a value of PyTorch's own types stands for itself: a dtype, a device, a process group."""
    return isinstance(value, _CONSTANTS)


class _Recording(threading.local):
    recorder: Any = None


_recording = _Recording()
_lock = threading.Lock()
_num_recording = 0


@contextmanager
def recording_calls(recorder: Any, platform: Any, inputs: list[torch.Tensor]) -> Iterator[None]:
    """Inside, ``recorder`` is told of what this thread calls; ``inputs`` are what must not be written to."""
    before, _recording.recorder = _recording.recorder, recorder
    _look_at_calls(platform, +1)
    try:
        with tapped_by(recorder), _RunningOperators(recorder, inputs), _CalledFunctions(recorder):
            yield
    finally:
        _look_at_calls(platform, -1)
        _recording.recorder = before


def _look_at_calls(platform: Any, step: int) -> None:
    """Autograd functions and collectives look for a recorder while any thread has one."""
    global _num_recording
    with _lock:
        before, _num_recording = _num_recording, _num_recording + step
        if not before:
            function_calls.set_applying(_apply)
            for name in _collectives():
                vars(platform)[name] = _looking(getattr(platform, name))
        elif not _num_recording:
            function_calls.set_applying(None)
            for name in _collectives():
                del vars(platform)[name]


@functools.cache
def _collectives() -> tuple[str, ...]:
    return tuple(name for name in Collectives.__abstractmethods__ if callable(getattr(collectives, name, None)))


def _looking(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = _recording.recorder
        if recorder is None or not recorder.writes:
            return collective(*args, **kwargs)
        return recorder.record(late_collective(collective.__name__), args, kwargs, stays=True)

    return call


@functools.cache
def late_collective(name: str) -> Callable[..., Any]:
    """A collective that is looked up when it is called: what compiles a program puts another one there."""

    @functools.wraps(getattr(collectives, name))
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(collectives, name)(*args, **kwargs)

    return call


def _apply(function: Any, *args: Any, **kwargs: Any) -> Any:
    own = function_calls.own_apply(function)
    recorder = _recording.recorder
    if recorder is None or not recorder.writes:
        return own(*args, **kwargs)
    if is_intercepting() and any(isinstance(value, DTensorBase) for value in args):
        recorder.refuse(f"the autograd function {function.__name__} is given distributed tensors, as whole ones")
        return own(*args, **kwargs)
    return recorder.record(own, args, kwargs, stays=True)


class _CalledFunctions(TorchFunctionMode):
    """Functions of PyTorch, as programs and the dispatcher call them."""

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._recorder.writes:
            return func(*args, **kwargs)
        if is_intercepting():
            kinds = [kind for kind in types if issubclass(kind, DTensorBase)]
            if kinds:  # by dispatch, whose calls on blocks come here again; special kinds look first
                kind = min(kinds, key=lambda one: -len(one.__mro__))
                with self:
                    return kind.__torch_function__(func, types, args, kwargs)
        return self._line(func, args, kwargs)

    def _line(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("__get__", "__set__", "__delete__"):
            attribute = getattr(func.__self__, "__name__", "")
            if attribute == "grad" or (attribute == "grad_fn" and is_intercepting() and func(*args) is not None):
                self._recorder.refuse(f"the attribute {attribute!r} of a tensor is read, its gradient or its history")
            if name == "__get__" and attribute in _ABOUT_TENSORS:
                return func(*args, **kwargs)
            if name != "__get__" and attribute != "requires_grad":
                self._recorder.refuse(f"the attribute {attribute!r} of a tensor is set")
                return func(*args, **kwargs)
        elif name in _ABOUT_TENSORS or name == "_set_grad_enabled" or "autocast" in name:
            # Each line knows whether gradients were recorded; of autocast, the recorder asks at each line.
            return func(*args, **kwargs)
        elif name == "backward":
            self._recorder.refuse("it runs backward, which adds to gradients of parameters: torch.autograd.grad")
            return func(*args, **kwargs)
        elif name == "__iter__":
            return iter(self._recorder.record(torch.unbind, args, {}))
        return self._recorder.record(func, tuple(args), kwargs)


class _RunningOperators(DispatchMode):
    """Operators that reach a kernel: what a line does that its arguments do not tell."""

    def __init__(self, recorder: Any, inputs: list[torch.Tensor]) -> None:
        super().__init__()
        self._recorder = recorder
        with NoInterception():
            self._memories = {_memory(tensor) for tensor in inputs}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with NoInterception():
            if self._recorder.reason is None:
                self._look(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    def _look(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        recorder = self._recorder
        if recorder.depth == 0:
            recorder.refuse(f"{func} runs where no function of PyTorch was called: by code outside of Python")
            return
        facts = recorder.facts
        if func._schema.is_mutable:
            facts.writes = True
            given = [*zip(args, func._schema.arguments, strict=False)]
            given += [(kwargs[arg.name], arg) for arg in func._schema.arguments if arg.name in kwargs]
            written = [one for value, arg in given if _is_written(arg) for one in _tensors_in(value)]
            if any(_memory(one) in self._memories for one in written):
                recorder.refuse(f"{func} writes into an input, a parameter or a buffer of the module")
        tags = func.tags
        if torch.Tag.nondeterministic_seeded in tags and facts.mark is None:
            facts.mark = generator_mark()  # attention may draw, and mostly does not
        if torch.Tag.dynamic_output_shape in tags and not facts.on_host and not _has_known_shape(func, args):
            recorder.refuse(f"the shape of what {func} gives depends on values")


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _tensors_in(value: Any) -> list[torch.Tensor]:
    """A tensor, or those of a list; what an operator writes is one or the other."""
    return [one for one in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(one, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr() or id(tensor)


def _has_known_shape(func: Any, args: Any) -> bool:
    """Of indexing by positions the shape is known; by booleans it follows from how many are true."""
    if func is not torch.ops.aten.index.Tensor:
        return False
    return all(one is None or one.dtype not in (torch.bool, torch.uint8) for one in args[1])
