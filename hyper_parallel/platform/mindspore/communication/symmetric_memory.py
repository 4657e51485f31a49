"""One-sided memory between the ranks of one host, on MindSpore; what it does: ``shared/symmetric_memory.py``."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from hyper_parallel.platform.mindspore.base.memory import copy_into, numpy_type
from hyper_parallel.platform.mindspore.base.tensors import own_copy, tensor_to_numpy
from hyper_parallel.platform.mindspore.communication import groups
from hyper_parallel.platform.mindspore.communication.collectives import all_gather_object
from hyper_parallel.platform.shared.symmetric_memory import (
    SharingFramework,
    SymmetricBuffer,
    SymmetricMemoryHandler,
    handler_of_this_process,
)

__all__ = ["SymmetricBuffer", "SymmetricMemoryHandler", "get_symmetric_memory_handler"]


def _check_dtype(dtype: Any) -> None:
    if not isinstance(dtype, ms.Type):
        raise TypeError(f"dtype must be a mindspore dtype such as mindspore.float32, got {dtype!r}")
    numpy_type(dtype)


def _over_bytes(data: np.ndarray, shape: tuple[int, ...], dtype: Any) -> Tensor:
    return Tensor.from_numpy(data.view(numpy_type(dtype)).reshape(shape))


def _copy(target: Tensor, source: Tensor) -> None:
    values = source.asnumpy() if source.dtype == ms.bfloat16 else tensor_to_numpy(source)
    copy_into(target, values)


def _place_in(group: Any) -> tuple[int, list[int]]:
    if group is None and groups.get_world_size() == 1:
        try:
            groups.unwrap_group(None)
        except RuntimeError:
            raise RuntimeError(
                "symmetric memory is shared by the ranks of a process group: call init_process_group first"
            ) from None
    found = groups.unwrap_group(group)
    return found.rank(), found.ranks


_FRAMEWORK = SharingFramework(
    tensor=Tensor,
    default_dtype=ms.float32,
    itemsize=lambda dtype: numpy_type(dtype).itemsize,
    check_dtype=_check_dtype,
    over_bytes=_over_bytes,
    copy=_copy,
    own_copy=own_copy,
    all_gather_object=all_gather_object,
    place_in=_place_in,
)


def get_symmetric_memory_handler() -> SymmetricMemoryHandler:
    """The handler of this process; a forked child gets its own."""
    return handler_of_this_process(_FRAMEWORK)
