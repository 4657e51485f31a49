"""Arithmetic on blocks: a region is a shape and a global offset, a box is (start, length) per dim inside a block."""

from __future__ import annotations

Shape = tuple[int, ...]
Region = tuple[Shape, Shape]
Box = tuple[tuple[int, int], ...]


def intersection(first: Region, second: Region) -> Region | None:
    """What two regions share, None when nothing.

    >>> intersection(((4,), (0,)), ((4,), (2,)))
    ((2,), (2,))
    """
    lengths, offsets = [], []
    for length, start, other_length, other_start in zip(*first, *second, strict=True):
        low = max(start, other_start)
        high = min(start + length, other_start + other_length)
        if high <= low:
            return None
        lengths.append(high - low)
        offsets.append(low)
    return tuple(lengths), tuple(offsets)


def box_in(part: Region, block: Region) -> Box:
    """Where ``part`` lies inside ``block``."""
    return tuple((start - base, length) for length, start, base in zip(*part, block[1], strict=True))
