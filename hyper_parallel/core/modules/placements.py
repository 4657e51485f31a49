"""How styles spell layouts: one placement for every axis of the mesh, or one for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.placement_types import Placement

# One placement, meant for every mesh axis, or a sequence with one per axis.
Placements = Placement | Sequence[Placement]


def check_placements(value: Any, where: str) -> Any:
    """``value`` if it spells a layout, one placement or a sequence of them; else a TypeError that names ``where``."""
    if isinstance(value, Placement):
        return value
    if isinstance(value, (tuple, list)) and value and all(isinstance(item, Placement) for item in value):
        return tuple(value)
    raise TypeError(
        f"{where}: {value!r} is no layout; give Shard(dim), Replicate() or Partial(), or a tuple with one per mesh axis"
    )


def per_axis(placements: Placements, mesh: DeviceMesh) -> tuple[Placement, ...]:
    """One placement for each axis of ``mesh``."""
    if isinstance(placements, Placement):
        return (placements,) * mesh.ndim
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"{len(placements)} placements {list(placements)} for the {mesh.ndim} axes of {mesh}: give one per axis, "
            "or a single one that is meant for all of them"
        )
    return tuple(placements)
