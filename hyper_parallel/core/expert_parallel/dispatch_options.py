"""How tokens of a call of a module travel, for code that calls the operator without saying it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from hyper_parallel.platform.shared.membership import followed_by_threads

__all__ = ["dispatch_options", "dispatching"]


class _Options(threading.local):
    """Of a rank, which is a thread where all are in one process."""

    once_per_rank = False
    overlaps = True


dispatch_options = followed_by_threads(_Options())


@contextmanager
def dispatching(once_per_rank: bool = False, overlaps: bool = True) -> Iterator[None]:
    """Inside, rows travel once for each rank that has an expert of theirs, or once for each expert; with ``overlaps``
    what is given as ``beside`` is computed while results travel back."""
    before = dispatch_options.once_per_rank, dispatch_options.overlaps
    dispatch_options.once_per_rank, dispatch_options.overlaps = once_per_rank, overlaps
    try:
        yield
    finally:
        dispatch_options.once_per_rank, dispatch_options.overlaps = before
