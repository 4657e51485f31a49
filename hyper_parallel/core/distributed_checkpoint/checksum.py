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
from typing import Any

import numpy as np
from crc32c import crc32c

__all__ = ["crc32c", "crc_of_zeros", "share_of_box", "share_of_whole"]

_ZEROS = bytes(1 << 20)


@functools.lru_cache(maxsize=4096)
def crc_of_zeros(length: int) -> int:
    """The crc32c of ``length`` zero bytes."""
    crc = 0
    while length > 0:
        crc = crc32c(_ZEROS if length >= len(_ZEROS) else _ZEROS[:length], crc)
        length -= len(_ZEROS)
    return crc


def share_of_box(values: np.ndarray[Any, Any], offsets: tuple[int, ...], chunk_shape: tuple[int, ...]) -> int:
    """The part that a box of a chunk has in the chunk's checksum."""
    padded = np.zeros(chunk_shape, values.dtype)
    padded[tuple(slice(at, at + size) for at, size in zip(offsets, values.shape, strict=True))] = values
    return crc32c(padded.reshape(-1).view(np.uint8)) ^ crc_of_zeros(padded.nbytes)


def share_of_whole(crc: int, num_bytes: int) -> int:
    """What the shares of a chunk's boxes add up to (by xor) when the chunk has this checksum."""
    return crc ^ crc_of_zeros(num_bytes)
