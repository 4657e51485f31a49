"""Where what travels between ranks meets the other micro-batch of an overlapped pair, if there is one.

A pipeline that runs a forward and a backward at once sets the coordinator around both; what communicates asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.coordinator import HookCoordinator

__all__ = ["coordinator_in_force", "meeting_at"]

_in_force = get_platform().new_thread_value("hyper_parallel.coordinator")


def coordinator_in_force() -> HookCoordinator | None:
    """The coordinator of the pair that this thread may be one of; None: nobody overlaps."""
    found: HookCoordinator | None = _in_force.value
    return found


@contextmanager
def meeting_at(coordinator: HookCoordinator | None) -> Iterator[None]:
    """Inside, what this thread sends to other ranks meets ``coordinator``, in forward and in backward."""
    before, _in_force.value = _in_force.value, coordinator
    try:
        yield
    finally:
        _in_force.value = before
