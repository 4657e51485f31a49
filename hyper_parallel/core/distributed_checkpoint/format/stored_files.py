"""The files of a checkpoint that exists: opening its index, reading its chunks and objects, and finding damage."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from hyper_parallel.core.distributed_checkpoint.base.checksum import crc32c, crc32c_of
from hyper_parallel.core.distributed_checkpoint.base.errors import CorruptCheckpointError
from hyper_parallel.core.distributed_checkpoint.base.metadata import Metadata, dtype_size
from hyper_parallel.core.distributed_checkpoint.base.shown_text import shown
from hyper_parallel.core.distributed_checkpoint.format.index_file import CheckpointIndex, StoredTensor, decode_index
from hyper_parallel.core.distributed_checkpoint.storage.storage import (
    METADATA_FILE,
    CheckpointId,
    StorageReader,
    default_reader,
)
from hyper_parallel.platform.host.shared_segment import available_memory
from hyper_parallel.platform.shared.region import Shape

RAW_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("u2"),
    4: np.dtype("u4"),
    8: np.dtype("u8"),
    16: np.dtype("V16"),
}
_STEP = 16 << 20  # bytes that are checked at a time
_LARGE = 64 << 20  # bytes of an object from which on the memory is looked at first


class StoredFiles:
    """A checkpoint opened for reading. Everything it gives has been checked, unless it says otherwise."""

    def __init__(self, checkpoint_id: CheckpointId, reader: StorageReader) -> None:
        self.name = os.fspath(checkpoint_id)
        self.reader = reader
        reader.open(checkpoint_id)
        try:
            data = reader.read_metadata()
        except (FileNotFoundError, NotADirectoryError):
            raise FileNotFoundError(
                f"there is no checkpoint at '{self.name}': it has no {METADATA_FILE}. latest(directory) names the "
                "newest checkpoint in a directory"
            ) from None
        self.index: CheckpointIndex = decode_index(data, f"{self.name}/{METADATA_FILE}")
        self._sized: set[int] = set()
        self._buffer = memoryview(b"")

    def chunk(self, tensor: StoredTensor, number: int) -> np.ndarray[Any, Any]:
        """A chunk as an array of bits, unchecked, by reference where that is possible."""
        size = dtype_size(tensor.dtype)
        sizes = tensor.chunk_sizes(number)
        name, start = self._place(tensor.file[number], tensor.start[number])
        return np.frombuffer(self.reader.mapped(name, start, math.prod(sizes) * size), RAW_DTYPES[size]).reshape(sizes)

    def read_box(self, tensor: StoredTensor, number: int, offsets: Shape, out: np.ndarray[Any, Any]) -> None:
        """Fill ``out`` with a box of a chunk, unchecked. No other bytes are read, but for what the reader puts up with
        to read fewer ranges."""
        name, start = self._place(tensor.file[number], tensor.start[number])
        self.reader.read_box(name, start, tensor.chunk_sizes(number), offsets, out.shape, out)

    def read_chunk(self, tensor: StoredTensor, number: int, out: np.ndarray[Any, Any]) -> int:
        """Fill ``out`` with a chunk; the checksum of what was read."""
        if not out.flags.c_contiguous:
            self.read_box(tensor, number, (0,) * out.ndim, out)
            return crc32c_of(out)
        name, start = self._place(tensor.file[number], tensor.start[number])
        data = out.reshape(-1).view(np.uint8).data
        step, crc = self.reader.block_bytes or len(data), 0
        for at in range(0, len(data), step):
            part = data[at : at + step]
            self.reader.read_into(name, start + at, part)
            crc = crc32c(part, crc)
        return crc

    def _place(self, file: int, start: int) -> tuple[str, int]:
        """A file's name, and where in it a byte of its data is; the file has its size."""
        if file not in self._sized:
            self._check_size(file)
        described = self.index.files[file]
        return described.name, described.header_bytes + start

    def object_bytes(self, key: str) -> memoryview:
        """The bytes of an object."""
        stored = self.index.objects[key]
        place = self._place(stored.file, stored.start)
        available = available_memory() if stored.length > _LARGE else None
        if available is not None and stored.length > available:
            raise MemoryError(
                f"the object '{shown(key)}' in '{self.name}/{place[0]}' has {stored.length} bytes, and this host has "
                f"{available} bytes of memory left; it is not read"
            )
        data = self.reader.view(*place, stored.length)
        if crc32c(data) != stored.crc32c:
            raise CorruptCheckpointError(self.damaged(stored.file, f"the object '{shown(key)}'"))
        return data

    def check_object(self, key: str) -> None:
        """Raise unless an object is as it was written."""
        stored = self.index.objects[key]
        if self._checksum(*self._place(stored.file, stored.start), stored.length) != stored.crc32c:
            raise CorruptCheckpointError(self.damaged(stored.file, f"the object '{shown(key)}'"))

    def check_header(self, number: int) -> None:
        """Raise unless a file has its size and its header is as it was written."""
        self._check_size(number)
        file = self.index.files[number]
        if self._checksum(file.name, 0, file.header_bytes) != file.header_crc:
            raise CorruptCheckpointError(self.damaged(number, "its header"))

    def check_chunk(self, key: str, number: int) -> None:
        """Raise unless a chunk is as it was written."""
        tensor = self.index.tensors[key]
        length = math.prod(tensor.chunk_sizes(number)) * dtype_size(tensor.dtype)
        found = self._checksum(*self._place(tensor.file[number], tensor.start[number]), length)
        self.compare(key, number, found, tensor.crc32c[number])

    def _checksum(self, name: str, start: int, length: int) -> int:
        """Of bytes of a file, read a few at a time."""
        step = self.reader.block_bytes or _STEP
        if len(self._buffer) < min(length, step):
            self._buffer = memoryview(bytearray(min(length, step)))
        crc = 0
        for at in range(0, length, step):
            part = self._buffer[: min(step, length - at)]
            self.reader.read_into(name, start + at, part)
            crc = crc32c(part, crc)
        return crc

    def compare(self, key: str, chunk: int, found: int, written: int) -> None:
        """Raise unless the checksum of a chunk is the one that was written."""
        if found != written:
            tensor = self.index.tensors[key]
            offsets, sizes = tensor.box(chunk)
            what = f"'{shown(key)}' at {list(offsets)} (size {list(sizes)})"
            raise CorruptCheckpointError(self.damaged(tensor.file[chunk], what))

    def damaged(self, file: int, what: str) -> str:
        """The message about damage in a file."""
        return (
            f"'{self.name}/{self.index.files[file].name}' is damaged: the checksum of {what} is not the one that was "
            "written. Load another checkpoint"
        )

    def _check_size(self, number: int) -> None:
        file = self.index.files[number]
        path = f"{self.name}/{file.name}"
        try:
            size = self.reader.size(file.name)
        except FileNotFoundError:
            raise CorruptCheckpointError(f"'{path}' is missing; the checkpoint cannot be loaded without it") from None
        if size != file.header_bytes + file.data_bytes:
            raise CorruptCheckpointError(
                f"'{path}' has {size} bytes where {file.header_bytes + file.data_bytes} were written: it was cut short "
                "or changed. Load another checkpoint"
            )
        self._sized.add(number)


