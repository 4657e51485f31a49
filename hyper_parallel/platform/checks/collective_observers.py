"""Observers of communication: each is told of every collective and message of tensors that is about to begin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hyper_parallel.platform.shared.membership import list_belongs_to_rank


@dataclass(frozen=True)
class CollectiveCall:
    """What an observer is told: this rank is about to communicate ``num_bytes`` bytes of input."""

    op: str
    group: Any
    shape: tuple[int, ...]
    dtype: Any
    num_bytes: int
    async_op: bool


observers: list[Callable[[CollectiveCall], None]] = []
list_belongs_to_rank(observers)


def notify_observers(op: str, group: Any, data: Any, async_op: bool) -> None:
    """Tell them all; callers ask first whether there are any."""
    call = CollectiveCall(op, group, tuple(data.shape), data.dtype, data.numel() * data.itemsize, async_op)
    for observer in observers:
        observer(call)


def observe(
    tell: Callable[[str, list[int], Any, str, int, bool], None],
    ranks_of: Callable[[Any], list[int]],
    dtype_name: Callable[[Any], str],
) -> Callable[[], None]:
    """Call ``tell(op, ranks, shape, dtype, num_bytes, async_op)`` before every collective; returns how to stop."""

    def observer(call: CollectiveCall) -> None:
        tell(call.op, ranks_of(call.group), call.shape, dtype_name(call.dtype), call.num_bytes, call.async_op)

    observers.append(observer)
    return lambda: observers.remove(observer)
