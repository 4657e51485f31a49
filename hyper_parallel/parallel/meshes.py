"""The mesh of a run and its views: who shares a batch, a sequence, parameters, a layer.

Note [One mesh]
---------------
A run has one mesh, with all axes in the order of ``AXES``, also those of size 1, so that a layout means the same for
every run and a checkpoint needs no other knowledge. The views are sub-meshes of it:

* ``batch``: (dp_replicate, dp_shard): each line gets its own samples;
* ``loss``: ``batch`` and cp: whoever has its own tokens, so the ranks over which counts and losses are summed;
* ``data``: (dp_replicate, dp_shard, cp): fully_shard replicates over the first and shards over the others;
* ``compute``: (cp, tp): the ranks that work on the same samples, on which activations are distributed tensors.

Note [Where experts lie]
------------------------
Experts are sharded by expert over ``ep`` ranks: neighbours along dp_shard, which is then two axes of the mesh, edp and
ep; where ep says so, over all of tp, cp or both too. To the experts these axes are model axes: on each rank along them
there are other experts, to which tokens travel, so gradients of experts are summed over the data axes that are left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh, init_device_mesh
from hyper_parallel.launch.join import join
from hyper_parallel.parallel.degrees import AXES, Degrees
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.membership import current_member

__all__ = ["Meshes", "make_meshes"]


@dataclass(frozen=True)
class Meshes:
    """The mesh of a run; see Note [One mesh]."""

    world: DeviceMesh
    expert_axes: tuple[str, ...] = ()  # over which experts are sharded, outermost first

    def _view(self, *names: str) -> DeviceMesh:
        return self.world[names]

    @cached_property
    def dp_shard(self) -> tuple[str, ...]:
        """The axes of the mesh that are dp_shard; see Note [Where experts lie]."""
        return ("edp", "ep") if "ep" in (self.world.mesh_dim_names or ()) else ("dp_shard",)

    @property
    def parameter_axes(self) -> tuple[str, ...]:
        """Over which dense parameters are sharded."""
        return (*self.dp_shard, "cp")

    @cached_property
    def batch(self) -> DeviceMesh:
        return self._view("dp_replicate", *self.dp_shard)

    @cached_property
    def loss(self) -> DeviceMesh:
        return self._view("dp_replicate", *self.parameter_axes)

    @property
    def data(self) -> DeviceMesh:
        return self.loss

    @cached_property
    def compute(self) -> DeviceMesh:
        return self.world["cp", "tp"]

    @cached_property
    def expert_data(self) -> DeviceMesh:
        """The data axes of experts."""
        return self.world[tuple(name for name in self.data.mesh_dim_names or () if name not in self.expert_axes)]

    @cached_property
    def expert_compute(self) -> DeviceMesh:
        """The axes on which experts and their tokens meet."""
        return self.world["ep", "cp", "tp"] if "ep" in self.expert_axes else self.compute

    def batch_place(self) -> tuple[int, int]:
        """Which part of the batch is this rank's, and of how many."""
        return self.batch.get_local_rank(tuple(range(self.batch.ndim))), self.batch.size()


def make_meshes(degrees: Degrees, mesh: DeviceMesh | None = None) -> tuple[Degrees, Meshes]:
    """The degrees with a number for each axis and their mesh: that of the world, which is joined, or the given one.

    A given mesh has axes of the names of ``AXES``, in their order; those that it lacks have size 1.
    """
    if mesh is None:
        if current_member() is None:
            join()
        fitted = degrees.fit(get_platform().get_world_size())
        sizes, expert_axes = _split(fitted)
        made = init_device_mesh(_device_type(), tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        return fitted, Meshes(made, expert_axes)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"parallelize: mesh is a DeviceMesh with the axes {', '.join(AXES)}, or some, got {mesh!r}")
    names = mesh.mesh_dim_names
    if names is None or [name for name in AXES if name in names] != list(names):
        raise ValueError(
            f"{mesh}: the axes of a mesh for parallelize are {', '.join(AXES)}, some of them, in this order"
        )
    sizes = {name: mesh.size(name) if name in names else 1 for name in AXES}
    fitted = degrees.fit(mesh.size())
    if fitted.sizes != sizes:
        raise ValueError(f"{mesh} is not what the degrees {fitted} say; give one of the two")
    sizes, expert_axes = _split(fitted)
    return fitted, Meshes(
        DeviceMesh(mesh.device_type, mesh.mesh.reshape(tuple(sizes.values())), tuple(sizes)), expert_axes
    )


def _split(degrees: Degrees) -> tuple[dict[str, int], tuple[str, ...]]:
    """The axes of the mesh with their sizes, and those over which experts are sharded; see Note [Where experts lie].

    >>> _split(Degrees(dp_shard=4, tp=2, ep=2))[1], _split(Degrees(dp_shard=2, tp=2, ep=4))[1]
    (('ep',), ('ep', 'tp'))
    """
    sizes, ep = degrees.sizes, int(degrees.ep)
    if ep == 1:
        return sizes, ()
    for others in ((), ("tp",), ("cp",), ("cp", "tp")):
        away = math.prod(sizes[name] for name in others)
        if ep % away or sizes["dp_shard"] % (ep // away) or any(sizes[name] == 1 for name in others):
            continue
        inner = ep // away
        if inner == 1:
            return sizes, others
        cut = {"edp": sizes["dp_shard"] // inner, "ep": inner}
        made = {
            new: size for name in sizes for new, size in (cut if name == "dp_shard" else {name: sizes[name]}).items()
        }
        return made, ("ep", *others)
    raise ValueError(
        f"degrees {degrees}: ep={ep} must divide dp_shard={sizes['dp_shard']}, or be such a divisor times "
        f"tp={sizes['tp']}, cp={sizes['cp']} or both: experts lie on neighbours along dp_shard, and on all of tp or cp"
    )


def _device_type() -> str:
    return str(get_platform().get_device_type())
