"""What a place for checkpoints must do: keep whole files, replace one small file at once, give back ranges of bytes.

Everything else (planning, the format of files, checksums, agreement) is the same for every place, so a new kind of
storage is these two small classes. :mod:`.filesystem` and :mod:`.fsspec_storage` have one pair each.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.core.distributed_checkpoint.base.grids import contiguous_runs
from hyper_parallel.platform.shared.region import Shape

METADATA_FILE = "metadata.json"
MAX_METADATA_BYTES = 1 << 30  # ten million chunks take a third of it
DEFAULT_SHARD_BYTES = 4 << 30

CheckpointId = str | os.PathLike[str]
Buffer = Any  # bytes, memoryview or a contiguous numpy array of uint8


class StorageWriter(ABC):
    """Writes one checkpoint at a time. Data files first, by every rank; then the coordinator commits, once.

    A checkpoint is there when its metadata file is, and that appears (or replaces an older one) at once or not at all.
    """

    max_shard_bytes: int = DEFAULT_SHARD_BYTES

    @abstractmethod
    def open(self, checkpoint_id: CheckpointId) -> None:
        """Every rank: from now on files go here."""

    @abstractmethod
    def begin(self, save_name: str) -> None:
        """The coordinator, before any rank writes: remove what killed saves left; ``save_name`` is being written."""

    @abstractmethod
    def write_file(self, name: str, buffers: Iterable[Buffer]) -> None:
        """Write a new file of these buffers, one after the other; when this returns it is safe."""

    @abstractmethod
    def flush(self) -> None:
        """Every rank, after its last file: the names of the files are safe too."""

    @abstractmethod
    def commit(self, metadata: bytes, files: Iterable[str]) -> None:
        """The coordinator: the metadata file appears; data files that are not in ``files`` are no longer needed."""

    @abstractmethod
    def discard(self, names: Iterable[str]) -> None:
        """Remove files of a save that failed, as far as that is possible; never raises."""

    @abstractmethod
    def end(self) -> None:
        """The coordinator, whatever happened: the save is over."""


class StorageReader(ABC):
    """Reads a checkpoint."""

    #: Whether a replica costs less to get from another rank than to read again: true for storage far away.
    reads_are_dear: bool = False
    #: How many bytes of a chunk are read at a time, and checked while they are in the processor's cache; None: all.
    block_bytes: int | None = None
    #: The least that a read costs: chunks of at most this many bytes are read whole, and checked at once.
    page_bytes: int = 0
    #: Bytes of tensors that were read, since it was made.
    bytes_read: int = 0

    @abstractmethod
    def open(self, checkpoint_id: CheckpointId) -> None:
        """From now on files come from here."""

    @abstractmethod
    def read_metadata(self) -> bytes:
        """The metadata file; FileNotFoundError if there is none."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Bytes of a file; FileNotFoundError if there is none."""

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """Bytes of those of some files that are there."""
        found = {}
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found[name] = self.size(name)
        return found

    @abstractmethod
    def view(self, name: str, start: int, length: int) -> memoryview:
        """These bytes of a file."""

    def mapped(self, name: str, start: int, length: int) -> memoryview:
        """The same for tools, by reference where that is possible: nothing is read before one looks."""
        return self.view(name, start, length)

    def read_into(self, name: str, start: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes of a file from ``start`` on."""
        target[:] = self.view(name, start, len(target))

    def views(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        """The bytes of several ranges (start, length) of a file, in ascending order."""
        return [self.view(name, start, length) for start, length in ranges]

    def read_box(
        self, name: str, start: int, shape: Shape, offsets: Shape, sizes: Shape, out: np.ndarray[Any, Any]
    ) -> None:
        """Fill ``out`` with the box of an array of ``shape`` whose first element is at byte ``start`` of a file."""
        ranges = [
            (start + first * out.itemsize, length * out.itemsize)
            for first, length in contiguous_runs(shape, offsets, sizes)
        ]
        out[...] = np.frombuffer(b"".join(self.views(name, ranges)), out.dtype).reshape(sizes)

    @abstractmethod
    def close(self) -> None:
        """Nothing more is read."""


def local_path(checkpoint_id: CheckpointId) -> Path:
    """The directory that a path or a ``file://`` URL means."""
    text = os.fsdecode(checkpoint_id).removeprefix("file://")
    if not text:
        raise ValueError("the name of a checkpoint is empty, which would be the current directory; name a directory")
    return Path(text)


def absolute_path(checkpoint_id: CheckpointId) -> Path:
    """The same, whatever the current directory becomes."""
    return Path(os.path.abspath(local_path(checkpoint_id)))


def not_found(names: Sequence[str], place: CheckpointId) -> FileNotFoundError:
    """The error when files that other ranks have written are not where the coordinator looks for them."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return FileNotFoundError(
        f"'{names[0]}'{more}, which other ranks have written, cannot be found in '{os.fspath(place)}': the ranks do "
        "not write to the same place. Give all of them the same absolute path, of a file system that they share"
    )


def storage_for(checkpoint_id: CheckpointId) -> str:
    """ "fsspec" for a URL, "filesystem" for a path."""
    text = os.fsdecode(checkpoint_id)
    return "fsspec" if "://" in text and not text.startswith("file://") else "filesystem"


def default_writer(checkpoint_id: CheckpointId) -> StorageWriter:
    """The writer for a path or URL."""
    if storage_for(checkpoint_id) == "fsspec":
        from hyper_parallel.core.distributed_checkpoint.storage.fsspec_storage import FsspecWriter

        return FsspecWriter()
    from hyper_parallel.core.distributed_checkpoint.storage.filesystem import FileSystemWriter

    return FileSystemWriter()


def default_reader(checkpoint_id: CheckpointId) -> StorageReader:
    """The reader for a path or URL."""
    if storage_for(checkpoint_id) == "fsspec":
        from hyper_parallel.core.distributed_checkpoint.storage.fsspec_storage import FsspecReader

        return FsspecReader()
    from hyper_parallel.core.distributed_checkpoint.storage.filesystem import FileSystemReader

    return FileSystemReader()
