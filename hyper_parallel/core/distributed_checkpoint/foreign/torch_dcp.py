"""Checkpoints that torch.distributed.checkpoint wrote, read without PyTorch and without running what is in pickles.

Such a checkpoint is a pickle of its metadata and files of tensors as ``torch.save`` writes them, archives that hold a
pickle and the memory of tensors. Pickles are read by an interpreter of our own (``torch_pickle.py``) that knows the few
names that belong there, so a file cannot make this program run code of its own. Objects that are more than plain data
are loaded only when asked, by the pickle module itself.
"""

from __future__ import annotations

import functools
import math
import os
import pickle
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.core.distributed_checkpoint.base.errors import CorruptCheckpointError
from hyper_parallel.core.distributed_checkpoint.base.metadata import dtype_size
from hyper_parallel.core.distributed_checkpoint.base.regular_files import open_regular, read_regular
from hyper_parallel.core.distributed_checkpoint.base.shown_text import shown
from hyper_parallel.core.distributed_checkpoint.foreign.torch_pickles.torch_archive import Archive
from hyper_parallel.core.distributed_checkpoint.foreign.torch_pickles.torch_globals import (
    TensorPart,
    known_global,
    stored_part,
)
from hyper_parallel.core.distributed_checkpoint.foreign.torch_pickles.torch_metadata import (
    Place,
    TorchTensor,
    read_metadata,
)
from hyper_parallel.core.distributed_checkpoint.foreign.torch_pickles.torch_pickle import read_pickle
from hyper_parallel.core.distributed_checkpoint.foreign.torch_pickles.torch_plain import check_plain
from hyper_parallel.core.distributed_checkpoint.foreign.torch_pickles.torch_records import TensorInside, UnsafePickle
from hyper_parallel.core.distributed_checkpoint.format.stored_files import RAW_DTYPES
from hyper_parallel.core.distributed_checkpoint.storage.file_boxes import FileBoxes
from hyper_parallel.platform.shared.region import Region

METADATA_FILE = ".metadata"

_MAX_METADATA = 1 << 30  # bytes: some five million chunks
_MAX_TENSOR_PICKLE = 1 << 16  # That of a tensor has about 200 bytes.
_MAX_OBJECT_PICKLE = 1 << 30


