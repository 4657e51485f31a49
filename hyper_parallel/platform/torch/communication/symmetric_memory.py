"""One-sided memory between the ranks of one host, on PyTorch; what it does: ``shared/symmetric_memory.py``."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from hyper_parallel.platform.shared.symmetric_memory import (
    SharingFramework,
    SymmetricBuffer,
    SymmetricMemoryHandler,
    handler_of_this_process,
)
from hyper_parallel.platform.torch.communication.messages import all_gather_object

__all__ = ["SymmetricBuffer", "SymmetricMemoryHandler", "get_symmetric_memory_handler"]

_QUANTIZED_DTYPES = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)


def _check_dtype(dtype: Any) -> None:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype such as torch.float32, got {dtype!r}")
    if dtype in _QUANTIZED_DTYPES:
        raise TypeError(
            f"{dtype} is more than its bytes (scale, zero point); share the integers and the scales instead"
        )


def _over_bytes(data: np.ndarray, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if data.size == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(data).view(dtype).view(shape)


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    with torch.no_grad():
        target.copy_(source)


def _place_in(group: Any) -> tuple[int, list[int]]:
    if not dist.is_initialized():
        raise RuntimeError("symmetric memory is shared by the ranks of a process group: call init_process_group first")
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(
            f"world rank {dist.get_rank()} is not in the group it asks symmetric memory for; "
            "call allocate only on the ranks of the group"
        )
    return rank, dist.get_process_group_ranks(group if group is not None else dist.group.WORLD)


_FRAMEWORK = SharingFramework(
    tensor=torch.Tensor,
    default_dtype=torch.float32,
    itemsize=lambda dtype: dtype.itemsize,
    check_dtype=_check_dtype,
    over_bytes=_over_bytes,
    copy=_copy,
    own_copy=torch.clone,
    all_gather_object=all_gather_object,
    place_in=_place_in,
)


def get_symmetric_memory_handler() -> SymmetricMemoryHandler:
    """The handler of this process; a forked child gets its own."""
    return handler_of_this_process(_FRAMEWORK)
