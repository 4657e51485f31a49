"""Replacing a file as a whole: readers, also those after a crash, find the old file or the new one, never a part.

Note [A file is whole or absent]
The new content is written aside, under another name in the same directory (a rename is atomic within one file system
only). Then the file is fsynced, so that its content is on disk before its name is; then renamed over the old one; then
the directory is fsynced, so that the new name survives a power failure too. A writer that is killed leaves only a file
ending in ``PARTIAL_SUFFIX``. It holds a lock on that file for as long as it lives, which the kernel drops with the
process, so the next writer of the same target can tell a leftover from the work of a living neighbour and removes
leftovers without asking.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["PARTIAL_SUFFIX", "atomic_file", "fsync_path", "remove_leftovers"]

PARTIAL_SUFFIX = ".hyper-parallel-partial"


@contextmanager
def atomic_file(path: str | os.PathLike) -> Iterator[Path]:
    """``with atomic_file(path) as aside:`` write ``aside``; it becomes ``path`` when the block ends without an error.

    ``aside`` exists and is empty; the block may open it by name as often as it likes but must not delete or rename it.
    A symbolic link is followed: what it points to is replaced.
    """
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise IsADirectoryError(f"cannot write the file '{target}': it is a directory; give the name of a file in it")
    if not target.parent.is_dir():
        raise FileNotFoundError(
            f"cannot write the file '{target}': the directory '{target.parent}' does not exist; create it first"
        )
    remove_leftovers(target)
    aside, lock = _create_aside(target)
    try:
        yield aside
        # By name: should the block have made a new file of that name after all, that is the one to flush.
        fsync_path(aside)
        os.replace(aside, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(aside)
        raise
    finally:
        os.close(lock)
    fsync_path(target.parent)


def remove_leftovers(path: str | os.PathLike) -> list[Path]:
    """Delete what killed writers of ``path`` left behind (files that a living one is writing stay); says which."""
    target = Path(os.path.realpath(path))
    removed = []
    is_leftover = re.compile(re.escape(f".{target.name}.") + "[0-9a-f]+" + re.escape(PARTIAL_SUFFIX)).fullmatch
    for leftover in [path for path in target.parent.iterdir() if is_leftover(path.name)]:
        with suppress(OSError):  # It is gone, or not ours to open, or a link.
            if not stat.S_ISREG(os.lstat(leftover).st_mode):
                continue
            descriptor = os.open(leftover, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                if _try_lock(descriptor):
                    os.unlink(leftover)
                    removed.append(leftover)
            finally:
                os.close(descriptor)
    return removed


def _create_aside(target: Path) -> tuple[Path, int]:
    while True:
        aside = target.parent / f".{target.name}.{secrets.token_hex(8)}{PARTIAL_SUFFIX}"
        # Not tempfile: its files are readable by their owner only, a checkpoint follows the umask.
        lock = os.open(aside, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            if _try_lock(lock) and os.fstat(lock).st_nlink > 0:
                return aside, lock
        except BaseException:
            os.close(lock)
            os.unlink(aside)
            raise
        os.close(lock)  # a neighbour took it for a leftover in the moment before the lock, and removes it


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def fsync_path(path: Path) -> None:
    """Wait until a file, or which names a directory has, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
