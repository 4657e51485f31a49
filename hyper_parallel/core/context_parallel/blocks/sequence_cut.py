"""How a sequence is sharded, as one of its ranks sees it: which tokens each rank has, and how to reach them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from hyper_parallel.core.context_parallel.blocks.visibility import Interval
from hyper_parallel.core.dtensor.layout import Layout, Shape
from hyper_parallel.platform import get_platform

_platform = get_platform()


@dataclass(frozen=True)
class SequenceCut:
    """The ranks along the mesh axes that shard the tokens, in the order of the tokens."""

    intervals: tuple[Interval, ...]  # the tokens of each rank
    me: int
    group: Any
    positions: tuple[int, ...]  # of each rank in the group

    @property
    def num_ranks(self) -> int:
        return len(self.intervals)

    @property
    def mine(self) -> Interval:
        """The tokens of this rank."""
        return self.intervals[self.me]

    def exchange(self, parts: Sequence[Any], shapes: Sequence[Shape | None], like: Any) -> Exchange:
        """Start sending ``parts[r]`` to rank r and receiving a tensor of ``shapes[r]`` from it; None for nothing.

        All are of the type of ``like``; what stays on this rank is not among them.
        """
        num_ranks = self.num_ranks
        sends: list[Any] = [None] * num_ranks
        expected: list[Shape | None] = [None] * num_ranks
        for rank, place in enumerate(self.positions):
            sends[place], expected[place] = parts[rank], shapes[rank]
        send_sizes = [0 if part is None else prod(part.shape) for part in sends]
        receive_sizes = [0 if shape is None else prod(shape) for shape in expected]
        rows = [part.reshape(-1) for part, size in zip(sends, send_sizes, strict=True) if size]
        packed = rows[0] if len(rows) == 1 else _platform.cat(rows) if rows else None
        if packed is None:
            packed = _platform.zeros((0,), like.dtype, like.device)
        received, handle = _platform.all_to_all_single(
            packed, (sum(receive_sizes),), self.group, True, output_splits=receive_sizes, input_splits=send_sizes
        )
        return Exchange(received, handle, [expected[place] for place in self.positions], self.positions, packed)


class Exchange:
    """Tensors on their way; ``wait()`` gives those that came, by rank."""

    def __init__(
        self, received: Any, handle: Any, shapes: list[Shape | None], positions: tuple[int, ...], sent: Any
    ) -> None:
        self._received, self._handle, self._shapes, self._positions = received, handle, shapes, positions
        self._sent = sent  # must live until it is sent

    def wait(self) -> list[Any]:
        """What came from each rank; None where nothing was to come."""
        if self._handle is not None:
            self._handle.wait()
        self._handle = self._sent = None
        starts, start = {}, 0
        for rank in sorted(range(len(self._positions)), key=self._positions.__getitem__):
            starts[rank] = start
            shape = self._shapes[rank]
            start += 0 if shape is None else prod(shape)
        return [
            None if shape is None else self._received.narrow(0, starts[rank], prod(shape)).reshape(shape)
            for rank, shape in enumerate(self._shapes)
        ]


def sequence_cut(layout: Layout, shape: Shape, dim: int, axes: tuple[int, ...]) -> SequenceCut:
    """How dim ``dim`` of a tensor is sharded along ``axes``, which are some of those that shard it."""
    mesh = layout.mesh
    here = mesh.get_coordinate()
    assert here is not None
    intervals = []
    for place in itertools.product(*(range(mesh.shape[axis]) for axis in axes)):
        coordinate = list(here)
        for axis, index in zip(axes, place, strict=True):
            coordinate[axis] = index
        offsets, sizes = layout.local_region(shape, tuple(coordinate))
        intervals.append((offsets[dim], offsets[dim] + sizes[dim]))
    me = mesh.get_local_rank(axes)
    return SequenceCut(tuple(intervals), me, mesh.get_group(axes), mesh.group_positions(axes))


def inner_and_outer(
    layout: Layout, axes: tuple[int, ...], cut: SequenceCut, inner_size: int
) -> tuple[SequenceCut, SequenceCut]:
    """The ranks that share this rank's stretch of ``inner_size`` consecutive blocks, and one rank of each stretch."""
    mesh, inner_axes = layout.mesh, axes[-1:]
    outer_axes = axes[:-1]
    if not outer_axes:
        axis = axes[0]
        names = [mesh.axis_label(axis) + part for part in ("_outer", "_inner")] if mesh.mesh_dim_names else None
        mesh = mesh.unflatten(axis, (cut.num_ranks // inner_size, inner_size), names)
        outer_axes, inner_axes = (axis,), (axis + 1,)
    place, within = divmod(cut.me, inner_size)
    stretch = cut.intervals[place * inner_size : (place + 1) * inner_size]
    stretches = super_blocks(cut.intervals, inner_size)
    inner = SequenceCut(stretch, within, mesh.get_group(inner_axes), mesh.group_positions(inner_axes))
    return inner, SequenceCut(stretches, place, mesh.get_group(outer_axes), mesh.group_positions(outer_axes))


def super_blocks(intervals: tuple[Interval, ...], size: int) -> tuple[Interval, ...]:
    """The tokens of each ``size`` consecutive ranks."""
    return tuple((intervals[at][0], intervals[at + size - 1][1]) for at in range(0, len(intervals), size))
