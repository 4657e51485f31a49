"""The bits of a tensor as an array of unsigned integers, and back: what checkpoints write and read."""

from __future__ import annotations

from typing import Any

import numpy as np

from hyper_parallel.platform.mindspore.base import memory, start
from hyper_parallel.platform.mindspore.base.tensors import is_meta
from hyper_parallel.platform.mindspore.dtensor.tensor_type import detached
from hyper_parallel.platform.mindspore.mends import in_place

__all__ = ["is_in_host_memory", "raw_array", "set_raw"]


def is_in_host_memory(tensor: Any) -> bool:
    """Whether the bits of the tensor (of a DTensor: of its block) are where the host can look at them."""
    return not start.on_ascend()


def raw_array(tensor: Any) -> np.ndarray:
    """The bits of the tensor (of a DTensor: of its block): the same memory if that is the host's, else a copy."""
    plain = detached(tensor)
    if is_meta(plain):
        raise ValueError("a tensor on the meta device has no values; materialise it first, with init_parameters")
    array = memory.memory_of(plain) if is_in_host_memory(plain) else plain.asnumpy()
    size = array.dtype.itemsize
    return array.view("V16" if size == 16 else f"u{size}")


def set_raw(tensor: Any, array: np.ndarray) -> None:
    """Give the tensor (a DTensor: its block) these bits, unless ``array`` is its own memory already."""
    plain = detached(tensor)
    if 0 in plain.shape:
        return
    if not is_in_host_memory(plain):
        in_place.write(plain, memory.from_array(array, plain.shape, plain.dtype))
    elif array.__array_interface__["data"][0] != plain.data_ptr():
        raw_array(plain)[...] = array
