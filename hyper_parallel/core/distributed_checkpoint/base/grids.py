"""Regions of tensors in files: the cells of a grid that chunks are, and the runs of bytes that a region consists of."""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Iterator

from hyper_parallel.platform.shared.region import Region, Shape

Grid = tuple[Shape, ...]  # for each dim where the cells start


@functools.lru_cache(maxsize=65536)
def cell_of(grid: Grid, shape: Shape, number: int) -> Region:
    """The box of one cell of a grid, by its number in row-major order."""
    offsets, sizes = [], []
    for starts, size in zip(reversed(grid), reversed(shape), strict=True):
        number, place = divmod(number, len(starts))
        offsets.append(starts[place])
        sizes.append((starts[place + 1] if place + 1 < len(starts) else size) - starts[place])
    return Region(tuple(reversed(offsets)), tuple(reversed(sizes)))


@functools.lru_cache(maxsize=4096)
def cells_touching(grid: Grid, shape: Shape, box: Region) -> tuple[tuple[int, Region], ...]:
    """(number in row-major order, box) of the cells of a grid that share elements with ``box``."""
    return tuple(_cells_touching(grid, shape, box))


def _cells_touching(grid: Grid, shape: Shape, box: Region) -> Iterator[tuple[int, Region]]:
    ranges = []
    for starts, at, size in zip(grid, *box, strict=True):
        if size == 0 or not starts:
            return
        ranges.append(range(bisect.bisect_right(starts, at) - 1, bisect.bisect_left(starts, at + size)))
    for place in itertools.product(*ranges):
        number = 0
        offsets, sizes = [], []
        for starts, index, size in zip(grid, place, shape, strict=True):
            number = number * len(starts) + index
            start = starts[index]
            offsets.append(start)
            sizes.append((starts[index + 1] if index + 1 < len(starts) else size) - start)
        yield number, Region(tuple(offsets), tuple(sizes))


@functools.lru_cache(maxsize=4096)
def slices(offsets: Shape, sizes: Shape, base: Shape | None = None) -> tuple[slice, ...]:
    """A box as an index into an array that starts at ``base`` (None: at 0)."""
    if base is not None:
        offsets = tuple(at - start for at, start in zip(offsets, base, strict=True))
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))


def contiguous_runs(shape: Shape, offsets: Shape, sizes: Shape) -> Iterator[tuple[int, int]]:
    """(start, length) of the runs of elements that a box consists of in a row-major array, ascending."""
    inner = len(shape)  # From this dim on the box is as large as the array.
    while inner and sizes[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    length = math.prod(sizes[outer:])
    first = sum(at * stride for at, stride in zip(offsets, strides, strict=True))
    for place in itertools.product(*(range(size) for size in sizes[:outer])):
        yield first + sum(at * stride for at, stride in zip(place, strides, strict=False)), length
