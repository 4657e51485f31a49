"""What a collective gives: its result, complete, or the result and a handle to wait for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch

from hyper_parallel.platform.checks.collective_observers import CollectiveCall, ToldHandle, tell_end, telling
from hyper_parallel.platform.torch.communication.lost_ranks import CommunicationError, Handle, completed, named

__all__ = ["AllHandles", "PendingResult", "finished", "given"]


class PendingResult:
    """A handle whose ``wait`` also does the local work that follows the communication."""

    __slots__ = ("_finish", "_work")

    def __init__(self, work: Any, finish: Callable[[], Any]) -> None:
        self._work = work
        self._finish: Callable[[], Any] | None = finish

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._finish is not None:
            if self._work is not None:
                completed(self._work) if timeout is None else self._work.wait(timeout)
            with torch.no_grad():
                self._finish()
            self._finish = None
        return True

    def is_completed(self) -> bool:
        return self._finish is None or self._work is None or self._work.is_completed()


class AllHandles:
    """Several operations in flight."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def wait(self, timeout: timedelta | None = None) -> bool:
        for handle in self._handles:
            handle.wait()
        return True

    def is_completed(self) -> bool:
        return all(handle.is_completed() for handle in self._handles)


def given(result: Any, work: Any, async_op: bool, call: CollectiveCall | None) -> Any:
    """The result of ``work``; its wait is told to who observes ``call``."""
    if async_op:
        return (result, Handle(work)) if call is None else (result, ToldHandle(Handle(work), call))
    if work is not None:
        try:
            work.wait()
        except CommunicationError:
            raise
        except RuntimeError as error:
            raise named(error) from error
    if call is not None:
        tell_end(call)
    return result


def finished(result: Any, work: Any, async_op: bool, call: CollectiveCall | None, finish: Callable[[], Any]) -> Any:
    """As :func:`given`, where ``finish`` is to be called after the communication."""
    handle = PendingResult(work, finish)
    if async_op:
        return result, telling(handle, call)
    handle.wait()
    tell_end(call)
    return result
