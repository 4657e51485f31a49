"""Who holds which part of a tensor, and who writes it: arithmetic on layouts, the same on every rank.

A layout cuts every dim into intervals, so the chunks of a tensor are the cells of a grid. The ranks that differ only
on axes that do not cut the tensor hold the same cell: its holders. A large cell is cut once more, one piece for each
holder; a small one is written by the holder with the fewest bytes so far among exactly these holders. Both depend on
nothing but the tensors that all of these holders have, so they agree without a message.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from hyper_parallel.core.distributed_checkpoint.base.grids import Grid
from hyper_parallel.core.distributed_checkpoint.base.metadata import dtype_size
from hyper_parallel.core.dtensor.layout import Layout, chunk_interval
from hyper_parallel.platform.shared.region import Region, Shape

Ranks = tuple[int, ...]

SPLIT_BYTES = 4 << 20  # A cell of at least this size is cut among its holders.
_COST_OF_A_CHUNK = 512  # In bytes: what a chunk costs however small it is.


class TensorSpec(NamedTuple):
    """A tensor of a state dict: what all ranks together hold.

    ``layouts`` has one layout, or several when groups of ranks hold the tensor on meshes of their own, or none for a
    plain tensor, which is whole on each of its ``holders`` (None: on every rank).
    """

    shape: Shape
    dtype: str
    layouts: tuple[Layout, ...] = ()
    holders: Ranks | None = None
    requires_grad: bool = False

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * dtype_size(self.dtype)


class ObjectSpec(NamedTuple):
    """An object of a state dict; the lowest of its ``holders`` (None: every rank) writes it."""

    holders: Ranks | None = None


Spec = TensorSpec | ObjectSpec
Specs = Mapping[str, Spec]


class Cell(NamedTuple):
    """A chunk, and the ranks that may write it."""

    offsets: Shape
    sizes: Shape
    holders: Ranks


class OwnerChoice:
    """Chooses who writes a chunk: the holder with the fewest bytes so far, counted for each set of holders alone."""

    def __init__(self) -> None:
        self._loads: dict[Ranks, list[int]] = {}

    def choose(self, holders: Ranks, num_bytes: int) -> int:
        if len(holders) == 1:
            return holders[0]
        loads = self._loads.get(holders)
        if loads is None:
            loads = self._loads[holders] = [0] * len(holders)
        place = loads.index(min(loads))
        loads[place] += num_bytes + _COST_OF_A_CHUNK
        return holders[place]


class PlannedChunk(NamedTuple):
    """One chunk of the tensor or (with empty offsets and sizes) the object ``key``, written by ``owner``."""

    key: str
    offsets: Shape
    sizes: Shape
    owner: int


def plan_order(specs: Specs) -> list[str]:
    """The order in which chunks are planned: tensors, the largest first, then objects; the same on every rank."""
    tensors = [(-spec.num_bytes, key) for key, spec in specs.items() if isinstance(spec, TensorSpec)]
    objects = [key for key, spec in specs.items() if isinstance(spec, ObjectSpec)]
    return [key for _, key in sorted(tensors)] + sorted(objects)


def plan_chunks(specs: Specs, world_size: int, rank: int | None = None) -> Iterator[PlannedChunk]:
    """All chunks, or only those that ``rank`` writes, in the order in which each owner writes them."""
    choice = OwnerChoice()
    everyone = tuple(range(world_size))
    for key in plan_order(specs):
        spec = specs[key]
        if isinstance(spec, ObjectSpec):
            owner = (spec.holders or everyone)[0]
            if rank is None or owner == rank:
                yield PlannedChunk(key, (), (), owner)
            continue
        size = dtype_size(spec.dtype)
        if rank is None:
            cells: Any = all_cells(spec, size, world_size)
        else:
            cells = cells_of_rank(spec, size, world_size, rank)
        for offsets, sizes, holders in cells:
            owner = choice.choose(holders, math.prod(sizes) * size)
            if rank is None or owner == rank:
                yield PlannedChunk(key, offsets, sizes, owner)


def grid_of(spec: TensorSpec, world_size: int) -> Grid:
    """For each dim where the chunks of the tensor start."""
    return grid_of_cells(all_cells(spec, dtype_size(spec.dtype), world_size), len(spec.shape))


@functools.lru_cache(maxsize=1024)
def grid_of_cells(cells: tuple[Cell, ...], ndim: int) -> Grid:
    """For each dim where cells start."""
    return tuple(tuple(sorted({cell.offsets[dim] for cell in cells})) for dim in range(ndim))


# ---------------------------------------------------------------- cells


def all_cells(spec: TensorSpec, element_size: int, world_size: int) -> tuple[Cell, ...]:
    """All chunks of a tensor, row-major; none when it has no elements."""
    if not spec.layouts:
        holders = tuple(range(world_size)) if spec.holders is None else spec.holders
        return _cells_of_plain(spec.shape, holders, element_size)
    return _cells_of_layouts(spec.layouts, spec.shape, element_size)


def cells_of_rank(spec: TensorSpec, element_size: int, world_size: int, rank: int) -> tuple[Cell, ...]:
    """The chunks that ``rank`` holds, in the order of :func:`all_cells`."""
    if not spec.layouts:
        holders = tuple(range(world_size)) if spec.holders is None else spec.holders
        return _cells_of_plain_on_rank(spec.shape, holders, element_size, rank)
    return _cells_of_layouts_on_rank(spec.layouts, spec.shape, element_size, rank)


def holders_of(spec: TensorSpec, rank: int, world_size: int) -> Ranks:
    """The ranks that hold the same block as ``rank``, itself included."""
    if not spec.layouts:
        return tuple(range(world_size)) if spec.holders is None else spec.holders
    for layout in spec.layouts:
        if rank in layout.mesh.rank_list:
            return _holders(spec.layouts, layout.mesh.coordinate_of(rank))
    return (rank,)


@functools.lru_cache(maxsize=4096)
def _cells_of_plain(shape: Shape, holders: Ranks, element_size: int) -> tuple[Cell, ...]:
    if 0 in shape:
        return ()
    return tuple(_split(Region.whole(shape), holders, _split_dim(shape, len(holders), element_size)))


@functools.lru_cache(maxsize=4096)
def _cells_of_plain_on_rank(shape: Shape, holders: Ranks, element_size: int, rank: int) -> tuple[Cell, ...]:
    if 0 in shape or rank not in holders:
        return ()
    dim = _split_dim(shape, len(holders), element_size)
    return tuple(_split(Region.whole(shape), holders, dim, rank))


@functools.lru_cache(maxsize=1024)
def _cells_of_layouts(layouts: tuple[Layout, ...], shape: Shape, element_size: int) -> tuple[Cell, ...]:
    first = layouts[0]
    mesh = first.mesh
    dims = [list(_intervals(size, axes, mesh.shape)) for size, axes in zip(shape, first.shard_axes, strict=True)]
    dim = _cut_dim(layouts, shape, element_size)
    cells: list[Cell] = []
    for intervals in itertools.product(*dims):
        coordinate = [0] * mesh.ndim
        for axes, (_, _, places) in zip(first.shard_axes, intervals, strict=True):
            for axis, place in zip(axes, places, strict=True):
                coordinate[axis] = place
        box = Region(tuple(start for start, _, _ in intervals), tuple(length for _, length, _ in intervals))
        cells += _split(box, _holders(layouts, tuple(coordinate)), dim)
    # Pieces of neighbouring cells are in the order of the cells here; row-major over the finer grid is wanted.
    return tuple(sorted(cells)) if dim is not None else tuple(cells)


@functools.lru_cache(maxsize=65536)
def _cells_of_layouts_on_rank(
    layouts: tuple[Layout, ...], shape: Shape, element_size: int, rank: int
) -> tuple[Cell, ...]:
    mine = next((layout for layout in layouts if rank in layout.mesh.rank_list), None)
    if mine is None:
        return ()
    coordinate = mine.mesh.coordinate_of(rank)
    region = mine.local_region(shape, coordinate)
    if 0 in region.sizes:
        return ()
    holders = _holders(layouts, coordinate)
    return tuple(_split(region, holders, _cut_dim(layouts, shape, element_size), rank))


@functools.lru_cache(maxsize=65536)
def _holders(layouts: tuple[Layout, ...], coordinate: Shape) -> Ranks:
    """The ranks that hold the block at ``coordinate``, ascending."""
    cut = {axis for axes in layouts[0].shard_axes for axis in axes}
    whole = tuple(axis for axis in range(layouts[0].mesh.ndim) if axis not in cut)
    holders: set[int] = set()
    for layout in layouts:
        rank = int(layout.mesh.mesh[coordinate])
        holders.update(layout.mesh.line(whole, rank) if whole else (rank,))
    return tuple(sorted(holders))


def _cut_dim(layouts: tuple[Layout, ...], shape: Shape, element_size: int) -> int | None:
    """The dim along which the cells are cut among their holders; looked up on the first cell, which is the largest."""
    first = layouts[0]
    sizes = first.local_shape(shape, (0,) * first.mesh.ndim)
    return _split_dim(sizes, len(_holders(layouts, (0,) * first.mesh.ndim)), element_size)


def _split_dim(sizes: Shape, num_holders: int, element_size: int) -> int | None:
    if num_holders == 1 or math.prod(sizes) * element_size < SPLIT_BYTES:
        return None
    return next((dim for dim, size in enumerate(sizes) if size >= num_holders), None)


def _split(box: Region, holders: Ranks, dim: int | None, rank: int | None = None) -> Iterator[Cell]:
    """A cell, or, if it is to be cut along ``dim``, the piece of each holder (only that of ``rank`` if it is given)."""
    offsets, sizes = box
    if dim is None:
        yield Cell(offsets, sizes, holders)
        return
    places = range(len(holders)) if rank is None else (holders.index(rank),)
    for place in places:
        start, length = chunk_interval(sizes[dim], len(holders), place)
        if length:
            at = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
            yield Cell(at, (*sizes[:dim], length, *sizes[dim + 1 :]), (holders[place],))


def _intervals(size: int, axes: Shape, mesh_shape: Shape) -> Iterator[tuple[int, int, Shape]]:
    """(start, length, place on each axis) of the intervals that the axes cut a dim into, without empty ones."""
    for places in itertools.product(*(range(mesh_shape[axis]) for axis in axes)):
        start, length = 0, size
        for axis, place in zip(axes, places, strict=True):
            at, length = chunk_interval(length, mesh_shape[axis], place)
            start += at
        if length:
            yield start, length, places
