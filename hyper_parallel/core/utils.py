"""Small questions about where data lies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.mesh_transfer import outside_shape


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int], device_mesh: DeviceMesh, placements: Any, rank: int | None = None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and global offset of the block that ``rank`` (this one when None) holds; zeros for a rank outside the mesh.

    >>> from hyper_parallel import Shard, init_device_mesh
    >>> mesh = init_device_mesh("cpu", (2,), init_backend=False)
    >>> compute_local_shape_and_global_offset((5, 3), mesh, [Shard(0)], rank=1)
    ((2, 3), (3, 0))
    """
    shape = tuple(int(size) for size in global_shape)
    layout = Layout.resolve(device_mesh, placements, len(shape))
    holder = device_mesh.get_rank() if rank is None else rank
    if holder not in device_mesh.rank_list:
        return outside_shape(shape), (0,) * len(shape)
    region = layout.local_region(shape, device_mesh.coordinate_of(holder))
    return region.sizes, region.offsets
