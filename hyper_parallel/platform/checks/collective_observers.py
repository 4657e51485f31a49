"""Observers of communication: told of what is about to begin, and of waits that have ended.

Told are collectives, messages of tensors and of objects, and barriers, in groups of two ranks or more. An operation
that the caller waits for itself, with the handle that it got, is told again when that wait has ended; of one that
returns when it is complete there is nothing more to tell, but to who wants to know the times of both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hyper_parallel.platform.shared.membership import list_belongs_to_rank

Splits = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True)
class CollectiveCall:
    """What an observer is told: this rank is about to communicate ``num_bytes`` bytes of input.

    Without a tensor the shape is () and ``dtype`` None; objects have the bytes of their pickles, 0 before they came.
    """

    op: str
    group: Any
    shape: tuple[int, ...]
    dtype: Any
    num_bytes: int
    async_op: bool
    peer: int | None = None  # world rank of the other side of a message, or of a broadcast's source
    tag: int | None = None
    splits: Splits | None = None  # rows to and from each rank of the group, where they were given


Observer = Callable[[CollectiveCall], None]
observers: list[Observer] = []
wait_observers: list[Observer] = []  # told with the very object that was told at the launch
list_belongs_to_rank(observers)
end_observers: list[Observer] = []  # told of collectives that are complete, in whichever way; with the very object
list_belongs_to_rank(wait_observers)
list_belongs_to_rank(end_observers)


def announce(
    op: str,
    group: Any,
    data: Any,
    async_op: bool = False,
    *,
    num_bytes: int = 0,
    peer: int | None = None,
    tag: int | None = None,
    splits: Splits | None = None,
) -> CollectiveCall | None:
    """Tell them all; callers ask first whether there are any. ``data`` is None without a tensor.

    Gives what :func:`telling` needs if somebody wants to know of the wait.
    """
    if data is None:
        call = CollectiveCall(op, group, (), None, num_bytes, async_op, peer, tag)
    else:
        num_bytes = data.numel() * data.itemsize
        call = CollectiveCall(op, group, tuple(data.shape), data.dtype, num_bytes, async_op, peer, tag, splits)
    for observer in observers:
        observer(call)
    return call if wait_observers or end_observers else None


class ToldHandle:
    """A handle whose first wait is told."""

    __slots__ = ("_call", "_handle")

    def __init__(self, handle: Any, call: CollectiveCall) -> None:
        self._handle = handle
        self._call: CollectiveCall | None = call

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        result = self._handle.wait(*args, **kwargs)
        call, self._call = self._call, None
        if call is not None:
            for observer in wait_observers:
                observer(call)
            tell_end(call)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


def tell_end(call: CollectiveCall | None) -> None:
    """Tell that an operation is complete."""
    if call is not None:
        for observer in end_observers:
            observer(call)


def telling(handle: Any, call: CollectiveCall | None) -> Any:
    """The handle itself, or one that tells observers of its wait."""
    return handle if call is None else ToldHandle(handle, call)


def observe(
    told: list[Observer],
    tell: Callable[[str, list[int], Any, str, int, bool], None],
    ranks_of: Callable[[Any], list[int]],
    dtype_name: Callable[[Any], str],
) -> Callable[[], None]:
    """Add an observer to ``told`` that calls ``tell(op, ranks, shape, dtype, num_bytes, async_op)``; how to stop."""

    def observer(call: CollectiveCall) -> None:
        dtype = "" if call.dtype is None else dtype_name(call.dtype)
        tell(call.op, ranks_of(call.group), call.shape, dtype, call.num_bytes, call.async_op)

    told.append(observer)
    return lambda: told.remove(observer)


def observe_times(
    tell: Callable[[str, list[int], Any, str, int, bool, float, float], None],
    ranks_of: Callable[[Any], list[int]],
    dtype_name: Callable[[Any], str],
) -> Callable[[], None]:
    """As :func:`observe`, when an operation on tensors is complete, with when it began and ended; how to stop.

    The times are of ``time.perf_counter``. One that the caller waits for itself ends with that wait.
    """
    begun: dict[int, tuple[CollectiveCall, float]] = {}

    def began(call: CollectiveCall) -> None:
        if call.dtype is not None:
            begun[id(call)] = call, time.perf_counter()

    def ended(call: CollectiveCall) -> None:
        end = time.perf_counter()
        _, begin = begun.pop(id(call), (call, None))
        if begin is not None:
            dtype = dtype_name(call.dtype)
            tell(call.op, ranks_of(call.group), call.shape, dtype, call.num_bytes, call.async_op, begin, end)

    observers.append(began)
    end_observers.append(ended)

    def stop() -> None:
        observers.remove(began)
        end_observers.remove(ended)

    return stop
