"""Files that say that a process lives: it holds them locked, and the kernel drops the lock when the process ends.

On one host that is certain. Between hosts it depends on the file system; where files cannot be locked every such file
counts as held, so nothing is taken for the leftover of a process that has ended. So does what is no regular file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_FLAGS = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK


def hold_lock(path: Path) -> int | None:
    """Make a file, locked until what this returns is closed or the process ends; None where files cannot be locked."""
    while True:
        descriptor = os.open(path, _FLAGS | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # waits for nobody but those who look, below
        except OSError:
            os.close(descriptor)
            return None
        try:
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        except FileNotFoundError:
            pass  # Somebody took it for a leftover before it was locked, and removed it.
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock of a file; False when there is no such file."""
    try:
        with locked(path) as descriptor:
            return descriptor is None
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def locked(path: str | os.PathLike[str], directory: int | None = None) -> Iterator[int | None]:
    """A file that nobody holds, open and locked while this lasts; None if it is held, or cannot be told."""
    descriptor = _opened(path, directory)
    if descriptor is None:
        yield None
        return
    try:
        yield descriptor if _lock(descriptor) else None
    finally:
        os.close(descriptor)


def _opened(path: str | os.PathLike[str], directory: int | None) -> int | None:
    try:
        is_file = stat.S_ISREG(os.lstat(path, dir_fd=directory).st_mode)
        return os.open(path, _FLAGS, dir_fd=directory) if is_file else None
    except FileNotFoundError:
        raise
    except OSError:  # somebody else's, or not to be told
        return None


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
