"""Letting the disk begin with what has been written to a file, without waiting for it.

It is a hint and nothing depends on it: only fsync makes a file safe, and has less to wait for then. Python has no name
for this call of Linux, so it is looked up in the C library; where there is none, nothing happens.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

_WRITE = 2  # SYNC_FILE_RANGE_WRITE: begin, and do not wait


@functools.cache
def _sync_file_range() -> Callable[..., Any] | None:
    call = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call


def begin_write_back(descriptor: int, start: int, length: int) -> None:
    """Let the disk begin with these bytes of a file."""
    if (call := _sync_file_range()) is not None:
        call(descriptor, start, length, _WRITE)
