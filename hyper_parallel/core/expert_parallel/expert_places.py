"""Which rank of a group has which experts."""

from __future__ import annotations

import itertools
from functools import cached_property
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.platform import get_platform

__all__ = ["ExpertPlaces"]

_platform = get_platform()


class ExpertPlaces:
    """The experts of each rank along the axes that cut them: blocks of neighbours, some short or empty.

    Experts are numbered by *key* where they travel: those of the first rank of the group first. That is their own
    number, unless the mesh has its ranks in another order than the group.
    """

    def __init__(self, layout: Layout, num_experts: int) -> None:
        mesh, axes = layout.mesh, layout.shard_axes[0]
        self.num_experts = num_experts
        self._mesh, self._axes = mesh, axes
        mine = mesh.get_coordinate()
        assert mine is not None
        shape = (num_experts,)
        alone = Layout.of(mesh, (axes,))
        experts: dict[int, range] = {}
        lines = itertools.product(*(range(mesh.shape[axis]) for axis in axes))
        for position, place in zip(mesh.group_positions(axes), lines, strict=True):
            coordinate = list(mine)
            for axis, index in zip(axes, place, strict=True):
                coordinate[axis] = index
            box = alone.local_region(shape, coordinate)
            experts[position] = range(box.offsets[0], box.offsets[0] + box.sizes[0])
            if coordinate == list(mine):
                self.position = position
        self.experts = [experts[position] for position in range(len(experts))]
        self.sizes = [len(one) for one in self.experts]
        self._order = [expert for one in self.experts for expert in one]

    @property
    def num_ranks(self) -> int:
        return len(self.sizes)

    @property
    def mine(self) -> range:
        """The keys of this rank's experts."""
        begin = sum(self.sizes[: self.position])
        return range(begin, begin + self.sizes[self.position])

    @cached_property
    def group(self) -> Any:
        return self._mesh.get_group(self._axes)

    def __repr__(self) -> str:
        axes = ", ".join(f"{self._mesh.axis_label(axis)}={self._mesh.shape[axis]}" for axis in self._axes)
        return f"{axes} (ranks {', '.join(map(str, sorted(self._mesh.line(self._axes))))})"

    def keys(self, index: Any) -> Any:
        """The keys of experts, for a vector of their numbers."""
        if self._order == list(range(self.num_experts)):
            return index
        table = np.argsort(np.array(self._order, np.int64))
        return _platform.take_rows(_platform.from_numpy(table, index.dtype, index.device), index)