class TorchCheckpoint:
    """A checkpoint of torch's, opened for reading: the same face as our own in ``tensor_source.py``."""

    kind = "torch"

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder)
        self._files = FileBoxes(self.path)
        self._sizes: dict[str, int] = {}
        path = self.path / METADATA_FILE
        try:
            self._tensors, self._objects = read_metadata(read_regular(path, _MAX_METADATA))
        except FileNotFoundError:
            raise FileNotFoundError(
                f"there is no torch checkpoint at '{self.path}': it has no {METADATA_FILE}"
            ) from None
        except UnsafePickle as error:
            raise CorruptCheckpointError(
                f"'{path}' names {error}, which does not belong into the metadata of a checkpoint; it is not loaded"
            ) from None
        except ValueError as error:
            raise CorruptCheckpointError(f"'{path}' is not the metadata of a torch checkpoint: {error}") from error

    # ---------------------------------------------------------------- what a source has

    def known(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """(shape, dtype) of each tensor."""
        return {name: (tensor.shape, tensor.dtype) for name, tensor in self._tensors.items()}

    def num_chunks(self, name: str) -> int:
        return len(self._tensors[name].boxes)

    def layout(self, name: str) -> None:
        return None

    def objects(self) -> dict[str, tuple[str, int]]:
        """(encoding, bytes) of each object."""
        return {name: ("torch pickle", place.length) for name, place in self._objects.items()}

    def boxes(self, name: str) -> list[Region]:
        """The stored chunks that are not empty."""
        return self._tensors[name].boxes

    def view(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> np.ndarray[Any, Any]:
        """The bits of a box of a tensor."""
        tensor, box = self._tensors[name], Region(tuple(offsets), tuple(sizes))
        touching = (
            (tensor.boxes[number], functools.partial(self._chunk, name, tensor, number))
            for number in tensor.touching(box)
        )
        return view_of_boxes(RAW_DTYPES[dtype_size(tensor.dtype)], box, touching)

    def object_value(self, name: str, allow_pickle: bool = False) -> Any:
        """An object. Plain data is decoded; for all else pickle is needed, and must be allowed."""
        place = self._objects[name]
        where = f"the object '{shown(name)}' in '{self.path / place.file}'"
        try:
            data = self._pickle(place, self._archive(place), _MAX_OBJECT_PICKLE)
            if not allow_pickle:
                value = read_pickle(data, known_global)
                check_plain(value, len(data))
                return value
        except UnsafePickle as error:
            raise ValueError(
                f"'{shown(name)}' of '{self.path}' holds {error}: to load it runs whatever code the pickle contains, "
                "which must be allowed"
            ) from None
        except TensorInside:
            raise ValueError(
                f"'{shown(name)}' of '{self.path}' holds a tensor inside an object, which torch alone can load; save "
                "it in a dict or list instead of a tuple or a class"
            ) from None
        except ValueError as error:
            raise CorruptCheckpointError(f"{where} cannot be loaded: {error}") from error
        try:
            return pickle.loads(data)
        except Exception as error:  # A pickle can raise anything.
            raise CorruptCheckpointError(f"{where} cannot be loaded: {error!r}") from error

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    # ---------------------------------------------------------------- files

    def _chunk(self, name: str, tensor: TorchTensor, number: int) -> _StoredChunk:
        (offsets, sizes), place = tensor.boxes[number], tensor.places[number]
        where = f"'{shown(name)}' at {list(offsets)} in '{self.path / place.file}'"
        try:
            archive = self._archive(place)
            part = read_pickle(self._pickle(place, archive, _MAX_TENSOR_PICKLE), known_global, stored_part)
            if type(part) is not TensorPart:
                raise ValueError("its pickle holds something else")
            storage = archive.member(f"data/{part.storage.key}")
            if part.shape != sizes or part.dtype != tensor.dtype:
                raise ValueError(f"it has shape {list(part.shape)} and dtype {part.dtype}, unlike the metadata")
            start = place.offset + storage.start
            return _StoredChunk(
                self._files, place.file, part, RAW_DTYPES[dtype_size(tensor.dtype)], start, storage.size
            )
        except UnsafePickle as error:
            raise CorruptCheckpointError(f"{where} cannot be read without torch: its pickle holds {error}") from None
        except ValueError as error:
            raise CorruptCheckpointError(f"{where} is not a tensor that torch wrote: {error}") from error

    def _archive(self, place: Place) -> Archive:
        if place.file not in self._sizes:
            path = self.path / place.file
            try:
                with open_regular(path) as file:
                    self._sizes[place.file] = os.fstat(file.fileno()).st_size
            except FileNotFoundError:
                raise CorruptCheckpointError(f"'{path}' is missing") from None
        if place.offset + place.length > self._sizes[place.file]:
            raise CorruptCheckpointError(f"'{self.path / place.file}' is cut short")
        return Archive(lambda start, length: self._read(place, start, length), place.length)

    def _read(self, place: Place, start: int, length: int) -> bytes:
        data = bytearray(length)
        self._files.read(place.file, place.offset + start, memoryview(data))
        return bytes(data)

    def _pickle(self, place: Place, archive: Archive, limit: int) -> bytes:
        member = archive.member("data.pkl")
        if member.size > limit:
            raise ValueError(f"its pickle has {member.size} bytes, more than {limit}")
        data = self._read(place, member.start, member.size)
        if zlib.crc32(data) != member.crc32:
            raise ValueError("the checksum of its pickle is not the one that was written")
        return data


class _StoredChunk:
    """The array of a chunk in a file: ``chunk[slices]`` reads these elements.

    torch writes no more of a storage than a tensor has elements, in any order of the dims. So a storage is at least as
    large as its tensor (few bytes, repeated by a stride of 0, could fill the memory), and where the order of elements
    is none that a file can be read in, which takes odd views, it is all in memory for a moment and not larger.
    """

    def __init__(
        self, files: FileBoxes, file: str, part: TensorPart, dtype: np.dtype[Any], start: int, num_bytes: int
    ) -> None:
        self._files, self._file, self._part, self._dtype = files, file, part, dtype
        last = sum((size - 1) * stride for size, stride in zip(part.shape, part.strides, strict=True))
        if (part.offset + last + 1) * dtype.itemsize > num_bytes:
            raise ValueError("it is cut short")
        needed = math.prod(part.shape) * dtype.itemsize
        self._order = sorted(range(len(part.shape)), key=lambda dim: -part.strides[dim])
        self._is_dense, step = True, 1
        for dim in reversed(self._order):
            self._is_dense &= part.shape[dim] == 1 or part.strides[dim] == step
            step *= part.shape[dim]
        if num_bytes < needed or (num_bytes > needed and not self._is_dense):
            raise ValueError(f"the {num_bytes} bytes of its storage are not the {needed} of shape {list(part.shape)}")
        self._start, self._num_bytes = start, num_bytes

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray[Any, Any]:
        part, order, element = self._part, self._order, self._dtype.itemsize
        if not self._is_dense:
            whole = np.empty(self._num_bytes // element, self._dtype)
            self._files.read(self._file, self._start, whole.view(np.uint8).data)
            strides = [stride * element for stride in part.strides]
            return np.lib.stride_tricks.as_strided(whole[part.offset :], part.shape, strides)[index].copy()
        out = np.empty([index[dim].stop - index[dim].start for dim in order], self._dtype)
        shape, offsets = tuple(part.shape[dim] for dim in order), tuple(index[dim].start for dim in order)
        self._files.read_box(self._file, self._start + part.offset * element, shape, offsets, out.shape, out)
        return out.transpose(np.argsort(order)) if order else out


def view_of_boxes(
    dtype: np.dtype[Any], box: Region, chunks: Iterable[tuple[Region, Callable[[], Any]]]
) -> np.ndarray[Any, Any]:
    """The bits of a box that is spread over chunks: a view when one chunk has it all, else a copy."""
    offsets, sizes = box
    result: np.ndarray[Any, Any] | None = None
    filled = 0
    for chunk, read in chunks:
        shared = Region.overlap(chunk, box) if 0 not in sizes else None
        if shared is None:
            continue
        part = read()[tuple(slice(a - c, a - c + n) for a, c, n in zip(shared[0], chunk[0], shared[1], strict=True))]
        if shared == box:
            return part
        if result is None:
            result = np.empty(sizes, dtype)
        result[tuple(slice(a - o, a - o + n) for a, o, n in zip(shared[0], offsets, shared[1], strict=True))] = part
        filled += part.size
    if result is None:
        result = np.empty(sizes, dtype)
    if filled != result.size:
        raise CorruptCheckpointError(f"the chunks do not cover the box at {list(offsets)} of size {list(sizes)}")
    return result
