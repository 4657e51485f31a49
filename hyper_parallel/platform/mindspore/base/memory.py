"""The memory of a tensor on a CPU as a numpy array, strides included."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

__all__ = ["bytes_of", "copy_into", "from_array", "memory_of", "numpy_type"]

_BFLOAT16 = Tensor(np.zeros(1, np.float32)).astype(ms.bfloat16).asnumpy().dtype  # MindSpore brings its own to numpy
_TYPES = {
    getattr(ms, name): np.dtype(name.rstrip("_"))
    for name in ("float16", "float32", "float64", "int8", "int16", "int32", "int64", "complex64", "complex128", "bool_")
} | {ms.uint8: np.dtype("u1"), ms.uint16: np.dtype("u2"), ms.uint32: np.dtype("u4"), ms.uint64: np.dtype("u8")}
_TYPES[ms.bfloat16] = _BFLOAT16


def numpy_type(dtype: Any) -> np.dtype:
    """The numpy dtype of the same numbers; MindSpore's own for bfloat16."""
    try:
        return _TYPES[dtype]
    except KeyError:
        raise TypeError(
            f"tensors of {dtype} cannot be used on a CPU; cast to one of {', '.join(map(str, _TYPES))}"
        ) from None


class _Memory:
    """What numpy asks about memory; numpy keeps this object, and this object the tensor."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: Tensor, dtype: np.dtype) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": tensor.shape,
            "strides": tuple(stride * dtype.itemsize for stride in tensor.stride()),
            "typestr": dtype.str if dtype.kind != "V" else f"|V{dtype.itemsize}",
        }


def memory_of(tensor: Tensor) -> np.ndarray:
    """The tensor's own memory, with its strides: writing to the array writes to the tensor and to what it views."""
    dtype = numpy_type(tensor.dtype)
    if 0 in tensor.shape:
        return np.empty(tensor.shape, dtype)
    array = np.asarray(_Memory(tensor, dtype))
    return array.view(dtype) if array.dtype != dtype else array


def bytes_of(tensor: Tensor) -> np.ndarray:
    """The values in row-major order as a vector of bytes; a copy only where the strides make one."""
    return np.ascontiguousarray(memory_of(tensor)).reshape(-1).view(np.uint8)


def from_array(array: np.ndarray, shape: Any = None, dtype: Any = None) -> Tensor:
    """A tensor over the memory of ``array``; its bytes as ``dtype`` and ``shape`` when these are given."""
    if dtype is not None:
        array = np.ascontiguousarray(array).reshape(-1).view(np.uint8).view(numpy_type(dtype))
    if shape is not None:
        array = array.reshape(shape)
    return Tensor.from_numpy(np.ascontiguousarray(array).reshape(array.shape))


def copy_into(target: Tensor, values: np.ndarray) -> None:
    """Write ``values`` into the tensor's own memory, views included."""
    memory_of(target)[...] = values.reshape(target.shape)
