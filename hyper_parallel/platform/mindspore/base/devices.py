"""The device of this process, its streams and events, profiling marks, and building modules on a chosen device.

On Ascend these are MindSpore's own; on a CPU, whose streams MindSpore names but cannot use, stand-ins that keep program
order (``platform/host/host_streams.py``). Which of the two is decided once, when this file is imported.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, nn

from hyper_parallel.platform.host import host_streams
from hyper_parallel.platform.mindspore.base import start

__all__ = [
    "get_current_stream",
    "get_device_type",
    "get_stream_context",
    "init_on_device",
    "meta_device",
    "new_event",
    "new_stream",
    "profiler_record",
]

meta_device = "meta"


# ---------------------------------------------------------------- streams and events


class _HostDevice:
    """The stand-ins of a CPU."""

    device_type = "cpu"
    new_stream = host_streams.CpuStream
    stream_context = host_streams.CpuStreamContext
    current_stream = staticmethod(host_streams.get_current_cpu_stream)
    new_event = host_streams.CpuEvent


class _AscendDevice:
    """MindSpore's streams."""

    device_type = "npu"
    stream_context = ms.runtime.StreamCtx
    current_stream = staticmethod(ms.runtime.current_stream)

    @staticmethod
    def new_stream(device: Any = None, priority: int = 0) -> Any:
        return ms.runtime.Stream(priority=priority)

    @staticmethod
    def new_event(enable_timing: bool = False) -> Any:
        return ms.runtime.Event(enable_timing=enable_timing)


_device: Any = _AscendDevice if start.on_ascend() else _HostDevice


def get_device_type() -> str:
    """The device type that this process computes on: "npu" or "cpu"."""
    return _device.device_type


def new_stream(device: Any = None, priority: int = 0) -> Any:
    """A new stream. A lower ``priority`` number means more urgent."""
    return _device.new_stream(device, priority)


def get_stream_context() -> Callable[[Any], AbstractContextManager[Any]]:
    """What makes a stream current: ``context = get_stream_context()`` and then ``with context(stream): ...``."""
    return _device.stream_context


def get_current_stream() -> Any:
    """The stream that this thread's operations are issued to."""
    return _device.current_stream()


def new_event(enable_timing: bool = False) -> Any:
    """A new event; with ``enable_timing`` the time between two of them can be asked by ``elapsed_time``."""
    return _device.new_event(enable_timing)


@contextlib.contextmanager
def profiler_record(name: str) -> Iterator[None]:
    """A context whose operations appear under ``name`` in a profiler's trace."""
    mark = ms.profiler.mstx.range_start(name) if start.on_ascend() else 0
    try:
        yield
    finally:
        if mark:
            ms.profiler.mstx.range_end(mark)


# ---------------------------------------------------------------- modules built on a chosen device


_Noting = Callable[[Parameter, Any], None] | None


class _Wanted(threading.local):
    """(device, whether buffers go there too, who is told of new parameters) of this thread's contexts; the innermost
    decides.
    """

    def __init__(self) -> None:
        self.contexts: list[tuple[str, bool, _Noting]] = []


_wanted = _Wanted()
_make_parameter = Parameter.__new__
_register_buffer = nn.Cell.register_buffer
_patch_lock = threading.Lock()
_num_active = 0


def _make_parameter_on_device(cls: type, default_input: Any, *args: Any, **kwargs: Any) -> Any:
    if not _wanted.contexts:
        return _make_parameter(cls, default_input, *args, **kwargs)
    device, _, noting = _wanted.contexts[-1]
    given = default_input
    with ms.DeviceCtx(device):
        if isinstance(default_input, Tensor) and not default_input.has_init:
            default_input = default_input.to(device)
        made = _make_parameter(cls, default_input, *args, **kwargs)
    if noting is not None:
        noting(made, given)
    return made


def _register_buffer_on_device(self: nn.Cell, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
    if tensor is not None and _wanted.contexts and _wanted.contexts[-1][1]:
        device = _wanted.contexts[-1][0]
        with ms.DeviceCtx(device):
            tensor = tensor.to(device)
    _register_buffer(self, name, tensor, persistent)


@contextlib.contextmanager
def init_on_device(device: str, include_buffers: bool = False) -> Iterator[None]:
    """Modules built inside get their parameters (and, if asked, buffers) on ``device``, ``meta_device`` for instance.

    A parameter on the meta device keeps its initializer, which ``init_parameters`` runs later. Tensors that are not
    registered are left where the constructor made them. Contexts nest, the innermost decides, and other threads see
    nothing of it.
    """
    with making_parameters_on(device, include_buffers=include_buffers):
        yield


@contextlib.contextmanager
def making_parameters_on(device: str, noting: _Noting = None, include_buffers: bool = False) -> Iterator[None]:
    """Inside, new parameters are on ``device``, and ``noting(parameter, given)`` is told what each was made of.

    MindSpore makes parameters in ``Parameter.__new__`` and takes buffers in ``Cell.register_buffer`` and has no hook
    there, so these are replaced while such a context is active.
    """
    global _num_active
    name = _device_name(device)
    with _patch_lock:
        _num_active += 1
        Parameter.__new__ = _make_parameter_on_device
        nn.Cell.register_buffer = _register_buffer_on_device
    _wanted.contexts.append((name, include_buffers, noting))
    try:
        yield
    finally:
        _wanted.contexts.pop()
        with _patch_lock:
            _num_active -= 1
            if _num_active == 0:
                Parameter.__new__ = _make_parameter
                nn.Cell.register_buffer = _register_buffer


def is_building_elsewhere() -> bool:
    """Whether this thread is inside of ``init_on_device``."""
    return bool(_wanted.contexts)


def _device_name(device: Any) -> str:
    name = str(device).lower()
    known = {"meta": "meta", "cpu": "CPU", "npu": "Ascend", "ascend": "Ascend"}
    if name.partition(":")[0] not in known:
        raise ValueError(f"{device!r} is not a device of MindSpore; use 'meta', 'cpu' or 'npu'")
    return known[name.partition(":")[0]]