def read_metadata(checkpoint_id: CheckpointId, storage_reader: StorageReader | None = None) -> Metadata:
    """What a checkpoint holds, without any values."""
    reader = storage_reader if storage_reader is not None else default_reader(checkpoint_id)
    try:
        return StoredFiles(checkpoint_id, reader).index.metadata()
    finally:
        reader.close()


def verify(
    checkpoint_id: CheckpointId,
    storage_reader: StorageReader | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Read every byte of a checkpoint and give a line for each problem; none: it is sound. One process is enough.

    ``progress(bytes_done, bytes_in_all)`` is called now and then. Memory stays small whatever the size.
    """
    reader = storage_reader if storage_reader is not None else default_reader(checkpoint_id)
    problems: dict[str, None] = {}
    try:
        try:
            stored = StoredFiles(checkpoint_id, reader)
        except (CorruptCheckpointError, OSError) as error:
            return [str(error)]
        total = sum(file.header_bytes + file.data_bytes for file in stored.index.files)
        done = 0
        for num_bytes, check in _checks(stored):
            try:
                check()
            except (CorruptCheckpointError, OSError) as error:
                problems[str(error)] = None
            done += num_bytes
            if progress is not None:
                progress(done, total)
    finally:
        reader.close()
    return list(problems)


def _checks(stored: StoredFiles) -> Iterator[tuple[int, Callable[[], Any]]]:
    """(bytes, check) for everything in a checkpoint."""
    index = stored.index
    for number, file in enumerate(index.files):
        yield file.header_bytes, lambda number=number: stored.check_header(number)  # type: ignore[misc]
    for key, tensor in index.tensors.items():
        size = dtype_size(tensor.dtype)
        for number in range(len(tensor.file)):
            num_bytes = math.prod(tensor.chunk_sizes(number)) * size
            yield num_bytes, lambda key=key, number=number: stored.check_chunk(key, number)  # type: ignore[misc]
    for key, described in index.objects.items():
        yield described.length, lambda key=key: stored.check_object(key)  # type: ignore[misc]
