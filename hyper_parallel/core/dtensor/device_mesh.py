"""Device meshes: ranks arranged on named axes, the lines of ranks along each axis, and the process groups over them.

A mesh is a description: building one, cutting sub-meshes out of it, comparing or pickling it never communicates. A
group is made when :meth:`DeviceMesh.get_group` first asks for it, and shared by all meshes with that line of ranks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any, SupportsIndex

import numpy as np

from hyper_parallel.core.dtensor.mesh_context import enter_mesh, leave_mesh
from hyper_parallel.core.dtensor.mesh_description import (
    Ranks,
    check_device_type,
    describe,
    fitting_shapes,
    names_text,
    parse_names,
    parse_ranks,
    parse_shape,
)
from hyper_parallel.core.dtensor.mesh_families import block_positions, join_families, same_family
from hyper_parallel.platform import EXISTING_COMM_GROUPS, get_platform

Axis = SupportsIndex | str
Axes = Axis | Sequence[Axis]


class DeviceMesh:
    """Ranks arranged on axes. Immutable; equal by content: device type, ranks in order, shape, names.

    ``mesh`` is nested lists, a numpy array, or anything with ``tolist()``, of distinct world ranks in any order. It may
    be smaller than the world: a rank outside holds the mesh without a coordinate and may not ask for its groups.
    With ``init_backend`` the world is joined if that has not happened yet, and the ranks must exist in it. Without, the
    mesh is a plain description that needs no world, seen from ``rank`` (default: this process's, 0 without a world).

    >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], ("dp", "tp"), init_backend=False)
    >>> mesh
    DeviceMesh('cpu', (dp=2, tp=2), ranks=[[0, 1], [2, 3]])
    >>> mesh["tp"].rank_list, mesh["dp"].rank_list
    ((0, 1), (0, 2))
    """

    _device_type: str
    _mesh: Ranks
    _names: tuple[str, ...] | None
    _rank: int | None  # the rank that sees this mesh when it is not the one of the process
    _parent_root: DeviceMesh | None  # None: this is a root
    _blocks: Ranks  # see mesh_families.py
    _flattened: dict[str, Ranks]  # of a root: the families of the flattened axes, by name
    _shape: tuple[int, ...]
    _rank_list: tuple[int, ...]
    _hash: int
    _coordinates: dict[int, tuple[int, ...]] | None  # by rank; made at the first use
    _lines: dict[tuple[Any, int], tuple[int, ...]]
    _group_positions: dict[tuple[Any, int], tuple[int, ...]]
    _submeshes: dict[tuple[Any, int], DeviceMesh]

    def __init__(
        self,
        device_type: str,
        mesh: Any,
        mesh_dim_names: Sequence[str] | None = None,
        *,
        init_backend: bool = True,
        rank: int | None = None,
    ) -> None:
        check_device_type(device_type)
        ranks = parse_ranks(device_type, mesh)
        names = parse_names(device_type, ranks, mesh_dim_names)
        if init_backend:
            if rank is not None:
                raise ValueError(
                    f"{describe(device_type, ranks, names)}: rank={rank} describes the mesh as that rank sees it, "
                    f"which takes init_backend=False"
                )
            _join_world()
            world_size = get_platform().get_world_size()
            if ranks.max() >= world_size:
                raise ValueError(
                    f"{describe(device_type, ranks, names)} has ranks {sorted(ranks[ranks >= world_size].tolist())}, "
                    f"but the ranks of this world are 0 to {world_size - 1}"
                )
        self._fill(device_type, ranks, names, None if rank is None else operator.index(rank), None, ranks[None])

    def _fill(
        self,
        device_type: str,
        ranks: Ranks,
        names: tuple[str, ...] | None,
        rank: int | None,
        root: DeviceMesh | None,
        blocks: Ranks,
    ) -> None:
        ranks = ranks.view()
        ranks.flags.writeable = False
        shape, rank_list = tuple(ranks.shape), tuple(ranks.ravel().tolist())
        vars(self).update(
            _device_type=device_type,
            _mesh=ranks,
            _names=names,
            _rank=rank,
            _parent_root=root,
            _blocks=blocks,
            _flattened={},
            _shape=shape,
            _rank_list=rank_list,
            _hash=hash((device_type, shape, names, rank_list)),
            _coordinates=None,
            _lines={},
            _group_positions={},
            _submeshes={},
        )

    # ---------------------------------------------------------------- what the mesh is

    @property
    def device_type(self) -> str:
        return self._device_type

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

    @property
    def root(self) -> DeviceMesh:
        """The mesh that this one was cut out of; a mesh built directly is its own root."""
        return self if self._parent_root is None else self._parent_root

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

        >>> mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"), init_backend=False)
        >>> mesh.axis_index("tp"), mesh.axis_index(-2)
        (1, 0)
        """
        if isinstance(axis, str):
            labels = self._names or tuple(f"axis{index}" for index in range(self.ndim))
            if axis in labels:
                return labels.index(axis)
            hint = f'; it is a flattened axis, use mesh.root["{axis}"]' if axis in self.root._flattened else ""
            raise ValueError(f"{self} has no axis {axis!r}{hint}")
        try:
            index = operator.index(axis)
        except TypeError:
            index = None
        if index is None or isinstance(axis, bool):
            raise TypeError(f"an axis of {self} is a name or an index, not {axis!r}")
        if not -self.ndim <= index < self.ndim:
            raise ValueError(f"{self} has no axis {index}; its axes are 0 to {self.ndim - 1}")
        return index % self.ndim

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

    def get_local_rank(self, axis: Axes | None = None) -> int:
        """This rank's position along an axis, or along several together (row-major in the order given)."""
        return self.line(self._only_axis("get_local_rank") if axis is None else axis).index(self.get_rank())

    def line(self, axes: Axes, rank: int | None = None) -> tuple[int, ...]:
        """The ranks that share this rank's (or ``rank``'s) other coordinates, row-major over ``axes`` as ordered here.

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

    # ---------------------------------------------------------------- process groups

    def get_group(self, axis: Axes | None = None) -> Any:
        """The process group of this rank's line along an axis, or along several axes together.

        Made at the first use, by its members only and in any order among groups; the same ranks are always the same
        group, whichever mesh asks.
        """
        line = self.line(self._only_axis("get_group") if axis is None else axis)
        platform = get_platform()
        if self._rank is not None and self._rank != platform.get_rank():
            raise RuntimeError(
                f"{self} describes what rank {self._rank} sees; rank {platform.get_rank()} has no group of it"
            )
        group = platform.get_created_group(line)
        if group is None:
            if not _has_world():
                raise RuntimeError(
                    f"{self} was asked for a group, but this process has joined no world: "
                    f"call init_process_group, or build the mesh with init_backend=True"
                )
            group = platform.create_group(line)
        return group

    def get_all_groups(self) -> list[Any]:
        """The groups of this rank's lines, one per axis."""
        return [self.get_group(axis) for axis in range(self.ndim)]

    @classmethod
    def from_group(
        cls,
        group: Any,
        device_type: str,
        mesh: Any = None,
        mesh_dim_names: Sequence[str] | None = None,
    ) -> DeviceMesh:
        """A mesh over existing groups: one group, or one per axis together with ``mesh``, the ranks.

        From now on every mesh uses these groups for these ranks, also where a group of the same ranks was made before:
        some members may have made one and others not yet, and all must use the same.
        """
        platform = get_platform()
        groups = list(group) if isinstance(group, list | tuple) else [group]
        if not groups:
            raise ValueError("from_group needs at least one group")
        members = [platform.get_process_group_ranks(one) for one in groups]
        if mesh is None:
            if len(groups) > 1:
                raise ValueError(
                    f"from_group with {len(groups)} groups, of ranks {members}, needs mesh=, the ranks of them all"
                )
            mesh = members[0]
        result = cls(device_type, mesh, mesh_dim_names)
        if result.ndim != len(groups):
            raise ValueError(
                f"from_group needs one group for each axis of {result}, not {len(groups)}, of ranks {members}"
            )
        for axis, ranks in enumerate(members):
            line = result.line(axis)
            if ranks != sorted(line):
                raise ValueError(
                    f"the group for axis {axis} of {result} has ranks {ranks} on rank {result.get_rank()}; "
                    f"it must have {sorted(line)}, in this order"
                )
        EXISTING_COMM_GROUPS.update({tuple(ranks): one for ranks, one in zip(members, groups, strict=True)})
        return result

    # ---------------------------------------------------------------- meshes out of meshes

    def __getitem__(self, names: str | Sequence[str]) -> DeviceMesh:
        """The sub-mesh around this rank with the named axes, in the order asked. Outside of the mesh: the first one.

        >>> mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"), init_backend=False)
        >>> mesh["tp", "dp"]
        DeviceMesh('cpu', (tp=2, dp=2), ranks=[[0, 4], [1, 5]])
        """
        asked = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, Iterable) else (names,)
        key = (asked, self.get_rank())
        found = self._submeshes.get(key)
        if found is None:
            if not asked or not all(isinstance(name, str) for name in asked):
                raise TypeError(
                    f'mesh[...] takes axis names, as in mesh["tp"] or mesh["dp", "tp"], not {names!r}: {self}'
                )
            if self._names is None:
                raise ValueError(f"{self} has no axis names, so {asked} cannot be cut out of it; give mesh_dim_names")
            if len(set(asked)) < len(asked):
                raise ValueError(f"{asked} names an axis of {self} twice")
            blocks = self._axis_family(asked[0])
            for name in asked[1:]:
                joined = join_families(blocks, self._axis_family(name))
                if joined is None:
                    raise ValueError(f"axis {name!r} is not independent of {asked[: asked.index(name)]} in {self}")
                blocks = joined
            found = self._submeshes[key] = self._derive(blocks, asked)
        return found

    def _axis_family(self, name: str) -> Ranks:
        flattened = self.root._flattened
        if name in flattened and name not in (self._names or ()):
            blocks = flattened[name]
            owner = block_positions(self._blocks)[0]
            if (owner[blocks] == owner[blocks[:, :1]]).all():
                return blocks
        index = self.axis_index(name)
        return np.moveaxis(self._blocks, index + 1, -1).reshape(-1, self._shape[index])

    def _derive(self, blocks: Ranks, names: tuple[str, ...] | None) -> DeviceMesh:
        """The mesh of this family that lies around this rank, or around the first one of this mesh."""
        rank = self.get_rank()
        anchor = rank if self._coordinate_or_none(rank) is not None else self._rank_list[0]
        block = int((blocks == anchor).reshape(len(blocks), -1).any(axis=1).argmax())
        result = object.__new__(DeviceMesh)
        result._fill(self._device_type, blocks[block], names, self._rank, self.root, blocks)
        return self.root if result == self.root else result

    def flatten(self, name: str | None = None) -> DeviceMesh:
        """One axis over all ranks, called ``name`` (default: the names joined by ``_``), which the root then knows.

        >>> mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"), init_backend=False)
        >>> mesh["dp", "cp"].flatten()
        DeviceMesh('cpu', (dp_cp=4), ranks=[0, 2, 4, 6])
        >>> mesh["dp_cp", "tp"].shape
        (4, 2)
        """
        if name is None and self._names is not None:
            name = "_".join(self._names)
        if self.ndim == 1 and (name is None or self._names == (name,)):
            return self
        blocks = self._blocks.reshape(len(self._blocks), -1)
        if name is None:
            return self._derive(blocks, None)
        root = self.root
        parse_names(self._device_type, self._mesh.ravel(), (name,))
        known = root._axis_family(name) if name in (root._names or ()) else root._flattened.setdefault(name, blocks)
        if not same_family(known, blocks):
            raise ValueError(
                f"{self} cannot be flattened as {name!r}: {root} has another axis of that name; give another"
            )
        return root[name]

    def unflatten(self, axis: Axis, sizes: Sequence[int], names: Sequence[str] | None = None) -> DeviceMesh:
        """The same ranks with one axis split into several.

        >>> mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"), init_backend=False)
        >>> mesh.unflatten("dp", (2, 2), ("replicate", "shard"))
        DeviceMesh('cpu', (replicate=2, shard=2, tp=2), ranks=[[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
        """
        index = self.axis_index(axis)
        new_sizes = parse_shape(sizes, f"unflatten of {self}")
        if math.prod(new_sizes) != self._shape[index]:
            raise ValueError(
                f"axis {axis!r} of {self} has {self._shape[index]} ranks and cannot be split into {new_sizes}"
            )
        if (names is None) != (self._names is None) or (names is not None and len(names) != len(new_sizes)):
            raise ValueError(
                f"axis {axis!r} of {self} split into {new_sizes} takes "
                f"{'no names' if self._names is None else f'{len(new_sizes)} names'}, not {names!r}"
            )
        shape = self._shape[:index] + new_sizes + self._shape[index + 1 :]
        new_names = None
        if self._names is not None and names is not None:
            new_names = self._names[:index] + tuple(names) + self._names[index + 1 :]
        new_names = parse_names(self._device_type, self._mesh.reshape(shape), new_names)
        return self._derive(self._blocks.reshape(-1, *shape), new_names)

    @staticmethod
    def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
        """One mesh with the axes of several sub-meshes of one root, in the order given.

        >>> mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"), init_backend=False)
        >>> DeviceMesh.concatenate([mesh["tp"], mesh["dp"]]) == mesh["tp", "dp"]
        True
        """
        meshes = list(meshes)
        if not meshes:
            raise ValueError("concatenate needs at least one mesh")
        strangers = [mesh for mesh in meshes if not isinstance(mesh, DeviceMesh)]
        if strangers:
            raise TypeError(f"concatenate takes meshes, as in [mesh['tp'], mesh['dp']], not {strangers[0]!r}")
        first = meshes[0]
        names, blocks = first._names, first._blocks
        for mesh in meshes[1:]:
            if mesh.root != first.root:
                raise ValueError(
                    f"concatenate joins sub-meshes of one root; {first} was cut out of {first.root}, "
                    f"but {mesh} out of {mesh.root}"
                )
            joined = join_families(blocks, mesh._blocks)
            if joined is None:
                raise ValueError(f"the axes of {mesh} are not independent of those before it in concatenate({meshes})")
            if names is None or mesh._names is None:
                raise ValueError(f"concatenate needs axis names on every mesh: {meshes}")
            names, blocks = names + mesh._names, joined
        if len(meshes) == 1:
            return first
        result = first._derive(blocks, parse_names(first._device_type, blocks[0], names))
        for mesh in meshes:
            if not set(mesh._rank_list) <= set(result._rank_list):
                raise ValueError(
                    f"{mesh} does not lie around the same rank as {first}, so concatenate cannot join them"
                )
        return result

    # ---------------------------------------------------------------- as a value

    def __enter__(self) -> DeviceMesh:
        enter_mesh(self)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        leave_mesh()

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, DeviceMesh):
            return NotImplemented
        return (
            self._hash == other._hash
            and self._rank_list == other._rank_list
            and self._shape == other._shape
            and self._names == other._names
            and self._device_type == other._device_type
            and self._rank == other._rank
        )

    def __hash__(self) -> int:
        return self._hash

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{self} is immutable: {name!r} cannot be set")

    def __copy__(self) -> DeviceMesh:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceMesh:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        flattened = {name: blocks.tolist() for name, blocks in self._flattened.items()}
        blocks = None if self._parent_root is None else self._blocks.tolist()
        description = (
            self._device_type,
            self._mesh.tolist(),
            self._names,
            self._rank,
            self._parent_root,
            blocks,
            flattened,
        )
        return rebuild_device_mesh, description

    def __repr__(self) -> str:
        text = describe(self._device_type, self._mesh, self._names)
        return text if self._rank is None else f"{text[:-1]}, rank={self._rank})"


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    rank_list: Sequence[int] | None = None,
    init_backend: bool = True,
    rank: int | None = None,
) -> DeviceMesh:
    """A mesh of the given shape over ``rank_list`` in row-major order, or over the whole world.

    Joins the world if that has not happened yet. ``init_backend=False`` and ``rank``: see :class:`DeviceMesh`.

    >>> init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), init_backend=False)
    DeviceMesh('cpu', (dp=2, tp=2), ranks=[[0, 1], [2, 3]])
    >>> init_device_mesh("cpu", (2,), rank_list=(3, 1), init_backend=False)
    DeviceMesh('cpu', (2,), ranks=[3, 1])
    """
    check_device_type(device_type)
    shape = parse_shape(mesh_shape, "init_device_mesh")
    num_ranks = math.prod(shape)
    if rank_list is None:
        if init_backend:
            _join_world()
            world_size = get_platform().get_world_size()
            if num_ranks != world_size:
                fitting = ", ".join(map(str, fitting_shapes(shape, world_size)))
                raise ValueError(
                    f"init_device_mesh: a mesh of shape {shape}{names_text(mesh_dim_names)} has {num_ranks} ranks, "
                    f"but the world has {world_size}; shapes that fit: {fitting}; "
                    f"or give rank_list= for a mesh over a part of the world"
                )
        ranks = np.arange(num_ranks)
    else:
        ranks = parse_ranks(device_type, rank_list)
        if ranks.ndim != 1 or ranks.size != num_ranks:
            raise ValueError(
                f"init_device_mesh: a mesh of shape {shape}{names_text(mesh_dim_names)} takes {num_ranks} ranks, "
                f"but rank_list has {ranks.size}: {ranks.tolist()}"
            )
    return DeviceMesh(device_type, ranks.reshape(shape), mesh_dim_names, init_backend=init_backend, rank=rank)


def rebuild_device_mesh(
    device_type: str,
    mesh: list[Any],
    names: tuple[str, ...] | None,
    rank: int | None,
    root: DeviceMesh | None,
    blocks: list[Any] | None,
    flattened: dict[str, list[Any]],
) -> DeviceMesh:
    """A mesh from its pickled description, which is plain values. Needs no world: groups are found when asked for."""
    result = object.__new__(DeviceMesh)
    ranks = np.array(mesh, dtype=np.int64)
    result._fill(device_type, ranks, names, rank, root, ranks[None] if blocks is None else np.array(blocks, np.int64))
    result._flattened.update({name: np.array(lines, np.int64) for name, lines in flattened.items()})
    return result


# -------------------------------------------------------------------- the world


def _has_world() -> bool:
    platform = get_platform()
    if platform.get_world_size() > 1:
        return True
    try:
        platform.get_backend()
    except (RuntimeError, ValueError):
        return False
    return True


def _join_world() -> None:
    if not _has_world():
        get_platform().init_process_group()
    get_platform().world_generation()  # forgets what is known of a world that was left without our knowledge
