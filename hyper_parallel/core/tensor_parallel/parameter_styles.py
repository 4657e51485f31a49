"""Styles that lay out a module's own parameters and leave its computation alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.placement_types import Placement, Replicate, Shard
from hyper_parallel.core.modules.module_parameters import distribute_parameter, split_parameter
from hyper_parallel.core.modules.placements import per_axis
from hyper_parallel.core.tensor_parallel.style_base import ParallelStyle
from hyper_parallel.platform import get_platform

_platform = get_platform()


class ReplicateParameters(ParallelStyle):
    """The module's own parameters, or those with these ``names``, are whole on every rank; it computes on whatever part
    of the activations comes.

    forward: nothing; backward: one all-reduce of a parameter's gradient where the activations are cut.
    """

    def __init__(self, names: Iterable[str] | None = None) -> None:
        self.names = None if names is None else tuple(names)

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        where = f"ReplicateParameters on {type(module).__name__}"
        for name in _platform.own_parameters(module) if self.names is None else self.names:
            distribute_parameter(
                module, name, device_mesh, (Replicate(),) * device_mesh.ndim, self.src_data_rank, where
            )
        return module

    def __repr__(self) -> str:
        return "ReplicateParameters()" if self.names is None else f"ReplicateParameters({list(self.names)})"


class ShardParameters(ParallelStyle):
    """The module's own parameters lie as ``layouts`` says by name; others are whole.

    For modules that use each other's weights without calling each other, as ``nn.MultiheadAttention`` does.
    """

    def __init__(self, layouts: Mapping[str, Placement]) -> None:
        self.layouts = dict(layouts)

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        where = f"ShardParameters on {type(module).__name__}"
        for name in _platform.own_parameters(module):
            placements = per_axis(self.layouts.get(name, Replicate()), device_mesh)
            distribute_parameter(module, name, device_mesh, placements, self.src_data_rank, where)
        return module

    def __repr__(self) -> str:
        return f"ShardParameters({self.layouts!r})"


class ShardAttention(ParallelStyle):
    """The framework's own attention module, cut by heads: its one weight for query, key and value becomes three.

    Biases are whole. Like a module of PyTorch's with keys of another width it then has ``q_proj_weight``,
    ``k_proj_weight`` and ``v_proj_weight``.
    forward: nothing; backward: one all-reduce of the gradient of each input, one gather of that of each bias.
    """

    def apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        where = f"ShardAttention on {type(module).__name__}"
        packed = _platform.own_parameters(module).get("in_proj_weight")
        cut = per_axis(Shard(0), device_mesh)
        names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
        if packed is not None and not _platform.has_no_memory(packed):
            parts = dict.fromkeys(names, (packed.shape[0] // 3, cut))
            split_parameter(module, "in_proj_weight", 0, parts, device_mesh, self.src_data_rank, where)
            _platform.use_separate_projections(module)
        rest = ShardParameters(dict.fromkeys((*names, "in_proj_weight"), Shard(0)))
        rest.src_data_rank = self.src_data_rank
        return rest.apply(module, device_mesh)
