"""Memory on MindSpore that is given back while the tensors over it stay, and parameters that are sent in one piece.

A storage that is resized does not give its memory back, so each tensor that was made is given other memory: a single
element when it is released, its part of a new array when it is renewed. The tape keeps tensors by reference and sees
the values that they have then.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from mindspore import Tensor

from hyper_parallel.platform.contract import parameter_units
from hyper_parallel.platform.mindspore.base.memory import from_array, memory_of, numpy_type
from hyper_parallel.platform.mindspore.base.tensors import is_meta, new_tensor
from hyper_parallel.platform.shared.region import Region

__all__ = ["returnable_memory", "shard_memory"]


def returnable_memory(num_elements: int, dtype: Any, device: Any) -> ReturnableMemory:
    """Memory for the whole values of parameters, released."""
    return ReturnableMemory(num_elements, dtype, device)


def shard_memory(num_elements: int, dtype: Any, device: Any, pinned: bool) -> ShardMemory:
    """The local tensors of parameters, which stay where they are and are copied together when they are sent."""
    del pinned
    return ShardMemory(num_elements, dtype, device)


class ReturnableMemory(parameter_units.ReturnableMemory):
    """An array of numpy's, and the tensors over it."""

    def __init__(self, num_elements: int, dtype: Any, device: Any) -> None:
        self.num_elements = num_elements
        self._dtype, self._device = dtype, device
        self._type = numpy_type(dtype)
        self.num_bytes = num_elements * self._type.itemsize
        self._array: np.ndarray | None = None
        self._made: list[tuple[weakref.ref, int, tuple[int, ...]]] = []

    def renew(self) -> None:
        if self._array is None:
            self._array = np.empty(self.num_elements, self._type)
            for tensor, offset, shape in self._living():
                tensor.data = self._over(offset, shape)

    def release(self) -> None:
        if self._array is not None:
            self._array = None
            for tensor, _, _ in self._living():
                tensor.data = from_array(np.zeros(1, self._type))

    def _living(self) -> list[tuple[Any, int, tuple[int, ...]]]:
        living = [(tensor(), offset, shape) for tensor, offset, shape in self._made]
        self._made = [one for one, (tensor, _, _) in zip(self._made, living, strict=True) if tensor is not None]
        return [one for one in living if one[0] is not None]

    def _over(self, offset: int, shape: Sequence[int]) -> Tensor:
        assert self._array is not None
        return from_array(self._array[offset : offset + prod(shape)], tuple(shape))

    def part(self, offset: int, length: int) -> Tensor:
        return self._over(offset, (length,))

    def tensor(self, offset: int, shape: tuple[int, ...]) -> Tensor:
        made = self._over(offset, shape)
        self._made.append((weakref.ref(made), offset, tuple(shape)))
        return made

    def fill_columns(self, rows: Tensor, columns: Sequence[tuple[int, int, int]]) -> None:
        assert self._array is not None
        values = memory_of(rows)
        for start, width, offset in columns:
            target = self._array[offset : offset + len(values) * width].reshape(len(values), width)
            target[...] = values[:, start : start + width]

    def fill_boxes(self, rows: Tensor, start: int, offset: int, shape: Sequence[int], boxes: Sequence[Region]) -> None:
        assert self._array is not None
        target = self._array[offset : offset + prod(shape)].reshape(tuple(shape))
        for row, box in zip(memory_of(rows), boxes, strict=True):
            if box.num_elements:
                target[box.slices] = row[start : start + box.num_elements].reshape(box.sizes)


class ShardMemory(parameter_units.ShardMemory):
    """Parameters with memory of their own: writes through parts of a larger tensor are lost on a CPU."""

    def __init__(self, num_elements: int, dtype: Any, device: Any) -> None:
        self._num_elements, self._dtype, self._device = num_elements, dtype, device
        self._adopted: dict[int, Any] = {}

    def adopt(self, parameter: Any, offset: int) -> None:
        self._adopted[offset] = parameter

    def holds(self, parameters: Sequence[Any], offsets: Sequence[int]) -> bool:
        return all(
            self._adopted.get(offset) is parameter and parameter.dtype == self._dtype
            for parameter, offset in zip(parameters, offsets, strict=True)
        )

    def part(self, offset: int, length: int) -> Tensor:
        locals_ = {at: parameter._local for at, parameter in self._adopted.items()}
        if any(is_meta(local) for local in locals_.values()):
            return new_tensor((length,), self._dtype, self._device)
        packed = np.zeros(self._num_elements, numpy_type(self._dtype))
        for at, local in locals_.items():
            size = prod(local.shape)
            if size:
                packed[at : at + size] = memory_of(local).reshape(-1)
        return from_array(packed[offset : offset + length])
