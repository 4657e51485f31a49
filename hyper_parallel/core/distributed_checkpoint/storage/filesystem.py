"""Checkpoints in a directory of a file system.

Note [A checkpoint is whole or absent]
Data files get names of their own for every save, so nothing that exists is ever written to. Every rank writes and
fsyncs its files and the directory; then the coordinator writes the metadata aside, fsyncs it, and renames it to
``metadata.json``. That one rename is the commit: before it the directory holds the previous checkpoint (or none) and
some files that no metadata names, after it the new one and files of the old. Either kind of leftover is removed by the
save itself, or, if it was killed, by the next save here or in a sister directory: see Note [What clean-up may remove]
in ``save_marks.py``.

Note [A rank that comes late]
When a save fails because a rank was not heard of, that rank may still be writing. So a rank looks, after each of its
files, whether the mark of the save is still there, and the coordinator takes the mark down before it looks for files
for the last time: one of the two removes the file.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Iterable
from typing import Any

import numpy as np

from hyper_parallel.core.distributed_checkpoint.base.errors import CorruptCheckpointError
from hyper_parallel.core.distributed_checkpoint.base.regular_files import open_regular, read_regular
from hyper_parallel.core.distributed_checkpoint.storage.cleanup import opened_folder, remove_files, remove_leftovers
from hyper_parallel.core.distributed_checkpoint.storage.file_boxes import PAGE, FileBoxes
from hyper_parallel.core.distributed_checkpoint.storage.file_names import (
    aside_file_name,
    is_data_file,
    lock_file_name,
    save_of,
)
from hyper_parallel.core.distributed_checkpoint.storage.save_marks import SaveMark, named_files, named_saves
from hyper_parallel.core.distributed_checkpoint.storage.storage import (
    DEFAULT_SHARD_BYTES,
    MAX_METADATA_BYTES,
    METADATA_FILE,
    Buffer,
    CheckpointId,
    StorageReader,
    StorageWriter,
    absolute_path,
    not_found,
)
from hyper_parallel.core.distributed_checkpoint.storage.write_back import begin_write_back
from hyper_parallel.platform.host.atomic_file import fsync_path
from hyper_parallel.platform.shared.region import Shape

_MAX_BUFFERS = 1024  # of one writev
_MIN_WRITE = 1 << 20  # bytes of one writev, where there are as many
_MIN_SYNC = 8 << 20  # bytes that the disk is given at a time
_MAX_MAPPED = 16 << 20  # bytes of files that a reader keeps in its memory


class FileSystemWriter(StorageWriter):
    """Writes to a directory; see Note [A checkpoint is whole or absent].

    ``sync=False`` leaves flushing to the system: faster, and a power failure may then lose a checkpoint.
    """

    def __init__(self, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES, sync: bool = True) -> None:
        if max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
        self.max_shard_bytes = max_shard_bytes
        self._sync = sync
        self._mark: SaveMark | None = None
        self._committed: int | None = None  # the inode of the metadata
        self._made_root = False

    def open(self, checkpoint_id: CheckpointId) -> None:
        self._root = absolute_path(checkpoint_id)
        if os.path.lexists(self._root) and not self._root.is_dir():
            what = "a link that leads nowhere" if self._root.is_symlink() else "a file"
            raise NotADirectoryError(f"a checkpoint is a directory, and '{self._root}' is {what}; give another name")
        self._made_root = not self._root.exists()
        self._root.mkdir(parents=True, exist_ok=True)

    def begin(self, save_name: str) -> None:
        remove_leftovers(self._root)
        self._mark = SaveMark(self._root, save_name)
        self._save_name, self._committed = save_name, None

    def write_file(self, name: str, buffers: Iterable[Buffer]) -> None:
        path = self._root / name
        mark = self._root / lock_file_name(str(save_of(name))) if is_data_file(name) else None
        if mark is not None and not mark.exists():
            raise not_found([mark.name], self._root)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
            try:
                _write_all(descriptor, buffers, self._sync)
                if self._sync:
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
            if mark is not None and not mark.exists():  # See Note [A rank that comes late].
                raise OSError(errno.ECANCELED, "the save has failed meanwhile, without this rank")
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            raise OSError(error.errno, f"cannot write the checkpoint file '{path}': {error.strerror}") from error

    def flush(self) -> None:
        if self._sync:
            fsync_path(self._root)

    def commit(self, metadata: bytes, files: Iterable[str]) -> None:
        files = set(files)
        there = set(os.listdir(self._root))
        # A list of names may be an older one where other hosts write too; the name itself is not.
        if lost := [name for name in sorted(files) if name not in there and not (self._root / name).exists()]:
            raise not_found(lost, self._root)
        aside = self._root / aside_file_name(self._save_name)
        self.write_file(aside.name, [metadata])
        if self._sync:
            fsync_path(self._root)
        assert self._mark is not None
        with opened_folder(self._root, os.O_DIRECTORY) as folder:
            replaced = named_saves(folder)
            self._mark.replaces(replaced)
            self._committed = os.lstat(aside).st_ino
            os.replace(aside, self._root / METADATA_FILE)
            if self._sync:
                fsync_path(self._root)
                fsync_path(self._root.parent)
            remove_files(folder, replaced, set(files))

    def discard(self, names: Iterable[str]) -> None:
        with contextlib.suppress(OSError), opened_folder(self._root, os.O_DIRECTORY) as folder:
            named = named_files(folder)  # The commit may have failed in its very last step.
            for name in names:
                if named is not None and name not in named:
                    with contextlib.suppress(OSError):
                        os.unlink(name, dir_fd=folder)
        with contextlib.suppress(OSError):  # A save that failed leaves no empty directory.
            self._root.rmdir()

    def end(self) -> None:
        if self._mark is not None:
            mark, self._mark = self._mark, None
            is_in_place = self._is_in_place()
            if not is_in_place:
                self._remove_own()
            mark.take_down()
            if not is_in_place:
                self._remove_own()
            self._made_root = True
        if self._made_root:
            with contextlib.suppress(OSError):  # A save that failed leaves no empty directory.
                self._root.rmdir()

    def _is_in_place(self) -> bool:
        """Whether what this save has committed is still there: another one may have replaced it."""
        with contextlib.suppress(OSError):
            return os.stat(self._root / METADATA_FILE).st_ino == self._committed
        return False

    def _remove_own(self) -> None:
        """Remove what this save has written, but for what the metadata names."""
        with contextlib.suppress(OSError), opened_folder(self._root, os.O_DIRECTORY) as folder:
            if (named := named_files(folder)) is not None:
                remove_files(folder, {self._save_name}, named)


class FileSystemReader(StorageReader):
    """Reads from a directory; see Note [Why loads do not map files] in ``file_boxes.py``.

    ``reads_are_dear`` makes replicas travel between the ranks instead of being read by each. By default that is so
    when the job spans several hosts, as ``LOCAL_WORLD_SIZE`` and ``WORLD_SIZE`` say: on one host the second read of a
    file comes from memory.
    """

    block_bytes = 1 << 20
    page_bytes = PAGE

    def __init__(self, *, reads_are_dear: bool | None = None) -> None:
        if reads_are_dear is None:
            here, world = (os.environ.get(name, "") for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
            reads_are_dear = here.isdecimal() and world.isdecimal() and int(here) < int(world)
        self.reads_are_dear = reads_are_dear
        self._maps: dict[str, tuple[mmap.mmap | None, memoryview]] = {}
        self._num_bytes_mapped = 0
        self._files: FileBoxes | None = None

    def open(self, checkpoint_id: CheckpointId) -> None:
        self._root = absolute_path(checkpoint_id)
        self._files = FileBoxes(self._root)

    def read_metadata(self) -> bytes:
        return read_regular(self._root / METADATA_FILE, MAX_METADATA_BYTES)

    def size(self, name: str) -> int:
        return os.stat(self._root / name).st_size

    def view(self, name: str, start: int, length: int) -> memoryview:
        data = memoryview(bytearray(length))
        self.read_into(name, start, data)
        return data

    def read_into(self, name: str, start: int, target: memoryview) -> None:
        assert self._files is not None
        self._files.read(name, start, target)

    def read_box(
        self, name: str, start: int, shape: Shape, offsets: Shape, sizes: Shape, out: np.ndarray[Any, Any]
    ) -> None:
        assert self._files is not None
        self._files.read_box(name, start, shape, offsets, sizes, out)

    def mapped(self, name: str, start: int, length: int) -> memoryview:
        if name not in self._maps:
            self._maps[name] = self._map(name)
        self._num_bytes_mapped += length
        if self._num_bytes_mapped > _MAX_MAPPED:
            self._let_go()
            self._num_bytes_mapped = length
        view = self._maps[name][1][start : start + length]
        if len(view) != length:
            raise CorruptCheckpointError(
                f"'{self._root / name}' ends at byte {start + len(view)} where {start + length} are expected; it was "
                "cut short. Load another checkpoint"
            )
        return view

    def _map(self, name: str) -> tuple[mmap.mmap | None, memoryview]:
        with open_regular(self._root / name) as file:
            if os.fstat(file.fileno()).st_size == 0:
                return None, memoryview(b"")
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return mapped, memoryview(mapped)

    def _let_go(self) -> None:
        """Pages that were looked at count as this process's memory until it says that it does not need them."""
        for mapped, _ in self._maps.values():
            if mapped is not None:
                mapped.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        for mapped, view in self._maps.values():
            with contextlib.suppress(BufferError):  # Someone still looks at it: the map ends with the last look.
                view.release()
                if mapped is not None:
                    mapped.close()
        self._maps.clear()
        if self._files is not None:
            self._files.close()


def _write_all(descriptor: int, buffers: Iterable[Buffer], begin_sync: bool) -> None:
    """Write the buffers; with ``begin_sync`` the disk works while they are written, so that fsync has less to do."""
    batch: list[memoryview] = []
    in_batch = written = begun = 0
    for buffer in buffers:
        if not len(buffer):
            continue
        batch.append(memoryview(buffer).cast("B"))
        in_batch += len(buffer)
        if in_batch >= _MIN_WRITE or len(batch) == _MAX_BUFFERS:
            _write_batch(descriptor, batch)
            batch, in_batch, written = [], 0, written + in_batch
            if begin_sync and written - begun >= _MIN_SYNC:
                begin_write_back(descriptor, begun, written - begun)
                begun = written
    if batch:
        _write_batch(descriptor, batch)


def _write_batch(descriptor: int, views: list[memoryview]) -> None:
    while views:
        written = os.writev(descriptor, views)
        while views and written >= len(views[0]):
            written -= len(views.pop(0))
        if written:
            views[0] = views[0][written:]
