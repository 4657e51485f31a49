"""What crosses from a stage to the next, described so that the other side can make room for it.

Meshes of two stages are different ranks, so a layout travels as names of axes: the receiver binds them to its own mesh,
and sizes of blocks follow from the one rule of shards. Each rank of a stage sends its block to its peer in the next.
The layout of the gradient follows by the law, so nothing is described on the way back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.platform import get_platform

__all__ = ["TensorSpec", "describe", "described", "distributed", "empty_block", "without_graph", "without_partial_sums"]

_platform = get_platform()


@dataclass(frozen=True)
class TensorSpec:
    """Global shape, dtype, whether a gradient comes back; of a distributed tensor the axes of its mesh by name, and
    for each dim those that shard it."""

    shape: tuple[int, ...]
    dtype: str
    needs_grad: bool
    mesh_axes: tuple[str, ...] | None = None
    shard_axes: tuple[tuple[str, ...], ...] = ()

    def __str__(self) -> str:
        over = [f"dim {dim} over {' x '.join(axes)}" for dim, axes in enumerate(self.shard_axes) if axes]
        return f"{self.dtype} {list(self.shape)}" + (f" sharded on {', '.join(over)}" if over else "")


def without_partial_sums(tensor: Any) -> Any:
    """A distributed tensor with pending sums reduced: a sum over ranks of a stage is not to be sent in parts."""
    if isinstance(tensor, DTensor) and tensor._layout.has_partial:
        return tensor.redistribute(tensor.device_mesh, tensor._layout.reduced())
    return tensor


def without_graph(tensor: Any) -> Any:
    """The values alone, distributed as they are: the graph is held by its root."""
    plain = _platform.detached(tensor)
    if not isinstance(tensor, DTensor):
        return plain
    return _platform.as_dtensor(DTensor, plain, tensor._layout, tuple(tensor.shape))


def describe(tensor: Any) -> TensorSpec:
    """What the receiver needs to know of a tensor."""
    dtype, needs_grad = _platform.dtype_name(tensor.dtype), bool(_platform.needs_grad(tensor))
    if not isinstance(tensor, DTensor):
        return TensorSpec(tuple(tensor.shape), dtype, needs_grad)
    layout = tensor._layout
    label = layout.mesh.axis_label
    shard_axes = tuple(tuple(str(label(axis)) for axis in axes) for axes in layout.shard_axes)
    return TensorSpec(tuple(tensor.shape), dtype, needs_grad, _axes_of(layout.mesh), shard_axes)


def _axes_of(mesh: DeviceMesh) -> tuple[str, ...]:
    return tuple(str(mesh.axis_label(axis)) for axis in range(mesh.ndim))


def layout_of(spec: TensorSpec, mesh: DeviceMesh | None) -> Layout | None:
    """The layout on this stage's mesh; None for a plain tensor."""
    if spec.mesh_axes is None:
        return None
    own = () if mesh is None else _axes_of(mesh)
    if mesh is None or not set(spec.mesh_axes) <= set(own):
        raise RuntimeError(
            f"a stage receives a tensor that is distributed over the axes {', '.join(spec.mesh_axes)}, and its own "
            f"mesh has {', '.join(own) or 'none'}; stages need meshes with axes of the same names"
        )
    bound = mesh if own == spec.mesh_axes else mesh[spec.mesh_axes]
    places = {name: place for place, name in enumerate(spec.mesh_axes)}
    return Layout.of(bound, [[places[name] for name in axes] for axes in spec.shard_axes])


def empty_block(spec: TensorSpec, mesh: DeviceMesh | None, device: Any) -> Any:
    """Memory for this rank's block, to be received into."""
    layout = layout_of(spec, mesh)
    shape = spec.shape if layout is None else layout.local_shape(spec.shape)
    return _platform.new_tensor(tuple(shape), _platform.str_to_dtype(spec.dtype), device)


def distributed(block: Any, spec: TensorSpec, mesh: DeviceMesh | None) -> Any:
    """A block as the tensor that it is a part of."""
    layout = layout_of(spec, mesh)
    return block if layout is None else _platform.as_dtensor(DTensor, block, layout, spec.shape)


def described(specs: Sequence[TensorSpec]) -> str:
    """For messages."""
    return "; ".join(map(str, specs)) or "nothing"
