"""The axes of a mesh over which parameters are sharded or replicated, and where a parameter lies on them.

A mesh of one axis shards. Of two or more the first replicates and the others shard (hybrid); ``shard_axes`` says it
otherwise. What tensor parallelism has cut stays cut: the shard axes cut what is left, last.

Note [Axes that shard and compute]
Activations may be distributed over an axis that shards parameters too: under context parallelism each rank has its part
of the sequence, and its part of every parameter. ``compute_mesh`` names the mesh of the activations. A parameter is
then a distributed tensor on it while its module runs, replicated on the axes that it shares with the data mesh, and its
gradient stays a partial sum there, which the unit reduces with the others.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.later_reduction import reduced_later
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh_axes import axes_within, widened
from hyper_parallel.platform.shared.region import Region


class DataAxes:
    """A mesh of data axes: those that shard, in the order of cutting, and those that replicate."""

    def __init__(
        self,
        mesh: DeviceMesh,
        shard_axes: Sequence[Any] | None,
        where: str,
        compute_mesh: DeviceMesh | None = None,
    ) -> None:
        if shard_axes is None:
            shard_axes = (0,) if mesh.ndim == 1 else range(1, mesh.ndim)
        self.mesh = mesh
        self.shard_axes = tuple(mesh.axis_index(axis) for axis in shard_axes)
        if len(set(self.shard_axes)) < len(self.shard_axes):
            raise ValueError(f"{where}: shard_axes {tuple(shard_axes)} names an axis of {mesh} twice")
        self.replicate_axes = tuple(axis for axis in range(mesh.ndim) if axis not in self.shard_axes)
        if mesh.get_coordinate() is None:
            raise ValueError(
                f"{where}: rank {mesh.get_rank()} is not part of {mesh}; call it on the ranks of the mesh only"
            )
        #: See Note [Axes that shard and compute], and the mesh of both, on which parameters lie between steps.
        self.compute_mesh = compute_mesh
        self.joint_mesh = mesh if compute_mesh is None else _union(mesh, compute_mesh, where)
        self._shard_group: Any = None
        self._replicate_group: Any = None
        self.num_shards = mesh.size(self.shard_axes) if self.shard_axes else 1
        self.num_replicas = mesh.size(self.replicate_axes) if self.replicate_axes else 1

    @property
    def num_ranks(self) -> int:
        """Over how many ranks gradients are added up."""
        return self.num_shards * self.num_replicas

    @property
    def shard_group(self) -> Any:
        if self._shard_group is None:
            self._shard_group = self.mesh.get_group(self.shard_axes)
        return self._shard_group

    @property
    def replicate_group(self) -> Any:
        if self._replicate_group is None:
            self._replicate_group = self.mesh.get_group(self.replicate_axes)
        return self._replicate_group

    def forget_groups(self) -> None:
        """Ask the mesh for groups again: a program may have left its world and joined another."""
        self._shard_group = self._replicate_group = None

    def check_inner(self, num_ranks: int, where: str) -> None:
        """Raise unless the ranks that shard can be divided into groups of ``num_ranks`` neighbours."""
        if self.num_shards % num_ranks or len(self.shard_axes) != 1:
            raise ValueError(
                f"{where}: reshard_after_forward={num_ranks} does not divide the {self.num_shards} ranks that shard "
                f"({self}), or these are several axes; give a divisor, on a mesh with one axis that shards"
            )

    def inner_group(self, num_ranks: int) -> Any:
        """The group of ``num_ranks`` neighbours on the shard axis that this rank is one of."""
        axis = self.shard_axes[0]
        names = None if self.mesh.mesh_dim_names is None else ("hosts", "neighbours")
        split = self.mesh.unflatten(axis, (self.num_shards // num_ranks, num_ranks), names)
        return split.get_group(axis + 1)

    def key(self) -> tuple[Any, ...]:
        """Equal for meshes over whose axes the same parameters can be gathered in one piece."""
        return (self.mesh, self.shard_axes)

    @property
    def shared_axes(self) -> tuple[str, ...]:
        """The names of the data axes on which activations are distributed."""
        names = () if self.compute_mesh is None else self.compute_mesh.mesh_dim_names or ()
        return tuple(name for name in names if name in (self.mesh.mesh_dim_names or ()))

    def __repr__(self) -> str:
        def named(axes: Sequence[int]) -> str:
            return ", ".join(f"{self.mesh.axis_label(axis)}={self.mesh.shape[axis]}" for axis in axes)

        replicate = f", replicate over {named(self.replicate_axes)}" if self.replicate_axes else ""
        return f"shard over {named(self.shard_axes) or 'nothing'}{replicate}"


class ParameterLayouts:
    """Where one parameter lies: between steps, and while its module runs."""

    #: Between steps: the cuts that it came with, then the shard axes on ``dim``.
    between: Layout
    #: While its module runs: on the model axes only; None for a plain tensor.
    inside: Layout | None
    #: The part of the global tensor that this rank has while the module runs.
    whole: Region
    #: For each rank of the shard group, in the group's order, its part of that.
    boxes: list[Region]

    def __init__(self, axes: DataAxes, parameter: Any, dim: int | None, where: str) -> None:
        shape = tuple(parameter.shape)
        mesh, cuts, self.inside = _joined(axes, parameter, where)
        without = Layout.of(mesh, cuts)
        shard_axes = axes.shard_axes
        if mesh != axes.mesh:
            shard_axes = tuple(mesh.axis_index(axes.mesh.axis_label(axis)) for axis in shard_axes)
        if dim is not None:
            cuts[dim] += shard_axes
        self.between = Layout.of(mesh, cuts)
        self.whole = without.local_region(shape)
        self.boxes = [self.whole.inside(self.whole)] * axes.num_shards
        if dim is not None and axes.shard_axes:
            self.boxes = self._boxes(shape, mesh, shard_axes)

    def _boxes(self, shape: tuple[int, ...], mesh: DeviceMesh, shard_axes: tuple[int, ...]) -> list[Region]:
        mine = mesh.get_coordinate()
        assert mine is not None
        boxes: list[Any] = [None] * mesh.size(shard_axes)
        lines = itertools.product(*(range(mesh.shape[axis]) for axis in shard_axes))
        for position, place in zip(mesh.group_positions(shard_axes), lines, strict=True):
            coordinate = list(mine)
            for axis, index in zip(shard_axes, place, strict=True):
                coordinate[axis] = index
            boxes[position] = self.between.local_region(shape, coordinate).inside(self.whole)
        return boxes


def _joined(axes: DataAxes, parameter: Any, where: str) -> tuple[DeviceMesh, list[tuple[int, ...]], Layout | None]:
    """The mesh of data and model axes, the cuts of the parameter on it, and the layout on the model axes alone."""
    ndim = len(parameter.shape)
    if not isinstance(parameter, DTensor):
        return axes.joint_mesh, [()] * ndim, None
    layout = parameter._layout
    if layout.has_partial:
        raise ValueError(f"{where} has a pending reduction, {layout}; call reduce_partial() first")
    if axes.compute_mesh is not None:
        return _on_compute_mesh(axes, layout, where)
    mesh = layout.mesh
    names, data_names = mesh.mesh_dim_names, axes.mesh.mesh_dim_names
    if mesh == axes.mesh or (names and data_names and set(data_names) & set(names)):
        return _on_joint_mesh(axes, layout, where)
    if data_names is None or names is None:
        raise ValueError(
            f"{where} lies on {mesh}, and the data mesh is {axes.mesh}: give both names and cut them out of one mesh, "
            'as in mesh = init_device_mesh(..., mesh_dim_names=("dp", "tp")), mesh["dp"] and mesh["tp"]'
        )
    try:
        joint = DeviceMesh.concatenate([axes.mesh, _cut_out_of(axes.mesh.root, mesh)])
    except ValueError as error:
        raise ValueError(
            f"{where} lies on {mesh}, which does not go with the data mesh {axes.mesh}: {error}; cut both out of one "
            'mesh, as in mesh["dp"] and mesh["tp"]'
        ) from None
    offset = axes.mesh.ndim
    return joint, [tuple(axis + offset for axis in cut) for cut in layout.shard_axes], layout


def _union(mesh: DeviceMesh, compute_mesh: DeviceMesh, where: str) -> DeviceMesh:
    """The mesh of the axes of both, in the order of the mesh that they are cut out of."""
    names = {*(mesh.mesh_dim_names or ()), *(compute_mesh.mesh_dim_names or ())}
    root = mesh.root
    known = root.mesh_dim_names or ()
    if mesh.mesh_dim_names is None or compute_mesh.mesh_dim_names is None or not names <= set(known):
        raise ValueError(
            f"{where}: the data mesh {mesh} and the compute mesh {compute_mesh} must be cut out of one mesh, as in "
            'mesh["dp", "cp"] and mesh["cp", "tp"]'
        )
    return root[tuple(name for name in known if name in names)]


def _on_compute_mesh(axes: DataAxes, layout: Layout, where: str) -> tuple[DeviceMesh, list[Any], Layout]:
    """See Note [Axes that shard and compute]."""
    assert axes.compute_mesh is not None
    if axes_within(layout.mesh, axes.compute_mesh) is None:
        raise ValueError(f"{where} lies on {layout.mesh}, not on axes of the compute mesh {axes.compute_mesh}")
    inside = widened(layout, axes.compute_mesh)
    labels = [[axes.compute_mesh.axis_label(axis) for axis in cut] for cut in inside.shard_axes]
    cut_twice = [label for cut in labels for label in cut if label in axes.shared_axes]
    if cut_twice:
        raise ValueError(_cut_twice(where, layout, axes, cut_twice))
    cuts = [tuple(axes.joint_mesh.axis_index(label) for label in cut) for cut in labels]
    return axes.joint_mesh, cuts, reduced_later(inside, axes.shared_axes)


def _cut_twice(where: str, layout: Layout, axes: DataAxes, labels: list[Any]) -> str:
    return (
        f"{where} is cut over {', '.join(map(str, labels))} already ({layout}), the axes that fully_shard would "
        f"{axes}; a parameter can be fully sharded once"
    )


def _cut_out_of(root: DeviceMesh, mesh: DeviceMesh) -> DeviceMesh:
    """The mesh equal to ``mesh`` that is cut out of ``root``: layouts on equal meshes are one, whichever came first."""
    names = mesh.mesh_dim_names
    if mesh.root == root or names is None or not set(names) <= set(root.mesh_dim_names or ()):
        return mesh
    found = root[names]
    return found if found == mesh else mesh


def _on_joint_mesh(axes: DataAxes, layout: Layout, where: str) -> tuple[DeviceMesh, list[Any], Layout | None]:
    """Of a parameter that lies on the data axes too, whole there."""
    mesh, cuts = layout.mesh, layout.shard_axes
    data = [mesh.axis_index(axes.mesh.axis_label(axis)) for axis in range(axes.mesh.ndim)]
    cut_twice = [mesh.axis_label(axis) for cut in cuts for axis in cut if axis in data]
    if cut_twice:
        raise ValueError(_cut_twice(where, layout, axes, cut_twice))
    others = [axis for axis in range(mesh.ndim) if axis not in data]
    if not others:
        return mesh, list(cuts), None
    model = mesh[tuple(mesh.axis_label(axis) for axis in others)]
    inside = Layout.of(model, [tuple(others.index(axis) for axis in cut) for cut in cuts])
    return mesh, list(cuts), inside
