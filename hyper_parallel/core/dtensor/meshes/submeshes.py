"""Meshes out of meshes: sub-meshes by the names of axes, axes made one or split, and sub-meshes put together.

The methods of :class:`DeviceMesh` of these names; each picks a family of blocks (:mod:`mesh_families`) and takes the
mesh of it that lies around this rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from hyper_parallel.core.dtensor.meshes.mesh_description import Ranks, parse_names, parse_shape
from hyper_parallel.core.dtensor.meshes.mesh_families import block_positions, join_families, same_family
from hyper_parallel.core.dtensor.meshes.rank_grid import Axis, RankGrid

if TYPE_CHECKING:
    from hyper_parallel.core.dtensor.meshes.device_mesh import DeviceMesh


def submesh(mesh: DeviceMesh, names: str | Sequence[str]) -> DeviceMesh:
    """``mesh[names]``."""
    asked = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, Iterable) else (names,)
    key = (asked, mesh.get_rank())
    found = mesh._submeshes.get(key)
    if found is None:
        if not asked or not all(isinstance(name, str) for name in asked):
            raise TypeError(f'mesh[...] takes axis names, as in mesh["tp"] or mesh["dp", "tp"], not {names!r}: {mesh}')
        if mesh._names is None:
            raise ValueError(f"{mesh} has no axis names, so {asked} cannot be taken out of it; give mesh_dim_names")
        if len(set(asked)) < len(asked):
            raise ValueError(f"{asked} names an axis of {mesh} twice")
        blocks = _axis_family(mesh, asked[0])
        for name in asked[1:]:
            joined = join_families(blocks, _axis_family(mesh, name))
            if joined is None:
                raise ValueError(f"axis {name!r} is not independent of {asked[: asked.index(name)]} in {mesh}")
            blocks = joined
        found = mesh._submeshes[key] = mesh._derive(blocks, asked)
    return found


def _axis_family(mesh: DeviceMesh, name: str) -> Ranks:
    """The lines along an axis of this mesh, or along a flattened one that its root knows."""
    flattened = mesh.root._flattened
    if name in flattened and name not in (mesh._names or ()):
        blocks = flattened[name]
        owner = block_positions(mesh._blocks)[0]
        if (owner[blocks] == owner[blocks[:, :1]]).all():
            return blocks
    index = mesh.axis_index(name)
    return np.moveaxis(mesh._blocks, index + 1, -1).reshape(-1, mesh._shape[index])


def flatten(mesh: DeviceMesh, name: str | None) -> DeviceMesh:
    """``mesh.flatten(name)``."""
    if name is None and mesh._names is not None:
        name = "_".join(mesh._names)
    if mesh.ndim == 1 and (name is None or mesh._names == (name,)):
        return mesh
    blocks = mesh._blocks.reshape(len(mesh._blocks), -1)
    if name is None:
        return mesh._derive(blocks, None)
    root = mesh.root
    parse_names(mesh._device_type, mesh._mesh.ravel(), (name,))
    known = _axis_family(root, name) if name in (root._names or ()) else root._flattened.setdefault(name, blocks)
    if not same_family(known, blocks):
        raise ValueError(f"{mesh} cannot be flattened as {name!r}: {root} has another axis of that name; give another")
    return root[name]


def unflatten(mesh: DeviceMesh, axis: Axis, sizes: Sequence[int], names: Sequence[str] | None) -> DeviceMesh:
    """``mesh.unflatten(axis, sizes, names)``."""
    index = mesh.axis_index(axis)
    new_sizes = parse_shape(sizes, f"unflatten of {mesh}")
    if math.prod(new_sizes) != mesh._shape[index]:
        raise ValueError(f"axis {axis!r} of {mesh} has {mesh._shape[index]} ranks and cannot be split into {new_sizes}")
    if (names is None) != (mesh._names is None) or (names is not None and len(names) != len(new_sizes)):
        raise ValueError(
            f"axis {axis!r} of {mesh} split into {new_sizes} takes "
            f"{'no names' if mesh._names is None else f'{len(new_sizes)} names'}, not {names!r}"
        )
    shape = mesh._shape[:index] + new_sizes + mesh._shape[index + 1 :]
    new_names = None
    if mesh._names is not None and names is not None:
        new_names = mesh._names[:index] + tuple(names) + mesh._names[index + 1 :]
    new_names = parse_names(mesh._device_type, mesh._mesh.reshape(shape), new_names)
    return mesh._derive(mesh._blocks.reshape(-1, *shape), new_names)


def concatenate(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """``DeviceMesh.concatenate(meshes)``."""
    meshes = list(meshes)
    if not meshes:
        raise ValueError("concatenate needs at least one mesh")
    strangers = [mesh for mesh in meshes if not isinstance(mesh, RankGrid)]
    if strangers:
        raise TypeError(f"concatenate takes meshes, as in [mesh['tp'], mesh['dp']], not {strangers[0]!r}")
    first = meshes[0]
    names, blocks = first._names, first._blocks
    for mesh in meshes[1:]:
        if mesh.root != first.root:
            raise ValueError(
                f"concatenate joins sub-meshes of one root; {first} was taken out of {first.root}, "
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
            raise ValueError(f"{mesh} is not around the same rank as {first}, so concatenate cannot join them")
    return result
