"""Checksums of chunks, and of chunks that several ranks read one part each of.

Note [A chunk that nobody reads whole]
A rank that loads under another layout reads a part of a chunk, and a checksum of the chunk says nothing about a part.
But crc32c is linear: for two byte strings of one length, ``crc(a ^ b) == crc(a) ^ crc(b) ^ crc(zeros)``. So each rank
takes the crc of the chunk with zeros where it read nothing (the *share* of its box is that crc without the zeros'
own), and the shares of all boxes, which together cover the chunk, add up to the share of the whole chunk. The shares
travel with the agreement at the end of a load, four bytes each, and no byte is read for the sake of the checksum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from crc32c import crc32c

from hyper_parallel.core.distributed_checkpoint.base.grids import slices

__all__ = ["crc32c", "crc32c_of", "crc_of_zeros", "share_of_box", "share_of_whole"]

_BLOCK = 1 << 20  # bytes that are looked at in one go
_ZEROS = memoryview(bytes(_BLOCK))


@functools.lru_cache(maxsize=4096)
def crc_of_zeros(length: int) -> int:
    """The crc32c of ``length`` zero bytes."""
    return _add_zeros(length, 0)


def _add_zeros(length: int, crc: int) -> int:
    for at in range(0, length, _BLOCK):
        crc = crc32c(_ZEROS[: length - at], crc)
    return crc


def crc32c_of(values: np.ndarray[Any, Any], crc: int = 0) -> int:
    """The crc32c of an array's bytes in row-major order."""
    if values.flags.c_contiguous:
        return crc32c(values.reshape(-1).view(np.uint8).data, crc)
    for rows in _in_blocks(values):
        crc = crc32c(np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data, crc)
    return crc


def share_of_box(values: np.ndarray[Any, Any], offsets: tuple[int, ...], chunk_shape: tuple[int, ...]) -> int:
    """The part that a box of a chunk has in the chunk's checksum."""
    return _crc_of_padded(values, offsets, chunk_shape, 0) ^ crc_of_zeros(math.prod(chunk_shape) * values.itemsize)


def _crc_of_padded(values: np.ndarray[Any, Any], offsets: tuple[int, ...], shape: tuple[int, ...], crc: int) -> int:
    """The crc32c of a chunk that is zero outside of the box, a bounded part of it at a time."""
    if values.shape == shape:
        return crc32c_of(values, crc)
    row = math.prod(shape[1:]) * values.itemsize
    if offsets[0]:
        crc = _add_zeros(offsets[0] * row, crc)
    if row > _BLOCK:
        for part in values:
            crc = _crc_of_padded(np.asarray(part), offsets[1:], shape[1:], crc)
    else:
        at_once = min(max(1, _BLOCK // row), len(values))
        padded = np.zeros((at_once, *shape[1:]), values.dtype)
        box = (slice(None), *slices(offsets[1:], values.shape[1:]))
        place = padded[box]
        for first in range(0, len(values), at_once):
            rows = values[first : first + at_once]
            place[: len(rows)] = rows
            crc = crc32c(padded[: len(rows)].reshape(-1).view(np.uint8).data, crc)
    rows_after = shape[0] - offsets[0] - len(values)
    return _add_zeros(rows_after * row, crc) if rows_after else crc


def _in_blocks(values: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    if values.nbytes <= _BLOCK:
        yield values
        return
    at_once = _BLOCK * len(values) // values.nbytes
    for first in range(0, len(values), max(at_once, 1)):
        yield from [values[first : first + at_once]] if at_once else _in_blocks(values[first])


def share_of_whole(crc: int, num_bytes: int) -> int:
    """What the shares of a chunk's boxes add up to (by xor) when the chunk has this checksum."""
    return crc ^ crc_of_zeros(num_bytes)
