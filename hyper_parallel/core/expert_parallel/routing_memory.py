"""The routing of a block that is computed again in backward is that of its first pass.

A router that is computed again may choose otherwise where two scores are nearly equal, and split sizes would not fit
those of other ranks. So what was decided in the first pass is kept, a few numbers for each token, and used again:
nothing is sorted, counted, gathered or read on the host a second time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

__all__ = ["keeps_routing", "remembered"]

Decided = TypeVar("Decided")


class _Current(threading.local):
    """Of a rank, which is a thread where all are in one process."""

    kept: list[Any] | None = None  # by the pass that runs
    left: Iterator[Any] | None = None  # of the first pass, for the one that runs again


_current = _Current()


def remembered(decide: Callable[[], Decided]) -> Decided:
    """What ``decide`` gives, or what it gave at this place in the first pass."""
    if _current.left is not None:
        found = next(_current.left, None)
        if found is not None:
            return found
    found = decide()
    if _current.kept is not None:
        _current.kept.append(found)
    return found


def keeps_routing() -> tuple[Any, Any]:
    """A ``context_fn`` for ``recompute``: contexts for the first pass of a block and for the second."""
    kept: list[Any] = []

    @contextmanager
    def first() -> Iterator[None]:
        before, _current.kept = _current.kept, kept
        try:
            yield
        finally:
            _current.kept = before

    @contextmanager
    def again() -> Iterator[None]:
        before = _current.left
        _current.left = iter(list(kept))
        try:
            yield
        finally:
            _current.left = before

    return first(), again()
