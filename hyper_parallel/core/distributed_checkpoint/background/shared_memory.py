"""Memory without a name that a rank shares with its writer process, to hold the bytes of a save.

Note [New pages]
A page that is touched through a mapping for the first time is filled with zeros, only to be overwritten at once. A page
that ``write`` fills is not. New pages are slow to come by, so the first save writes, and then has all pages mapped in
one call: one by one, in the second save, that would take three times as long. Later saves copy through the mapping,
which takes a fourth of the time of the first.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Any

import numpy as np

_GROWTH = 1 << 21  # Memory is taken in these steps.
_MAP_ALL_PAGES = 22  # MADV_POPULATE_READ of Linux 5.14, which Python has no name for


class SharedMemory:
    """``array`` is the memory; ``write`` from several threads at once is the quick way to fill it."""

    def __init__(self, num_bytes: int) -> None:
        self.size = max(1, -(-num_bytes // _GROWTH)) * _GROWTH
        self.file = os.memfd_create("hyper-parallel-checkpoint", os.MFD_CLOEXEC)
        self._is_new = True  # until it has been filled once
        try:
            os.ftruncate(self.file, self.size)
            self._mapped = mmap.mmap(self.file, self.size)
        except BaseException:
            os.close(self.file)
            raise
        self.array: np.ndarray[Any, Any] = np.frombuffer(self._mapped, np.uint8)

    def write(self, start: int, source: np.ndarray[Any, Any]) -> None:
        """Copy bytes to a place, without the interpreter's lock."""
        if not self._is_new:
            self.array[start : start + len(source)] = source
            return
        while len(source):
            written = os.pwrite(self.file, source.data, start)
            start, source = start + written, source[written:]

    def filled(self) -> None:
        """All that belongs there has been written, for the first time perhaps; see Note [New pages]."""
        if self._is_new:
            self._is_new = False
            with contextlib.suppress(OSError):  # An older kernel maps them when they are touched.
                self._mapped.madvise(_MAP_ALL_PAGES)

    def close(self) -> None:
        """Give this process's share back."""
        os.close(self.file)
        self.array = np.empty(0, np.uint8)
        del self._mapped
