"""Checkpoints at any URL that fsspec knows: object stores, remote file systems, ``memory://``.

The commit is the same as in a directory: the metadata file appears last, moved into place from aside, which stores do
at once.

Note [Saves that meet in a store]
There are no locks far away. A save puts up a mark before its first file and takes it down at its end, and whoever
commits removes the files that the metadata does not name, but for those of saves whose mark is up. Of two saves to one
URL at a time the one that commits last stays, whole. The mark of a save that was killed says which process it was: on
the same host it is known to have ended, elsewhere it counts as killed when its mark is a day old by the store's clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

import fsspec

from hyper_parallel.core.distributed_checkpoint.errors import CorruptCheckpointError
from hyper_parallel.core.distributed_checkpoint.file_names import aside_file_name, lock_file_name, save_of
from hyper_parallel.core.distributed_checkpoint.storage import (
    DEFAULT_SHARD_BYTES,
    METADATA_FILE,
    Buffer,
    CheckpointId,
    StorageReader,
    StorageWriter,
    not_found,
)
from hyper_parallel.platform.shared_segment import ProcessIdentity

_FORGOTTEN = 24 * 3600.0  # seconds after which a save of another host counts as killed
_SAME_HOST = ("hostname", "boot_id", "pid_namespace")


def _identity() -> dict[str, Any]:
    return dataclasses.asdict(ProcessIdentity.current())


class FsspecWriter(StorageWriter):
    """Writes to a URL. ``storage_options`` go to the file system, credentials for instance."""

    def __init__(self, *, max_shard_bytes: int = DEFAULT_SHARD_BYTES, **storage_options: Any) -> None:
        if max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
        self.max_shard_bytes = max_shard_bytes
        self._options = storage_options
        self._save_name: str | None = None

    def open(self, checkpoint_id: CheckpointId) -> None:
        self._fs, root = fsspec.core.url_to_fs(os.fspath(checkpoint_id), **self._options)
        self._root = root.rstrip("/")
        self._fs.makedirs(self._root, exist_ok=True)

    def begin(self, save_name: str) -> None:
        self._fs.pipe_file(f"{self._root}/{lock_file_name(save_name)}", json.dumps(_identity()).encode())
        self._save_name = save_name

    def write_file(self, name: str, buffers: Iterable[Buffer]) -> None:
        path = f"{self._root}/{name}"
        try:
            with self._fs.open(path, "wb") as file:
                for buffer in buffers:
                    file.write(memoryview(buffer).cast("B") if len(buffer) else b"")
        except OSError as error:
            self.discard([name])
            raise OSError(error.errno, f"cannot write the checkpoint file '{path}': {error}") from error

    def flush(self) -> None:
        pass

    def commit(self, metadata: bytes, files: Iterable[str]) -> None:
        assert self._save_name is not None
        self._fs.invalidate_cache(self._root)
        if lost := list(set(files) - set(self._names())):
            raise not_found(sorted(lost), self._root)
        aside = aside_file_name(self._save_name)
        self.write_file(aside, [metadata])
        self._fs.mv(f"{self._root}/{aside}", f"{self._root}/{METADATA_FILE}")
        # The names before the metadata, which `discard` reads: a save that ends in between is found in one of them.
        self._fs.invalidate_cache(self._root)
        saves = {name: save for name in self._names() if (save := save_of(name)) is not None}
        own = lock_file_name(self._save_name)
        marked = {save for name, save in saves.items() if name == lock_file_name(save) != own}
        running = set(filter(self._is_running, marked))
        self.discard([name for name, save in saves.items() if save not in running and name != own])

    def _names(self) -> list[str]:
        return [path.rstrip("/").rpartition("/")[2] for path in self._fs.ls(self._root, detail=False)]

    def _is_running(self, save: str) -> bool:
        """Whether a save whose mark is up may still be at work."""
        mark, own = (f"{self._root}/{lock_file_name(name)}" for name in (save, self._save_name or ""))
        try:
            who, here = json.loads(self._fs.cat_file(mark)), _identity()
            if all(who[key] == here[key] for key in _SAME_HOST):
                return ProcessIdentity(**who).is_alive()
            return (self._fs.modified(own) - self._fs.modified(mark)).total_seconds() < _FORGOTTEN
        except Exception:  # It was taken down, or the store has no clock.
            return True

    def discard(self, names: Iterable[str]) -> None:
        try:
            committed = self._fs.cat_file(f"{self._root}/{METADATA_FILE}")
        except Exception:
            committed = b""
        for name in names:
            if name.encode() not in committed:
                with contextlib.suppress(Exception):
                    self._fs.rm_file(f"{self._root}/{name}")

    def end(self) -> None:
        if self._save_name is not None:
            with contextlib.suppress(Exception):
                self._fs.rm_file(f"{self._root}/{lock_file_name(self._save_name)}")
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
        self._fs, root = fsspec.core.url_to_fs(os.fspath(checkpoint_id), **self._options)
        self._root = root.rstrip("/")
        self._fs.invalidate_cache(self._root)  # Others may have written since this process has looked.

    def read_metadata(self) -> bytes:
        return self._fs.cat_file(f"{self._root}/{METADATA_FILE}")

    def size(self, name: str) -> int:
        return int(self._fs.size(f"{self._root}/{name}"))

    def view(self, name: str, start: int, length: int) -> memoryview:
        return self.views(name, [(start, length)])[0]

    def views(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[memoryview]:
        path = f"{self._root}/{name}"
        merged = _merged([(start, length) for start, length in ranges if length], self._max_gap)
        starts, ends = [start for start, _ in merged], [start + length for start, length in merged]
        parts = self._fs.cat_ranges([path] * len(merged), starts, ends, on_error="raise") if merged else []
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
    """The names of the checkpoints under a URL."""
    fs, root = fsspec.core.url_to_fs(url, **storage_options)
    root = root.rstrip("/")
    fs.invalidate_cache(root)
    try:
        found = fs.ls(root, detail=False)
    except FileNotFoundError:
        return []
    names = [path.rstrip("/").rpartition("/")[2] for path in found]
    return [name for name in names if fs.exists(f"{root}/{name}/{METADATA_FILE}")]


def remove_checkpoint(url: str, **storage_options: Any) -> None:
    """Remove a checkpoint; the metadata first, so that it is never half there."""
    fs, root = fsspec.core.url_to_fs(url, **storage_options)
    root = root.rstrip("/")
    fs.rm_file(f"{root}/{METADATA_FILE}")
    fs.rm(root, recursive=True)
