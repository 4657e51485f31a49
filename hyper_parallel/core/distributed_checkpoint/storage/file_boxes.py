"""Reading boxes of row-major arrays in files: straight to where they belong, a bounded number of bytes at a time.

Note [Why loads do not map files]
A page of a mapped file that cannot be read (the file was cut short meanwhile, the disk or the network has failed) ends
the process with SIGBUS, and nobody learns why. ``pread`` says it with an error. The bytes are copied once either way,
and what is checked afterwards is what has arrived, not what the file held a moment before.
"""

from __future__ import annotations

import functools
import math
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from hyper_parallel.core.distributed_checkpoint.base.errors import CorruptCheckpointError
from hyper_parallel.core.distributed_checkpoint.base.regular_files import open_regular
from hyper_parallel.platform.shared.region import Shape

_MAX_OPEN = 64  # files at a time
_SCRATCH = 1 << 20  # bytes that are read at a time where a box lies in small runs
PAGE = 1 << 12  # Runs with less than this between them are read as one: the system reads whole pages anyway.


class FileBoxes:
    """The files of a folder; those that were read last stay open."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: OrderedDict[str, BinaryIO] = OrderedDict()
        self._scratch = np.empty(0, np.uint8)

    def read(self, name: str, start: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes of a file from ``start`` on."""
        descriptor = self._descriptor(name)
        while len(target):
            count = os.preadv(descriptor, [target], start)
            if not count:
                raise CorruptCheckpointError(
                    f"'{self._folder / name}' ends at byte {start} where {start + len(target)} are expected; it was "
                    "cut short. Load another checkpoint, or copy it again"
                )
            target, start = target[count:], start + count

    def read_box(
        self, name: str, start: int, shape: Shape, offsets: Shape, sizes: Shape, out: np.ndarray[Any, Any]
    ) -> None:
        """Fill ``out`` with the box of an array of ``shape`` whose first element is at byte ``start`` of a file."""
        first, strides = _places(shape, offsets, out.itemsize)
        self._read_spread(name, start + first, strides, out)

    def _read_spread(self, name: str, start: int, strides: Shape, out: np.ndarray[Any, Any]) -> None:
        """Fill ``out``, whose elements lie ``strides`` bytes apart in the file, the first at byte ``start``."""
        is_flat = out.flags.c_contiguous
        if is_flat and _span(out.shape, strides, out.itemsize) == out.nbytes:
            self.read(name, start, _bytes_of(out))
            return
        row, stride = _span(out.shape[1:], strides[1:], out.itemsize), strides[0]
        if row <= _SCRATCH and stride - row < PAGE:
            self._read_through_scratch(name, start, strides, row, out)
        elif is_flat and row * len(out) == out.nbytes:
            data, descriptor = _bytes_of(out), self._descriptor(name)
            for number in range(len(out)):
                target, at = data[number * row : (number + 1) * row], start + number * stride
                if os.preadv(descriptor, [target], at) != row:
                    self.read(name, at, target)
        else:
            for number, part in enumerate(out):
                self._read_spread(name, start + number * stride, strides[1:], part)

    def _read_through_scratch(self, name: str, start: int, strides: Shape, row: int, out: np.ndarray[Any, Any]) -> None:
        if not len(self._scratch):
            self._scratch = np.empty(_SCRATCH, np.uint8)
        at_once = 1 + (_SCRATCH - row) // strides[0]
        for first in range(0, len(out), at_once):
            part = out[first : first + at_once]
            span = _span(part.shape, strides, part.itemsize)
            self.read(name, start + first * strides[0], self._scratch[:span].data)
            part[...] = np.ndarray(part.shape, part.dtype, self._scratch, strides=strides)

    def _descriptor(self, name: str) -> int:
        found = self._open.get(name)
        if found is None:
            if len(self._open) == _MAX_OPEN:
                self._open.popitem(last=False)[1].close()
            try:
                found = self._open[name] = open_regular(self._folder / name)
            except FileNotFoundError:
                raise CorruptCheckpointError(
                    f"'{self._folder / name}' is missing: it was there a moment ago, and was removed. Load another "
                    "checkpoint"
                ) from None
        return found.fileno()

    def close(self) -> None:
        """Close the files."""
        while self._open:
            self._open.popitem()[1].close()

    __del__ = close


@functools.lru_cache(maxsize=4096)
def _places(shape: Shape, offsets: Shape, element: int) -> tuple[int, Shape]:
    """How many bytes after the first element of an array a box starts, and how far its elements are apart."""
    strides = tuple(math.prod(shape[dim + 1 :]) * element for dim in range(len(shape)))
    return sum(at * stride for at, stride in zip(offsets, strides, strict=True)), strides


@functools.lru_cache(maxsize=4096)
def _span(sizes: Shape, strides: Shape, element: int) -> int:
    """From the first byte to the last of elements that lie ``strides`` bytes apart."""
    return element + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


def _bytes_of(out: np.ndarray[Any, Any]) -> memoryview:
    return out.reshape(-1).view(np.uint8).data
