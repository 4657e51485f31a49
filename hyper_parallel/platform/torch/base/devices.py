"""The accelerator of this process, its streams and events, profiling marks, and building modules on a chosen device.

The accelerator is the one that PyTorch finds (CUDA, Ascend through ``torch_npu``, or another with the same stream API);
nothing here names a particular one. Without an accelerator the CPU stands in: its streams and events have the same
methods, keep order because the host runs every operation to its end before the next, and cost nothing.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import UninitializedTensorMixin

from hyper_parallel.platform.host.host_streams import CpuEvent, CpuStream, CpuStreamContext, get_current_cpu_stream

__all__ = [
    "CpuEvent",
    "CpuStream",
    "CpuStreamContext",
    "current_device",
    "get_current_stream",
    "get_device_handle",
    "get_device_type",
    "get_stream_context",
    "init_on_device",
    "meta_device",
    "new_event",
    "new_stream",
    "profiler_record",
    "record_stream",
    "synchronize",
]

meta_device = torch.device("meta")

_STREAM_API = ("Event", "Stream", "current_device", "current_stream", "device_count", "stream", "synchronize")


# ---------------------------------------------------------------------------------------------------------------------
# The accelerator
# ---------------------------------------------------------------------------------------------------------------------


def _import_torch_npu() -> None:
    """Import ``torch_npu`` when it is installed: only then do ``torch.npu`` and the device type "npu" exist."""
    if importlib.util.find_spec("torch_npu") is None:
        return
    try:
        importlib.import_module("torch_npu")
    except (ImportError, OSError, RuntimeError) as error:
        warnings.warn(
            f"torch_npu is installed but cannot be imported ({error}), so Ascend devices are not used; "
            "source the CANN toolkit's set_env.sh, or install the torch_npu release that belongs to "
            f"torch {torch.__version__}",
            RuntimeWarning,
            stacklevel=3,
        )


def _available_accelerator_type() -> str | None:
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return None
    handle = getattr(torch, accelerator.type, None)
    if handle is None or not all(hasattr(handle, name) for name in _STREAM_API):
        return None  # mps, for one, has no streams that a program can choose
    return accelerator.type


@functools.cache
def get_device_type() -> str:
    """The device type that this process computes on: "cuda", "npu", ... or "cpu". Looked up once."""
    found = _available_accelerator_type()
    if found is None:
        _import_torch_npu()
        found = _available_accelerator_type()
    return found or "cpu"


def get_device_handle() -> ModuleType:
    """The torch module of the device type: ``torch.cuda``, ``torch.npu``, ... or ``torch.cpu``."""
    return torch.get_device_module(get_device_type())


def current_device() -> torch.device:
    """The device on which new work of this process lands, with its index; ``torch.device("cpu")`` on a CPU."""
    device_type = get_device_type()
    if device_type == "cpu":
        return torch.device("cpu")
    return torch.device(device_type, get_device_handle().current_device())


def synchronize() -> None:
    """Block the host until all work on the current device is done."""
    if get_device_type() != "cpu":
        get_device_handle().synchronize()


# ---------------------------------------------------------------------------------------------------------------------
# Streams and events
# ---------------------------------------------------------------------------------------------------------------------


def new_stream(device: torch.device | str | int | None = None, priority: int = 0) -> Any:
    """A new stream on ``device`` (default: the current one). A lower ``priority`` number means more urgent."""
    if get_device_type() == "cpu":
        return CpuStream(device, priority)
    return get_device_handle().Stream(device=device, priority=priority)


def get_stream_context() -> Callable[[Any], AbstractContextManager]:
    """What makes a stream current: ``context = get_stream_context()`` and then ``with context(stream): ...``."""
    if get_device_type() == "cpu":
        return CpuStreamContext
    return get_device_handle().stream


def get_current_stream() -> Any:
    """The stream that this thread's operations are issued to."""
    if get_device_type() == "cpu":
        return get_current_cpu_stream()
    return get_device_handle().current_stream()


def new_event(enable_timing: bool = False) -> Any:
    """A new event; with ``enable_timing`` the time between two of them can be asked by ``elapsed_time``."""
    if get_device_type() == "cpu":
        return CpuEvent(enable_timing)
    return get_device_handle().Event(enable_timing=enable_timing)


def record_stream(tensor: torch.Tensor, stream: Any) -> None:
    """Keep the memory of ``tensor`` from being reused until the work issued so far to ``stream`` is done."""
    if not isinstance(stream, CpuStream) and tensor.device.type not in ("cpu", "meta"):
        tensor.record_stream(stream)


def profiler_record(name: str) -> AbstractContextManager:
    """A context whose operations appear under ``name`` in a profiler's trace."""
    return torch.profiler.record_function(name)


# ---------------------------------------------------------------------------------------------------------------------
# Modules built on a chosen device
# ---------------------------------------------------------------------------------------------------------------------


class _Relocation:
    """One active ``init_on_device``: where to, and what was already moved (so that tied tensors stay tied)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._moved: dict[int, tuple[weakref.ref, torch.Tensor]] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if _is_on(tensor.device, self.device):
            return tensor
        original, moved = self._moved.get(id(tensor), (None, None))
        if original is None or original() is not tensor:
            moved = _copy_to_device(tensor, self.device)
            # A weak reference: the tensor left behind must not stay in memory because of this table.
            self._moved[id(tensor)] = (weakref.ref(tensor), moved)
        return moved


class _ActiveRelocations(threading.local):
    def __init__(self) -> None:
        self.stack: list[_Relocation] = []


_active_relocations = _ActiveRelocations()


def _is_on(device: torch.device, wanted: torch.device) -> bool:
    return device.type == wanted.type and (wanted.index is None or device.index == wanted.index)


def _copy_to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if isinstance(tensor, UninitializedTensorMixin):
        # The parameter of a lazy module has no values yet, only the device and dtype it will have.
        moved = type(tensor)(requires_grad=tensor.requires_grad, device=device, dtype=tensor.dtype)
    else:
        moved = tensor.detach().to(device).as_subclass(type(tensor)).requires_grad_(tensor.requires_grad)
    moved.__dict__.update(tensor.__dict__)
    return moved


@contextmanager
def init_on_device(device: torch.device | str, include_buffers: bool = False) -> Iterator[None]:
    """Modules built inside get their parameters (and, if asked, buffers) on ``device``, ``meta_device`` for instance.

    Each is moved at the moment it is registered, so at most one exists twice. A tensor registered in several places is
    moved once and stays shared; subclasses of ``Parameter`` and attributes set on it are kept. Tensors that are not
    registered are left where the constructor made them. Contexts nest, the innermost decides, and other threads see
    nothing of it.
    """
    device = torch.device(device)
    relocation = _Relocation(device)
    stack = _active_relocations.stack

    def is_in_charge() -> bool:
        active = _active_relocations.stack
        return bool(active) and active[-1] is relocation

    def move_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> torch.Tensor | None:
        return relocation(parameter) if parameter is not None and is_in_charge() else None

    def move_buffer(module: nn.Module, name: str, buffer: torch.Tensor | None) -> torch.Tensor | None:
        return relocation(buffer) if buffer is not None and include_buffers and is_in_charge() else None

    handles = [
        register_module_parameter_registration_hook(move_parameter),
        register_module_buffer_registration_hook(move_buffer),
    ]
    stack.append(relocation)
    try:
        yield
    finally:
        stack.remove(relocation)
        for handle in handles:
            handle.remove()
