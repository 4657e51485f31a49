"""Streams and events of a host without an accelerator: the same methods, in program order, at no cost.

The host runs every operation to its end before the next, so order is kept whatever is waited for.
"""

from __future__ import annotations

import threading
import time
from typing import Any

__all__ = ["CpuEvent", "CpuStream", "CpuStreamContext", "get_current_cpu_stream"]


class CpuEvent:
    """An event on the CPU. It is always reached: what was issued before it has already run."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.enable_timing = enable_timing
        self._recorded_at: float | None = None

    def record(self, stream: CpuStream | None = None) -> None:
        if self.enable_timing:
            self._recorded_at = time.perf_counter()

    def wait(self, stream: CpuStream | None = None) -> None:
        pass

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end_event: CpuEvent) -> float:
        """Milliseconds between the recording of this event and that of ``end_event``."""
        times = []
        for role, event in (("start", self), ("end", end_event)):
            if not event.enable_timing:
                raise RuntimeError(
                    f"elapsed_time: the {role} event does not measure time; make it with new_event(enable_timing=True)"
                )
            if event._recorded_at is None:
                raise RuntimeError(f"elapsed_time: the {role} event was never recorded; call its record() first")
            times.append(event._recorded_at)
        return (times[1] - times[0]) * 1000.0

    def __repr__(self) -> str:
        return f"CpuEvent(enable_timing={self.enable_timing})"


class CpuStream:
    """A stream on the CPU. The host runs operations one after the other, so every stream is always done."""

    device: Any = "cpu"

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        if device is not None and not str(device).lower().startswith("cpu"):
            raise ValueError(f"a stream on {device} was asked for, but this process has no accelerator, only the CPU")
        self.priority = priority

    def wait_stream(self, stream: CpuStream) -> None:
        pass

    def wait_event(self, event: CpuEvent) -> None:
        pass

    def record_event(self, event: CpuEvent | None = None) -> CpuEvent:
        if event is None:
            event = CpuEvent()
        event.record(self)
        return event

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def __repr__(self) -> str:
        return f"CpuStream(priority={self.priority})"


class _CurrentCpuStream(threading.local):
    def __init__(self) -> None:
        self.stream = _DEFAULT_CPU_STREAM


_DEFAULT_CPU_STREAM = CpuStream()
_current_cpu_stream = _CurrentCpuStream()


class CpuStreamContext:
    """``with CpuStreamContext(stream):`` makes it the current stream of this thread; ``None`` changes nothing."""

    def __init__(self, stream: CpuStream | None) -> None:
        self.stream = stream

    def __enter__(self) -> CpuStream | None:
        self._previous = _current_cpu_stream.stream
        if self.stream is not None:
            _current_cpu_stream.stream = self.stream
        return self.stream

    def __exit__(self, *exc_info: object) -> None:
        _current_cpu_stream.stream = self._previous


def get_current_cpu_stream() -> CpuStream:
    """The stream that this thread's operations are said to go to."""
    return _current_cpu_stream.stream
