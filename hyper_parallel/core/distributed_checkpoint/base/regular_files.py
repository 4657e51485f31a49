"""Opening the files of a checkpoint that someone else made: only regular files, without waiting, with a limit of size.

Note [What may stand where a file should]
A folder can hold a FIFO or a device under the name of a checkpoint's file: opening the one waits for a writer that
never comes, reading the other never ends. So what is there is looked at before it is opened, opened without waiting,
and looked at once more through the descriptor. Links are followed: the cache of the Hugging Face hub consists of links
out of the folder, and people link shards to save space. Whatever a link leads to is held to the same rule, and names
that come from a file's content are checked by their readers to be plain names in the folder. A file of the kernel's (as
in ``/proc``) calls itself regular and empty, and is read as such: no more is read than the size that a file states.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

from hyper_parallel.core.distributed_checkpoint.base.errors import CorruptCheckpointError

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


def open_regular(path: str | os.PathLike[str], folder: int | None = None) -> BinaryIO:
    """Open a regular file for reading; see Note [What may stand where a file should]. Never waits.

    ``folder`` is the descriptor of an open folder that the path starts from.
    """
    try:
        # before the open: that alone can have an effect on a device
        _require_regular(path, os.stat(path, dir_fd=folder).st_mode)
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=folder)
    except (FileNotFoundError, NotADirectoryError):
        what = "leads nowhere" if os.path.islink(path) else "does not exist"
        raise FileNotFoundError(f"'{os.fspath(path)}' {what}") from None
    except ValueError as error:  # a NUL in the name, or characters that no name has
        raise CorruptCheckpointError(f"{os.fspath(path)!r} cannot be the name of a file: {error}") from None
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise CorruptCheckpointError(f"'{os.fspath(path)}' cannot be a file: {error.strerror}") from None
        raise
    try:
        _require_regular(path, os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: str | os.PathLike[str], limit: int, folder: int | None = None) -> bytes:
    """All bytes of a regular file that has no more than ``limit``; a larger one is refused before it is read."""
    with open_regular(path, folder) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise CorruptCheckpointError(
                f"'{os.fspath(path)}' has {size} bytes, and such a file has no more than {limit}; it is damaged or is "
                "something else"
            )
        data = file.read(size)
    if len(data) != size:
        raise CorruptCheckpointError(f"'{os.fspath(path)}' was cut short while it was read; copy it again")
    return data


def _require_regular(path: str | os.PathLike[str], mode: int) -> None:
    if not stat.S_ISREG(mode):
        found = next((what for is_kind, what in _KINDS if is_kind(mode)), "something else")
        raise CorruptCheckpointError(f"'{os.fspath(path)}' is {found} where a file is expected; it is not read")
