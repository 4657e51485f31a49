"""Files that say that a process lives: it holds them locked, and the kernel drops the lock when the process ends.

On one host that is certain. Between hosts it depends on the file system; where files cannot be locked every such file
counts as held, so nothing is taken for the leftover of a process that has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


def hold_lock(path: Path) -> int | None:
    """Make a file, locked until what this returns is closed or the process ends; None where files cannot be locked."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # waits for nobody but those who look, below
        except OSError:
            os.close(descriptor)
            return None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(path)):
                return descriptor
        os.close(descriptor)  # Somebody took it for a leftover before it was locked, and removed it.


def is_held(path: Path) -> bool:
    """Whether somebody holds the lock of a file; False when there is no such file."""
    with taken(path) as is_free:
        return not is_free


@contextlib.contextmanager
def taken(path: Path) -> Iterator[bool]:
    """Whether nobody holds the lock of a file, or there is no such file; nobody will while this lasts."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        yield True
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_free = True
    except OSError:
        is_free = False
    try:
        yield is_free
    finally:
        os.close(descriptor)
