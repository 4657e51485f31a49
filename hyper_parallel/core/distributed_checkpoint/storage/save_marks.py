"""Marks: what tells the files of a save that was killed from all other files.

Note [What clean-up may remove]
The name of a data file says which save wrote it, not whether it is still wanted: a checkpoint that somebody copies into
a folder looks, until its metadata has arrived, just like one whose save was killed. So a save puts up a mark, the file
``.NAME.saving``, before its first data file, holds it locked while it lives, and takes it down after its last file is
committed or gone. What is removed are the files of a save whose mark is there and held by nobody, but for those that
the metadata names; the mark goes last, so that a clean-up that is killed itself is taken up by the next one.

A mark would be copied along with its folder, so its first line tells the inodes of the folder and of itself, which no
copy has, be it one of hard links. A mark that tells others is not ours, and neither are the files of its save. Before
a save commits, it adds a line with the saves that it replaces: their files are its own to remove from then on, if they
are older than the line. A line that was not written to its end does not count.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from hyper_parallel.core.distributed_checkpoint.base.errors import CorruptCheckpointError
from hyper_parallel.core.distributed_checkpoint.base.regular_files import read_regular
from hyper_parallel.core.distributed_checkpoint.storage.file_locks import hold_lock, locked
from hyper_parallel.core.distributed_checkpoint.storage.file_names import lock_file_name, save_of
from hyper_parallel.core.distributed_checkpoint.storage.storage import MAX_METADATA_BYTES, METADATA_FILE

_MAX_BYTES = 1 << 20  # of a mark
_NAME = re.compile(rb"[0-9a-f]{20}-r[0-9]{5,10}-[0-9]{3,10}\.safetensors")
_FILE = re.compile(rb'\["([0-9a-f]{20})-r[0-9]{5,10}-[0-9]{3,10}\.safetensors",')  # in JSON never inside of a string


class SaveMark:
    """The mark of a save (or removal) of this process, put up when it is made."""

    def __init__(self, folder: Path, save_name: str) -> None:
        self._path = folder / lock_file_name(save_name)
        self._lock = hold_lock(self._path)
        try:
            self._add({"folder": os.stat(folder).st_ino, "mark": os.stat(self._path).st_ino})
        except BaseException:
            self.take_down()
            raise

    def replaces(self, saves: Iterable[str]) -> None:
        """Say that these saves are no longer needed once this one is committed."""
        self._add({"replaces": sorted(saves)})

    def _add(self, line: dict[str, Any]) -> None:
        data = json.dumps(line).encode() + b"\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW)
        try:
            while data:
                data = data[os.write(descriptor, data) :]
        except OSError as error:
            raise OSError(error.errno, f"cannot write the checkpoint file '{self._path}': {error.strerror}") from error
        finally:
            os.close(descriptor)

    def take_down(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class EndedSave(NamedTuple):
    """A save that has ended without taking its mark down: what it replaced, and when (ns) it said so."""

    name: str
    replaces: frozenset[str]
    time: int


@contextlib.contextmanager
def ended_save(folder: int, save_name: str) -> Iterator[EndedSave | None]:
    """The save whose mark is in an open folder; None if it lives, or the mark is not ours. It does not come back while
    this lasts."""
    with contextlib.ExitStack() as stack:
        mark = None
        with contextlib.suppress(FileNotFoundError):
            mark = stack.enter_context(locked(lock_file_name(save_name), folder))
        yield None if mark is None else _read(mark, folder, save_name)


def _read(mark: int, folder: int, save_name: str) -> EndedSave | None:
    described = os.fstat(mark)
    lines = os.pread(mark, _MAX_BYTES, 0).split(b"\n")[:-1]
    if not lines and described.st_nlink and not _has_files(folder, save_name):
        return EndedSave(save_name, frozenset(), described.st_mtime_ns)  # killed before it could say whose it is
    try:
        first, *rest = map(json.loads, lines)
        if first != {"folder": os.fstat(folder).st_ino, "mark": described.st_ino} or not described.st_nlink:
            return None
        replaced = frozenset(name for line in rest for name in line["replaces"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return EndedSave(save_name, replaced, described.st_mtime_ns)


def _has_files(folder: int, save_name: str) -> bool:
    return any(save_of(name) == save_name and name != lock_file_name(save_name) for name in os.listdir(folder))


# ---------------------------------------------------------------- what metadata names


def names_in(metadata: bytes) -> set[str]:
    """The data files that metadata, whole or damaged, may speak of."""
    return {name.decode() for name in _NAME.findall(metadata)}


def saves_in(metadata: bytes) -> set[str]:
    """The saves whose files metadata lists."""
    return {name.decode() for name in _FILE.findall(metadata)}


def named_files(folder: int) -> set[str] | None:
    """The data files that the metadata in an open folder names; None if that cannot be told."""
    try:
        return names_in(_metadata(folder))
    except (OSError, CorruptCheckpointError):
        return None


def named_saves(folder: int) -> set[str]:
    """The saves whose files the metadata in an open folder lists; none if that cannot be told."""
    try:
        return saves_in(_metadata(folder))
    except (OSError, CorruptCheckpointError):
        return set()


def _metadata(folder: int) -> bytes:
    try:
        return read_regular(METADATA_FILE, MAX_METADATA_BYTES, folder)
    except FileNotFoundError:
        if METADATA_FILE in os.listdir(folder):
            raise  # a link that leads nowhere, at the moment
        return b""
