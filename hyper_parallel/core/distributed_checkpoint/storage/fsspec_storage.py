"""Checkpoints at any URL that fsspec knows: object stores, remote file systems, ``memory://``.

The commit is the same as in a directory: the metadata file appears last, moved into place from aside, which stores do
at once.

Note [Saves that meet in a store]
There are no locks far away. A save puts up a mark before its first file and takes it down at its end. Of two saves to
one URL at a time the one that commits last stays, whole. A save that commits removes the files of the one that it
replaces and those of killed saves, but for what the metadata names. The mark of a save says which process it is, which
folder it was made for (a copy of it elsewhere says nothing) and, before the commit, which saves it replaces. On the
same host a process is known to have ended; elsewhere a save counts as killed when its mark is a day old by the store's
clock. Files without a mark are nobody's to remove: somebody may be copying them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

import fsspec

from hyper_parallel.core.distributed_checkpoint.base.errors import CorruptCheckpointError
from hyper_parallel.core.distributed_checkpoint.base.index_frame import FRAME_START
from hyper_parallel.core.distributed_checkpoint.storage.file_names import (
    aside_file_name,
    is_mark,
    lock_file_name,
    new_save_name,
    save_of,
)
from hyper_parallel.core.distributed_checkpoint.storage.save_marks import names_in, saves_in
from hyper_parallel.core.distributed_checkpoint.storage.storage import (
    DEFAULT_SHARD_BYTES,
    MAX_METADATA_BYTES,
    METADATA_FILE,
    Buffer,
    CheckpointId,
    StorageReader,
    StorageWriter,
    not_found,
)
from hyper_parallel.platform.host.shared_segment import ProcessIdentity

_FORGOTTEN = 24 * 3600.0  # seconds after which a save of another host counts as killed
_SAME_HOST = ("hostname", "boot_id", "pid_namespace")


class _Folder:
    """A folder of a store, and the marks of saves in it."""

    def __init__(self, url: CheckpointId, options: dict[str, Any]) -> None:
        self.fs, root = fsspec.core.url_to_fs(os.fspath(url), **options)
        self.root = root.rstrip("/")

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def names(self) -> list[str]:
        self.fs.invalidate_cache(self.root)
        return [path.rstrip("/").rpartition("/")[2] for path in self.fs.ls(self.root, detail=False)]

    def metadata(self) -> bytes:
        """The metadata; FileNotFoundError if there is none."""
        path = self.path(METADATA_FILE)
        if (size := int(self.fs.size(path))) > MAX_METADATA_BYTES:
            raise CorruptCheckpointError(f"'{path}' has {size} bytes, and metadata has at most {MAX_METADATA_BYTES}")
        return self.fs.cat_file(path)

    def put_mark(self, save_name: str, replaces: Iterable[str] = ()) -> None:
        process = dataclasses.asdict(ProcessIdentity.current())
        content = {"folder": self.root, "process": process, "replaces": sorted(replaces)}
        self.fs.pipe_file(self.path(lock_file_name(save_name)), json.dumps(content).encode())

    def replaced_by(self, save_name: str, own_name: str) -> set[str] | None:
        """The saves that one that has ended has replaced; None if it may still be at work, or is not of this folder."""
        mark, own = self.path(lock_file_name(save_name)), self.path(lock_file_name(own_name))
        try:
            found = json.loads(self.fs.cat_file(mark))
            if found["folder"] != self.root:
                return None
            process, here = found["process"], dataclasses.asdict(ProcessIdentity.current())
            if all(process[key] == here[key] for key in _SAME_HOST):
                is_over = not ProcessIdentity(**process).is_alive()
            else:
                is_over = (self.fs.modified(own) - self.fs.modified(mark)).total_seconds() >= _FORGOTTEN
            return set(found["replaces"]) if is_over else None
        except Exception:  # It was taken down, or is no mark of ours, or the store has no clock.
            return None

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            with contextlib.suppress(Exception):
                self.fs.rm_file(self.path(name))


class FsspecWriter(StorageWriter):
    """Writes to a URL. ``storage_options`` go to the file system, credentials for instance."""

    def __init__(self, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES, **storage_options: Any) -> None:
        if max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
        self.max_shard_bytes = max_shard_bytes
        self._options = storage_options
        self._save_name: str | None = None

    def open(self, checkpoint_id: CheckpointId) -> None:
        self._folder = _Folder(checkpoint_id, self._options)
        self._folder.fs.makedirs(self._folder.root, exist_ok=True)

    def begin(self, save_name: str) -> None:
        self._folder.put_mark(save_name)
        self._save_name, self._is_committed = save_name, False

    def write_file(self, name: str, buffers: Iterable[Buffer]) -> None:
        path = self._folder.path(name)
        try:
            with self._folder.fs.open(path, "wb") as file:
                for buffer in buffers:
                    file.write(memoryview(buffer).cast("B") if len(buffer) else b"")
        except OSError as error:
            self.discard([name])
            raise OSError(error.errno, f"cannot write the checkpoint file '{path}': {error}") from error

    def flush(self) -> None:
        pass

    def commit(self, metadata: bytes, files: Iterable[str]) -> None:
        assert self._save_name is not None
        folder = self._folder
        if lost := list(set(files) - set(folder.names())):
            raise not_found(sorted(lost), folder.root)
        aside = aside_file_name(self._save_name)
        self.write_file(aside, [metadata])
        replaced = self._replaced()
        folder.put_mark(self._save_name, replaced)
        folder.fs.mv(folder.path(aside), folder.path(METADATA_FILE))
        self._is_committed = True
        # The names before the metadata, which `discard` reads: a save that ends in between is found in one of them.
        names, ended = folder.names(), set()
        for save in {str(save_of(name)) for name in names if is_mark(name)} - {self._save_name}:
            if (others := folder.replaced_by(save, self._save_name)) is not None:
                ended.add(save)
                replaced |= others
        self.discard([name for name in names if save_of(name) in replaced | ended and not is_mark(name)])
        self.discard([lock_file_name(save) for save in ended])

    def _replaced(self) -> set[str]:
        try:
            return saves_in(self._folder.metadata())
        except Exception:  # There is none; or what it lists is not known, and stays.
            return set()

    def discard(self, names: Iterable[str]) -> None:
        names = list(names)
        if not names:
            return
        try:
            named = names_in(self._folder.metadata())
        except FileNotFoundError:
            named = set()
        except Exception:
            return  # What it names is not known.
        self._folder.remove(name for name in names if name not in named)

    def end(self) -> None:
        if self._save_name is not None:
            mark = lock_file_name(self._save_name)
            if not self._is_committed:
                with contextlib.suppress(Exception):
                    self.discard(n for n in self._folder.names() if save_of(n) == self._save_name and n != mark)
            self._folder.remove([mark])
        self._save_name = None


class FsspecReader(StorageReader):
    """Reads from a URL. Replicas are read once and travel between the ranks (``reads_are_dear``).

    Of a chunk that is needed in part only that part is read. Where it lies in many small ranges, those with at most
    ``max_gap`` bytes between them are read as one: more bytes, fewer requests.
    """

    def __init__(self, *, reads_are_dear: bool = True, max_gap: int = 0, **storage_options: Any) -> None:
        self.reads_are_dear = reads_are_dear
        self._max_gap = max_gap
        self._options = storage_options

    def open(self, checkpoint_id: CheckpointId) -> None:
        self._folder = _Folder(checkpoint_id, self._options)
        self._folder.fs.invalidate_cache(self._folder.root)  # Others may have written since this process has looked.

    def read_metadata(self) -> bytes:
        return self._folder.metadata()

    def size(self, name: str) -> int:
        return int(self._folder.fs.size(self._folder.path(name)))

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        wanted = set(names)
        listed = self._folder.fs.ls(self._folder.root, detail=True)
        found = {entry["name"].rpartition("/")[2]: entry for entry in listed}
        return {name: int(found[name]["size"]) for name in wanted & found.keys()}

    def view(self, name: str, start: int, length: int) -> memoryview:
        return self.views(name, [(start, length)])[0]

    def views(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        path = self._folder.path(name)
        merged = _merged([(start, length) for start, length in ranges if length], self._max_gap)
        starts, ends = [start for start, _ in merged], [start + length for start, length in merged]
        parts = self._folder.fs.cat_ranges([path] * len(merged), starts, ends, on_error="raise") if merged else []
        for (start, length), part in zip(merged, parts, strict=True):
            if isinstance(part, BaseException):  # Some file systems give errors back, whatever they are told.
                raise part
            if len(part) != length:
                raise CorruptCheckpointError(
                    f"'{path}' gave {len(part)} bytes from {start} where {length} are expected; it was cut short. Load "
                    "another checkpoint"
                )
        found, number = [], 0
        for start, length in ranges:
            if not length:
                found.append(memoryview(b""))
                continue
            while start + length > ends[number]:
                number += 1
            found.append(memoryview(parts[number])[start - starts[number] :][:length])
        return found

    def close(self) -> None:
        pass


def _merged(ranges: Sequence[tuple[int, int]], max_gap: int) -> list[tuple[int, int]]:
    """Ascending ranges, with those put together that lie at most ``max_gap`` bytes apart."""
    merged: list[tuple[int, int]] = []
    for start, length in ranges:
        if merged and start - sum(merged[-1]) <= max_gap:
            merged[-1] = merged[-1][0], start + length - merged[-1][0]
        else:
            merged.append((start, length))
    return merged


# ---------------------------------------------------------------------------------------------------------------------
# Folders of checkpoints
# ---------------------------------------------------------------------------------------------------------------------


def checkpoint_names(url: str, **storage_options: Any) -> list[str]:
    """The names of the folders under a URL whose metadata begins as ours does."""
    folder = _Folder(url, storage_options)
    try:
        names = folder.names()
    except FileNotFoundError:
        return []
    return [name for name in names if _begins_as_ours(folder, f"{folder.root}/{name}/{METADATA_FILE}")]


def _begins_as_ours(folder: _Folder, path: str) -> bool:
    try:
        return folder.fs.cat_file(path, start=0, end=len(FRAME_START)) == FRAME_START
    except OSError:  # There is none, or it is too short for what was asked for.
        return False


def remove_checkpoint(url: str, **storage_options: Any) -> None:
    """Remove a checkpoint; the metadata first, so that it is never half there."""
    folder, name = _Folder(url, storage_options), new_save_name()
    saves = saves_in(folder.metadata())
    folder.put_mark(name, saves)  # for the next save to go by, should this be killed
    folder.fs.rm_file(folder.path(METADATA_FILE))
    folder.remove([file for file in folder.names() if save_of(file) in saves])
    folder.fs.rm(folder.root, recursive=True)
