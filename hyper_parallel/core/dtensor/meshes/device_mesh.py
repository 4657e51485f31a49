"""Device meshes: ranks arranged on named axes, the process groups over their lines, and meshes cut out of meshes.

Where ranks lie is the arithmetic of :mod:`rank_grid`, how meshes are cut is in :mod:`submeshes`.

A mesh is a description: building one, cutting sub-meshes out of it, comparing or pickling it never communicates. A
group is made when :meth:`DeviceMesh.get_group` first asks for it, and shared by all meshes with that line of ranks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.meshes import submeshes
from hyper_parallel.core.dtensor.meshes.mesh_context import enter_mesh, leave_mesh
from hyper_parallel.core.dtensor.meshes.mesh_description import (
    Ranks,
    check_device_type,
    describe,
    fitting_shapes,
    names_text,
    parse_names,
    parse_ranks,
    parse_shape,
)
from hyper_parallel.core.dtensor.meshes.rank_grid import Axes, Axis, RankGrid
from hyper_parallel.platform import EXISTING_COMM_GROUPS, get_platform
from hyper_parallel.platform.shared.membership import current_member


class DeviceMesh(RankGrid):
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
    _parent_root: DeviceMesh | None  # None: this is a root
    _blocks: Ranks  # see mesh_families.py
    _flattened: dict[str, Ranks]  # of a root: the families of the flattened axes, by name
    _member: int | None  # the member that built it, see Note [Members] in platform/shared/membership.py
    _hash: int
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
        self._fill_grid(ranks, names, rank)
        member = current_member()
        generation = None if member is None else member.generation
        vars(self).update(
            _device_type=device_type,
            _parent_root=root,
            _blocks=blocks,
            _flattened={},
            _member=generation,
            _hash=hash((device_type, self._shape, names, self._rank_list, rank, generation)),
            _submeshes={},
        )

    # ---------------------------------------------------------------- what the mesh is

    @property
    def device_type(self) -> str:
        return self._device_type

    @property
    def root(self) -> DeviceMesh:
        """The mesh that this one was cut out of; a mesh built directly is its own root."""
        return self if self._parent_root is None else self._parent_root

    def _hint_of_missing(self, axis: str) -> str:
        return f'; it is a flattened axis, use mesh.root["{axis}"]' if axis in self.root._flattened else ""

    # ---------------------------------------------------------------- process groups

    def get_group(self, axis: Axes | None = None) -> Any:
        """The process group of this rank's line along an axis, or along several axes together.

        Made at the first use, by its members only and in any order among groups; the same ranks are always the same
        group, whichever mesh asks.
        """
        line = self.line(self._only_axis("get_group") if axis is None else axis)
        platform = get_platform()
        member = current_member()
        if self._member != (None if member is None else member.generation):
            raise RuntimeError(
                f"{self} was built by another rank of this process, or outside of its ranks, and is used on rank "
                f"{platform.get_rank()}; build the mesh in the function that runs on the ranks"
            )
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
        return submeshes.submesh(self, names)

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
        return submeshes.flatten(self, name)

    def unflatten(self, axis: Axis, sizes: Sequence[int], names: Sequence[str] | None = None) -> DeviceMesh:
        """The same ranks with one axis split into several.

        >>> mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"), init_backend=False)
        >>> mesh.unflatten("dp", (2, 2), ("replicate", "shard"))
        DeviceMesh('cpu', (replicate=2, shard=2, tp=2), ranks=[[[0, 1], [2, 3]], [[4, 5], [6, 7]]])
        """
        return submeshes.unflatten(self, axis, sizes, names)

    @staticmethod
    def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
        """One mesh with the axes of several sub-meshes of one root, in the order given.

        >>> mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"), init_backend=False)
        >>> DeviceMesh.concatenate([mesh["tp"], mesh["dp"]]) == mesh["tp", "dp"]
        True
        """
        return submeshes.concatenate(meshes)

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
            and self._member == other._member
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
