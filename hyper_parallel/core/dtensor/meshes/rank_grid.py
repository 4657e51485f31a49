"""Ranks on named axes: which axis is meant, where a rank lies, and the lines of ranks along axes.

Arithmetic on a grid of ranks; nothing here communicates. :class:`DeviceMesh` is such a grid with process groups and
sub-meshes.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

import numpy as np

from hyper_parallel.core.dtensor.meshes.mesh_description import Ranks
from hyper_parallel.platform import get_platform

Axis = SupportsIndex | str
Axes = Axis | Sequence[Axis]


class RankGrid:
    """Distinct ranks arranged on axes, seen from one of them or from outside."""

    _mesh: Ranks
    _names: tuple[str, ...] | None
    _rank: int | None  # the rank that sees this grid when it is not the one of the process
    _shape: tuple[int, ...]
    _rank_list: tuple[int, ...]
    _coordinates: dict[int, tuple[int, ...]] | None  # by rank; made at the first use
    _lines: dict[tuple[Any, int], tuple[int, ...]]
    _group_positions: dict[tuple[Any, int], tuple[int, ...]]
    _asked: set[tuple[int, ...] | None]  # the axes that `leads` was asked about; None: the place itself

    def _fill_grid(self, ranks: Ranks, names: tuple[str, ...] | None, rank: int | None) -> None:
        ranks = ranks.view()
        ranks.flags.writeable = False
        vars(self).update(
            _mesh=ranks,
            _names=names,
            _rank=rank,
            _shape=tuple(ranks.shape),
            _rank_list=tuple(ranks.ravel().tolist()),
            _coordinates=None,
            _lines={},
            _group_positions={},
            _asked=set(),
        )

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """The names of the axes, or None."""
        return self._names

    @property
    def mesh(self) -> Ranks:
        """The ranks as a read-only array."""
        return self._mesh

    @property
    def rank_list(self) -> tuple[int, ...]:
        """The ranks in row-major order."""
        return self._rank_list

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def ndim(self) -> int:
        return len(self._shape)

    # ---------------------------------------------------------------- axes

    def size(self, axis: Axes | None = None) -> int:
        """The number of ranks along an axis, along several together, or of the whole mesh."""
        axes = range(self.ndim) if axis is None else self._axis_indices(axis)
        return math.prod(self._shape[index] for index in axes)

    def axis_label(self, axis: Axis) -> str:
        """The name of an axis, or ``axis0``, ``axis1``, ... on a mesh without names."""
        index = self.axis_index(axis)
        return f"axis{index}" if self._names is None else self._names[index]

    def axis_index(self, axis: Axis) -> int:
        """The index of an axis given by name, label or (possibly negative) index.

        >>> from hyper_parallel.core.dtensor.meshes.device_mesh import init_device_mesh
        >>> mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), init_backend=False)
        >>> mesh.axis_index("tp"), mesh.axis_index(-2)
        (1, 0)
        """
        if isinstance(axis, str):
            labels = self._names or tuple(f"axis{index}" for index in range(self.ndim))
            if axis in labels:
                return labels.index(axis)
            raise ValueError(f"{self} has no axis {axis!r}{self._hint_of_missing(axis)}")
        try:
            index = operator.index(axis)
        except TypeError:
            index = None
        if index is None or isinstance(axis, bool):
            raise TypeError(f"an axis of {self} is a name or an index, not {axis!r}")
        if not -self.ndim <= index < self.ndim:
            raise ValueError(f"{self} has no axis {index}; its axes are 0 to {self.ndim - 1}")
        return index % self.ndim

    def _hint_of_missing(self, axis: str) -> str:
        """What to write instead of a name that this grid does not have, to end the message of the error."""
        return ""

    def _axis_indices(self, axes: Axes) -> tuple[int, ...]:
        if isinstance(axes, str) or not isinstance(axes, Iterable):
            return (self.axis_index(axes),)
        indices = tuple(self.axis_index(axis) for axis in axes)
        if not indices:
            raise ValueError(f"no axis of {self} was given")
        if len(set(indices)) < len(indices):
            raise ValueError(f"{tuple(axes)} names an axis of {self} twice")
        return indices

    def _only_axis(self, method: str) -> int:
        if self.ndim == 1:
            return 0
        example: tuple[Any, ...] = self._names or tuple(range(self.ndim))
        raise ValueError(
            f"{self} has {self.ndim} axes: say which, {method}({example[0]!r}), or {method}({example}) for all"
        )

    # ---------------------------------------------------------------- where ranks are

    def get_rank(self) -> int:
        """The world rank that sees this mesh: this process's, or the one it was described for."""
        return self._rank if self._rank is not None else get_platform().get_rank()

    def coordinate_of(self, rank: int) -> tuple[int, ...]:
        """The position of a world rank on each axis.

        >>> from hyper_parallel.core.dtensor.meshes.device_mesh import init_device_mesh
        >>> init_device_mesh("cpu", (2, 4), init_backend=False).coordinate_of(6)
        (1, 2)
        """
        coordinate = self._coordinate_or_none(rank)
        if coordinate is None:
            raise ValueError(f"rank {rank} is not part of {self}")
        return coordinate

    def get_coordinate(self) -> tuple[int, ...] | None:
        """This rank's position on each axis, or None outside of the mesh."""
        return self._coordinate_or_none(self.get_rank())

    def _coordinate_or_none(self, rank: int) -> tuple[int, ...] | None:
        coordinates = self._coordinates
        if coordinates is None:
            coordinates = dict(zip(self._rank_list, np.ndindex(self._shape), strict=True))
            vars(self)["_coordinates"] = coordinates
        return coordinates.get(rank)

    def leads(self, axes: Iterable[int]) -> bool:
        """Whether this rank is the first along each of these axes, the one that does what must be done once.

        True outside of the mesh. Which ranks do alike follows from the answers: see ``rank_questions.py``.
        """
        asked = tuple(axes)
        self._asked.add(asked)
        coordinate = self.get_coordinate()
        return coordinate is None or not any(coordinate[axis] for axis in asked)

    def get_local_rank(self, axis: Axes | None = None) -> int:
        """This rank's position along an axis, or along several together (row-major in the order given)."""
        self._asked.add(None)
        return self.line(self._only_axis("get_local_rank") if axis is None else axis).index(self.get_rank())

    def line(self, axes: Axes, rank: int | None = None) -> tuple[int, ...]:
        """The ranks that share this rank's (or ``rank``'s) other coordinates, row-major over ``axes`` as ordered here.

        >>> from hyper_parallel.core.dtensor.meshes.device_mesh import init_device_mesh
        >>> mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"), init_backend=False)
        >>> mesh.line("cp", rank=5), mesh.line(("dp", "tp")), mesh.line(("tp", "dp"))
        ((5, 7), (0, 1, 4, 5), (0, 4, 1, 5))
        """
        of_rank = self.get_rank() if rank is None else rank
        key = (tuple(axes) if isinstance(axes, list) else axes, of_rank)
        found = self._lines.get(key)
        if found is not None:
            return found
        indices = self._axis_indices(axes)
        coordinate = self._coordinate_or_none(of_rank)
        if coordinate is None:
            error = RuntimeError if rank is None else ValueError
            raise error(f"rank {of_rank} is not part of {self}")
        kept = tuple(slice(None) if axis in indices else at for axis, at in enumerate(coordinate))
        ascending = sorted(indices)
        found = tuple(self._mesh[kept].transpose([ascending.index(axis) for axis in indices]).ravel().tolist())
        self._lines[key] = found
        return found

    def get_rank_list_along_axis(self, axis: Axes) -> list[int]:
        """The ranks of this rank's line along an axis, as a list."""
        return list(self.line(axis))

    def get_ranks_by_axis(self, axis: Axes) -> list[list[int]]:
        """Every line along an axis, or along several together.

        >>> from hyper_parallel.core.dtensor.meshes.device_mesh import init_device_mesh
        >>> init_device_mesh("cpu", (2, 2), init_backend=False).get_ranks_by_axis(0)
        [[0, 2], [1, 3]]
        """
        indices = self._axis_indices(axis)
        lines = np.moveaxis(self._mesh, indices, range(-len(indices), 0)).reshape(-1, self.size(axis))
        return [list(map(int, line)) for line in lines]

    def group_positions(self, axes: Axes, rank: int | None = None) -> tuple[int, ...]:
        """For each rank of :meth:`line`, its position in the group.

        A group orders its ranks ascending, and collectives concatenate in group order. The identity where the line
        ascends; where it does not, permute: part ``i`` of the line is part ``group_positions[i]`` of the group.

        >>> from hyper_parallel.core.dtensor.meshes.device_mesh import DeviceMesh
        >>> mesh = DeviceMesh("cpu", [3, 0, 1], init_backend=False)
        >>> mesh.line(0), mesh.group_positions(0)
        ((3, 0, 1), (2, 0, 1))
        """
        line = self.line(axes, rank)
        key = (tuple(axes) if isinstance(axes, list) else axes, line[0])
        found = self._group_positions.get(key)
        if found is None:
            position = {member: index for index, member in enumerate(sorted(line))}
            found = self._group_positions[key] = tuple(position[member] for member in line)
        return found
