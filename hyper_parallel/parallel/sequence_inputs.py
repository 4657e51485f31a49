"""Inputs whose sequence dim is sharded over the axis cp.

Every rank of a line along cp and tp has the same samples. What has a sequence dim, ids, labels, positions and masks of
(samples, sequence), becomes a distributed tensor that is sharded there; the model's code sees global shapes, so
positions, shifted labels and masks that it makes come out as on one device. Other tensors stay as they are, and are the
same on all these ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.distribute import distribute_tensor
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.placement_types import Replicate, Shard
from hyper_parallel.platform import get_platform

__all__ = ["shard_sequences"]

_platform = get_platform()
_SEQUENCE_DIM = 1


def shard_sequences(batch: Mapping[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    """The batch with what is (samples, sequence, ...) sharded on the sequence over the axis cp of ``mesh``."""
    shape = _shape_of_sequences(batch)
    if shape is None or mesh.size("cp") == 1:
        return dict(batch)
    placements = [Shard(_SEQUENCE_DIM) if name == "cp" else Replicate() for name in mesh.mesh_dim_names or ()]
    return {
        name: distribute_tensor(value, mesh, placements) if _is_sequence(value, shape) else value
        for name, value in batch.items()
    }


def _shape_of_sequences(batch: Mapping[str, Any]) -> tuple[int, int] | None:
    """(samples, sequence): that of token ids, or of the first tensor with two dims or more."""
    ordered = sorted(batch.items(), key=lambda item: item[0] not in ("input_ids", "inputs_embeds", "ids"))
    for _, value in ordered:
        if _platform.is_tensor(value) and value.ndim > _SEQUENCE_DIM:
            return int(value.shape[0]), int(value.shape[_SEQUENCE_DIM])
    return None


def _is_sequence(value: Any, shape: tuple[int, int]) -> bool:
    if not _platform.is_tensor(value) or isinstance(value, DTensor) or value.ndim <= _SEQUENCE_DIM:
        return False
    return tuple(value.shape[:2]) == shape
