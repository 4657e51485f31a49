"""Memory on MindSpore that is given back while the tensors over it stay, and parameters that are sent in one piece.

Note [Storages that come back on MindSpore]
As on PyTorch a storage is resized to nothing and back, and the tape sees the values that are there then. But a part of
a larger tensor would be copied by the operators that use it, and the tape would keep the copy. So each whole value has
a storage of its own, and ``tensor`` gives aliases of one tensor over it (``data``), which operators take for what they
are. Padding behind a value has no memory: some kernels ask how large a storage is (``LayerNorm``). What is given back
goes to MindSpore's pool, from which the next unit takes it; the process does not shrink.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from mindspore import Tensor, mint

from hyper_parallel.platform.contract import parameter_units
from hyper_parallel.platform.mindspore.base.memory import from_array, memory_of, numpy_type
from hyper_parallel.platform.mindspore.base.start import on_ascend
from hyper_parallel.platform.mindspore.base.tensors import cat, empty, is_meta, narrow, new_tensor, overwrite, zeros
from hyper_parallel.platform.shared.region import Region

__all__ = ["returnable_memory", "shard_memory"]


def returnable_memory(num_elements: int, dtype: Any, device: Any) -> parameter_units.ReturnableMemory:
    """Memory for the whole values of parameters, released."""
    if _is_nowhere(device):
        return NoMemory(num_elements, dtype)
    return OneStorage(num_elements, dtype) if on_ascend() else ReturnableMemory(num_elements, dtype)


def _is_nowhere(device: Any) -> bool:
    return str(device).lower().startswith("meta")


def shard_memory(num_elements: int, dtype: Any, device: Any, pinned: bool) -> ShardMemory:
    """The local tensors of parameters, which stay where they are and are copied together when they are sent."""
    del pinned
    return ShardMemory(num_elements, dtype, device)


class _Value:
    """The storage of one whole value; ``room`` is how many elements it has among the others, with padding behind it."""

    def __init__(self, shape: Sequence[int], room: int, dtype: Any) -> None:
        self.shape, self.num_elements, self.room = tuple(shape), prod(shape), room
        self._type = numpy_type(dtype)
        self._num_bytes = self.num_elements * self._type.itemsize
        self._tensor = mint.empty(self.shape, dtype=dtype)
        self._storage = self._tensor.untyped_storage()
        self.release()  # from one size to another it would lose the memory that it had
        self.renew()

    def renew(self) -> None:
        self._storage.resize_(self._num_bytes)

    def release(self) -> None:
        self._storage.resize_(0)

    def array(self) -> np.ndarray:
        """The elements, without the padding."""
        buffer = (ctypes.c_uint8 * self._num_bytes).from_address(self._storage.data_ptr())
        return np.frombuffer(buffer, np.uint8).view(self._type)

    def alias(self) -> Tensor:
        return self._tensor.data


class ReturnableMemory(parameter_units.ReturnableMemory):
    """See Note [Storages that come back on MindSpore].

    Values become known as they are filled, and their shapes when their first tensors are made. A part that is not one
    value is a vector of its own with the same elements, and :meth:`settle` brings back what was written there.
    """

    def __init__(self, num_elements: int, dtype: Any) -> None:
        self.num_elements, self._dtype = num_elements, dtype
        self.num_bytes = num_elements * numpy_type(dtype).itemsize
        self._values: dict[int, _Value] = {}
        self._beside: list[tuple[int, np.ndarray]] = []
        self._is_there = False

    def renew(self) -> None:
        if not self._is_there:
            self._is_there = True
            for value in self._values.values():
                value.renew()

    def release(self) -> None:
        self._beside = []
        if self._is_there:
            self._is_there = False
            for value in self._values.values():
                value.release()

    def _array(self, offset: int, num_elements: int) -> np.ndarray:
        assert self._is_there
        value = self._values.get(offset)
        if value is None:
            value = self._values[offset] = _Value((num_elements,), num_elements, self._dtype)
        return value.array()[:num_elements]

    def _is_free(self, offset: int, length: int) -> bool:
        """Whether no value is known that lies there."""
        return all(start >= offset + length or start + one.room <= offset for start, one in self._values.items())

    def _inside(self, offset: int, length: int) -> list[tuple[slice, np.ndarray]]:
        """The elements of values that lie in a part, each with its place there."""
        found = []
        for start, value in self._values.items():
            begin, end = max(start, offset), min(start + value.num_elements, offset + length)
            if begin < end:
                found.append((slice(begin - offset, end - offset), value.array()[begin - start : end - start]))
        return found

    def part(self, offset: int, length: int) -> Tensor:
        known = self._values.get(offset)
        if self._is_free(offset, length) or (known is not None and known.num_elements == length):
            return from_array(self._array(offset, length))
        vector = np.zeros(length, numpy_type(self._dtype))
        for place, elements in self._inside(offset, length):
            vector[place] = elements
        self._beside.append((offset, vector))
        return from_array(vector)

    def settle(self) -> None:
        for offset, vector in self._beside:
            for place, elements in self._inside(offset, len(vector)):
                elements[...] = vector[place]
        self._beside = []

    def tensor(self, offset: int, shape: tuple[int, ...]) -> Tensor:
        if not prod(shape):
            return empty(shape, self._dtype)
        value = self._values[offset]
        if value.shape != shape:
            shaped = _Value(shape, value.room, self._dtype)
            shaped.array()[...] = value.array()[: shaped.num_elements]
            value.release()  # memory of a storage that was resized is not given back with its tensor
            value = self._values[offset] = shaped
        return value.alias()

    def fill_columns(self, rows: Tensor, columns: Sequence[tuple[int, int, int]]) -> None:
        values = memory_of(rows)
        for start, width, offset in columns:
            if width:
                target = self._array(offset, len(values) * width)
                for number, row in enumerate(values[:, start : start + width]):
                    elements = target[number * width : (number + 1) * width]
                    elements[...] = row[: len(elements)]

    def fill_boxes(self, rows: Tensor, start: int, offset: int, shape: Sequence[int], boxes: Sequence[Region]) -> None:
        if not prod(shape):
            return
        target = self._array(offset, prod(shape)).reshape(tuple(shape))
        for row, box in zip(memory_of(rows), boxes, strict=True):
            if box.num_elements:
                target[box.slices] = row[start : start + box.num_elements].reshape(box.sizes)


class OneStorage(parameter_units.ReturnableMemory):
    """One tensor and views of it, as accelerators compute with them; nothing goes through the host."""

    def __init__(self, num_elements: int, dtype: Any) -> None:
        self.num_elements, self._dtype = num_elements, dtype
        self.num_bytes = num_elements * numpy_type(dtype).itemsize
        self._flat = mint.empty((num_elements,), dtype=dtype)
        self._storage = self._flat.untyped_storage()
        self._storage.resize_(0)
        self._is_there = False

    def renew(self) -> None:
        if not self._is_there:
            self._is_there = True
            self._storage.resize_(self.num_bytes)

    def release(self) -> None:
        if self._is_there:
            self._is_there = False
            self._storage.resize_(0)

    def part(self, offset: int, length: int) -> Tensor:
        return narrow(self._flat, 0, offset, length)

    def settle(self) -> None:
        return

    def tensor(self, offset: int, shape: tuple[int, ...]) -> Tensor:
        return self.part(offset, prod(shape)).view(shape) if prod(shape) else empty(shape, self._dtype)

    def fill_columns(self, rows: Tensor, columns: Sequence[tuple[int, int, int]]) -> None:
        for begin, width, offset in columns:
            if width:
                target = self.part(offset, rows.shape[0] * width).view(rows.shape[0], width)
                overwrite(target, narrow(rows, 1, begin, width))

    def fill_boxes(self, rows: Tensor, start: int, offset: int, shape: Sequence[int], boxes: Sequence[Region]) -> None:
        target = self.part(offset, prod(shape)).view(tuple(shape)) if prod(shape) else None
        for number, box in enumerate(boxes):
            if target is not None and box.num_elements:
                into = target
                for dim, (begin, length) in enumerate(zip(*box, strict=True)):
                    into = narrow(into, dim, begin, length)
                overwrite(into, narrow(rows[number], 0, start, box.num_elements).view(box.sizes))


class NoMemory(parameter_units.ReturnableMemory):
    """Of parameters that have shapes and no memory."""

    def __init__(self, num_elements: int, dtype: Any) -> None:
        self.num_elements, self._dtype = num_elements, dtype
        self.num_bytes = num_elements * numpy_type(dtype).itemsize

    def renew(self) -> None:
        return

    def release(self) -> None:
        return

    def part(self, offset: int, length: int) -> Tensor:
        return new_tensor((length,), self._dtype, "meta")

    def settle(self) -> None:
        return

    def tensor(self, offset: int, shape: tuple[int, ...]) -> Tensor:
        return new_tensor(shape, self._dtype, "meta")

    def fill_columns(self, rows: Tensor, columns: Sequence[tuple[int, int, int]]) -> None:
        return

    def fill_boxes(self, rows: Tensor, start: int, offset: int, shape: Sequence[int], boxes: Sequence[Region]) -> None:
        return


class ShardMemory(parameter_units.ShardMemory):
    """Parameters with memory of their own: writes through parts of a larger tensor are lost on a CPU."""

    def __init__(self, num_elements: int, dtype: Any, device: Any) -> None:
        self._num_elements, self._dtype = num_elements, dtype
        self._has_memory = not _is_nowhere(device)
        self._adopted: list[tuple[Any, int]] = []

    def adopt(self, parameter: Any, offset: int) -> None:
        self._adopted.append((parameter, offset))

    def holds(self, parameters: Sequence[Any], offsets: Sequence[int]) -> bool:
        return all(
            parameter is known and offset == place and self._is_alike(parameter._local)
            for parameter, offset, (known, place) in zip(parameters, offsets, self._adopted, strict=True)
        )

    def _is_alike(self, local: Tensor) -> bool:
        return local.dtype == self._dtype and is_meta(local) != self._has_memory

    def part(self, offset: int, length: int) -> Tensor:
        if not self._has_memory:
            return new_tensor((length,), self._dtype, "meta")
        if on_ascend():
            return narrow(self._joined(), 0, offset, length)
        packed = np.zeros(self._num_elements, numpy_type(self._dtype))
        for parameter, at in self._adopted:
            size = prod(parameter._local.shape)
            packed[at : at + size] = memory_of(parameter._local).reshape(-1)
        return from_array(packed[offset : offset + length])

    def _joined(self) -> Tensor:
        pieces, end = [], 0
        for parameter, at in [*self._adopted, (None, self._num_elements)]:
            if at > end:
                pieces.append(zeros((at - end,), self._dtype))
            if parameter is not None and prod(parameter._local.shape):
                pieces.append(parameter._local.data.reshape(-1))
                end = at + pieces[-1].shape[0]
        return cat(pieces)
