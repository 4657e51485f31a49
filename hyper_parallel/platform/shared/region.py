"""Regions: boxes of a tensor, the one way to say where something lies in it."""

from __future__ import annotations

import math
from typing import NamedTuple

Shape = tuple[int, ...]


class Region(NamedTuple):
    """The elements ``offsets[d] <= index[d] < offsets[d] + sizes[d]`` of a tensor."""

    offsets: Shape
    sizes: Shape

    @staticmethod
    def whole(shape: Shape) -> Region:
        """All of a tensor."""
        return Region((0,) * len(shape), tuple(shape))

    @property
    def num_elements(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """As an index.

        >>> Region((2, 0), (3, 4)).slices
        (slice(2, 5, None), slice(0, 4, None))
        """
        return tuple(slice(start, start + size) for start, size in zip(*self, strict=True))

    def overlap(self, other: Region) -> Region | None:
        """What two regions share, None when nothing.

        >>> Region((0,), (4,)).overlap(Region((2,), (4,)))
        Region(offsets=(2,), sizes=(2,))
        """
        offsets, sizes = [], []
        for start, size, other_start, other_size in zip(*self, *other, strict=True):
            low, high = max(start, other_start), min(start + size, other_start + other_size)
            if high <= low:
                return None
            offsets.append(low)
            sizes.append(high - low)
        return Region(tuple(offsets), tuple(sizes))

    def inside(self, outer: Region) -> Region:
        """The same region with its place in ``outer``, which holds it.

        >>> Region((5,), (2,)).inside(Region((4,), (6,)))
        Region(offsets=(1,), sizes=(2,))
        """
        return Region(tuple(start - base for start, base in zip(self.offsets, outer.offsets, strict=True)), self.sizes)
