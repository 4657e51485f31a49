"""The mesh of a run and its views: who shares a batch, a sequence, parameters, a layer.

Note [One mesh]
---------------
A run has one mesh, with all axes in the order of ``AXES``, also those of size 1, so that a layout means the same for
every run and a checkpoint needs no other knowledge. The views are sub-meshes of it:

* ``batch``: (dp_replicate, dp_shard): each line gets its own samples;
* ``loss``: ``batch`` and cp: whoever has its own tokens, so the ranks over which counts and losses are summed;
* ``data``: (dp_replicate, dp_shard, cp): fully_shard replicates over the first and shards over the others;
* ``compute``: (cp, tp): the ranks that work on the same samples, on which activations are distributed tensors.
"""

from __future__ import annotations

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

    @cached_property
    def batch(self) -> DeviceMesh:
        return self.world["dp_replicate", "dp_shard"]

    @cached_property
    def loss(self) -> DeviceMesh:
        return self.world["dp_replicate", "dp_shard", "cp"]

    @property
    def data(self) -> DeviceMesh:
        return self.loss

    @cached_property
    def compute(self) -> DeviceMesh:
        return self.world["cp", "tp"]

    def batch_place(self) -> tuple[int, int]:
        """Which part of the batch is this rank's, and of how many."""
        return self.batch.get_local_rank((0, 1)), self.batch.size()


def make_meshes(degrees: Degrees, mesh: DeviceMesh | None = None) -> tuple[Degrees, Meshes]:
    """The degrees with a number for each axis and their mesh: that of the world, which is joined, or the given one.

    A given mesh has axes of the names of ``AXES``, in their order; those that it lacks have size 1.
    """
    if mesh is None:
        if current_member() is None:
            join()
        fitted = degrees.fit(get_platform().get_world_size())
        shape = tuple(fitted.sizes.values())
        return fitted, Meshes(init_device_mesh(_device_type(), shape, mesh_dim_names=AXES))
    names = mesh.mesh_dim_names
    if names is None or [name for name in AXES if name in names] != list(names):
        raise ValueError(
            f"{mesh}: the axes of a mesh for parallelize are {', '.join(AXES)}, some of them, in this order"
        )
    sizes = {name: mesh.size(name) if name in names else 1 for name in AXES}
    fitted = degrees.fit(mesh.size())
    if fitted.sizes != sizes:
        raise ValueError(f"{mesh} is not what the degrees {fitted} say; give one of the two")
    return fitted, Meshes(DeviceMesh(mesh.device_type, mesh.mesh.reshape(tuple(sizes.values())), AXES))


def _device_type() -> str:
    return str(get_platform().get_device_type())
