"""What may meet in one operator: distributed tensors of one mesh, numbers, and plain tensors without dims."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.platform import get_platform


class MixedTensorsError(RuntimeError):
    """Plain and distributed tensors meet in one operator.

    Not a TypeError: Python's operators would turn that into "unsupported operand type(s)".
    """


class PendingWriteError(RuntimeError):
    """An in-place operator would have to change how the tensor it writes into lies."""


def refuse_plain(name: str, value: Any) -> None:
    """Raise if ``value`` is a plain tensor with dims."""
    if get_platform().is_tensor(value) and value.ndim > 0:
        raise MixedTensorsError(
            f"{name}: a plain tensor of shape {tuple(value.shape)} meets a distributed one; turn it into one with "
            "distribute_tensor (every rank holds the whole) or DTensor.from_local (every rank holds its block)"
        )


def same_mesh(name: str, mesh: DeviceMesh | None, tensor: DTensor) -> DeviceMesh:
    """The mesh of ``tensor``, which must be ``mesh`` unless that is None."""
    if mesh is not None and tensor.device_mesh is not mesh and tensor.device_mesh != mesh:
        raise ValueError(
            f"{name}: the tensors lie on different meshes, {mesh} and {tensor.device_mesh}; redistribute one of them"
        )
    return tensor.device_mesh
