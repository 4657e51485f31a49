"""The experts of a run: which modules have them, and how they are laid out over the ranks."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.placement_types import Replicate, Shard
from hyper_parallel.core.expert_parallel.module_experts import is_module_of_experts, use_operator
from hyper_parallel.core.fully_shard.data_axes import DataAxes
from hyper_parallel.core.modules.module_parameters import distribute_parameter
from hyper_parallel.parallel.meshes import Meshes
from hyper_parallel.plans.layers import is_below
from hyper_parallel.plans.structure import structure_of
from hyper_parallel.platform import get_platform

__all__ = ["ExpertShards", "find_experts", "shard_experts"]

_platform = get_platform()


def find_experts(model: Any, ep: int) -> dict[str, Any]:
    """The modules of experts, by path; an error if there are none, or some that the operator does not know."""
    modules = dict(_platform.get_cells_and_names(model))
    found = {path: module for path, module in modules.items() if is_module_of_experts(module)}
    around = [path.rpartition(".")[0] for path in modules if path.endswith(".experts")]
    others = [
        path
        for path in dict.fromkeys((*structure_of(model).mixtures, *around))
        if path not in found and not any(is_below(one, path) for one in found)
    ]
    if others:
        kinds = ", ".join(sorted({type(modules[path]).__name__ for path in others}))
        raise ValueError(
            f"parallelize: ep={ep}: the experts of {others[0]!r} ({kinds}) are computed by code of their own, which "
            "knows no sharding by expert; leave ep at 1, and every rank of a line of tp and cp computes all of them"
        )
    if not found:
        raise ValueError(f"parallelize: ep={ep}: {type(model).__name__} has no experts; leave ep at 1")
    return found


def shard_experts(found: dict[str, Any], meshes: Meshes) -> None:
    """Experts by blocks over the expert axes; whole on the other axes on which they meet tokens."""
    mesh = meshes.expert_compute
    placements = tuple(Shard(0) if name in meshes.expert_axes else Replicate() for name in mesh.mesh_dim_names or ())
    for path, module in found.items():
        for name in _platform.own_parameters(module):
            distribute_parameter(module, name, mesh, placements, None, f"the experts {path!r}")
        use_operator(module)


class ExpertShards:
    """For fully_shard: experts are sharded further over the data axes that are left to them."""

    def __init__(self, meshes: Meshes) -> None:
        names = [name for name in meshes.expert_data.mesh_dim_names or () if name in meshes.parameter_axes]
        self._axes = DataAxes(meshes.expert_data, names, "parallelize", meshes.expert_compute)
        self._num_blocks = meshes.expert_compute.size(meshes.expert_axes)
        self._data = frozenset(meshes.data.mesh_dim_names or ())

    def __call__(self, parameter: Any) -> Any:
        if not isinstance(parameter, DTensor):
            return None
        layout = parameter._layout
        labels = {str(layout.mesh.axis_label(axis)) for axes in layout.shard_axes for axis in axes}
        if not labels & self._data:
            return None
        is_even = int(parameter.shape[0]) % (self._num_blocks * self._axes.num_shards) == 0
        return Shard(0 if is_even else 1), self._axes
