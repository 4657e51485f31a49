"""The norms of tensors that are spread over ranks: one number per tensor, completed with one reduction for all tensors
that are spread alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.dtensor.comm_recorder import attributed
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.shard_sizes import finish_checks
from hyper_parallel.platform import get_platform

_platform = get_platform()


def global_norms(tensors: Sequence[Any], order: float, dtype: Any = None) -> list[Any]:
    """The norm of each tensor, distributed or plain, as plain tensors without dims that are equal on all its ranks.

    A tensor's part counts once, whatever the number of ranks that hold it; pending reductions are done first. Plain
    tensors are taken as they are.
    """
    reduced = [
        tensor.reduce_partial() if isinstance(tensor, DTensor) and tensor._layout.has_partial else tensor
        for tensor in tensors
    ]
    blocks = [_platform.detached(tensor) for tensor in reduced]
    norms = _platform.block_norms(blocks, order, dtype)
    spread: dict[tuple[Any, tuple[int, ...]], list[int]] = {}
    for position, tensor in enumerate(reduced):
        if isinstance(tensor, DTensor):
            mesh = tensor.device_mesh
            axes = tuple(sorted(axis for axes in tensor._layout.shard_axes for axis in axes if mesh.shape[axis] > 1))
            if axes and mesh.get_coordinate() is not None:
                spread.setdefault((mesh, axes), []).append(position)
    if spread:
        finish_checks()
    for (mesh, axes), positions in spread.items():
        parts = [_norm_of_part(norms[position], blocks[position], order) for position in positions]
        completed = attributed("norm of gradients", _platform.complete_norms, parts, order, mesh.get_group(axes))
        for position, norm in zip(positions, completed, strict=True):
            norms[position] = norm
    return [_platform.finished_norm(norm, block, dtype) for norm, block in zip(norms, blocks, strict=True)]


def _norm_of_part(norm: Any, block: Any, order: float) -> Any:
    """A block without elements changes nothing: for negative orders, where the smallest elements count, as infinity."""
    is_empty = 0 in tuple(block.shape)
    return _platform.full_like(norm, float("inf")) if is_empty and order < 0 else norm


_platform.set_global_norms(global_norms)
