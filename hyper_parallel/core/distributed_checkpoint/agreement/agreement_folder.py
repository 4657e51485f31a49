"""The folder in which ranks agree through files: one that only the user who runs them can change.

Note [Whose folder it is]
The folder is beside the checkpoint, perhaps where others can write, and has a name that they can guess. So it is made
with mode 0700, and looked at each time it is opened: if it is a link, or another user's, or others can write to it,
nothing in it is read. What is opened in it is opened by name alone, without following links, without waiting, and only
as far as it is a regular file of this user of a size that a message may have. Messages are plain data
(``messages.py``), so that also a file that somebody of this user has put there runs nothing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hyper_parallel.core.distributed_checkpoint.agreement.messages import (
    MAX_MESSAGE_BYTES,
    MessageError,
    decode_message,
    encode_message,
)
from hyper_parallel.core.distributed_checkpoint.base.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.storage.file_names import is_agreement_file

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_ATTEMPTS = 100  # to write: the end of an older run removes the folder


class AgreementFolder:
    """Messages by name; ``writer`` makes the names under which this rank writes aside its own."""

    def __init__(self, path: Path, writer: str) -> None:
        self.path = path
        self._writer = writer

    def make(self) -> None:
        """Make it, if it is not there."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.path, 0o700)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """FileNotFoundError if it is not there; see Note [Whose folder it is]."""
        try:
            folder = os.open(self.path, _FOLDER)
        except FileNotFoundError:
            raise
        except OSError as error:
            is_other = error.errno in (errno.ENOTDIR, errno.ELOOP)
            raise self._refused(
                "is a link or a file, not a folder" if is_other else f"cannot be opened: {error.strerror}"
            ) from None
        try:
            facts = os.fstat(folder)
            if facts.st_uid != os.geteuid():
                raise self._refused(f"belongs to user {facts.st_uid}, not to user {os.geteuid()}, who runs this rank")
            if facts.st_mode & 0o022:
                raise self._refused(f"has the mode {stat.S_IMODE(facts.st_mode):04o}, so that others can write to it")
            yield folder
        finally:
            os.close(folder)

    def _refused(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"'{self.path}', in which the ranks would agree through files, {why}; remove it, or leave use_collectives "
            "at True"
        )

    # ---------------------------------------------------------------- messages

    def put(self, name: str, value: Any) -> None:
        """Write a message, which appears at once; TypeError for what cannot be one."""
        self.put_encoded(name, encode_message(value))

    def put_encoded(self, name: str, data: bytes) -> None:
        aside = f".{name}.{self._writer}"
        for attempt in range(_ATTEMPTS):
            try:
                with self._opened() as folder:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(aside, dir_fd=folder)
                    with open(os.open(aside, _WRITE, 0o600, dir_fd=folder), "wb") as file:
                        file.write(data)
                    os.replace(aside, name, src_dir_fd=folder, dst_dir_fd=folder)
                    return
            except FileNotFoundError:
                if attempt == _ATTEMPTS - 1:
                    raise
                self.make()

    def get(self, name: str, kind: type) -> Any:
        """The message of a name; None if there is none, MessageError if it is none of that kind."""
        data = self._read(name)
        if data is None:
            return None
        try:
            value = decode_message(data)
        except MessageError as error:
            raise MessageError(f"'{self.path / name}': {error}") from error
        if type(value) is not kind:
            raise MessageError(f"'{self.path / name}' holds a {type(value).__name__}, not a {kind.__name__}")
        return value

    def _read(self, name: str) -> bytes | None:
        try:
            with self._opened() as folder, open(os.open(name, _READ, dir_fd=folder), "rb") as file:
                facts = os.fstat(file.fileno())
                if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
                    raise MessageError(f"'{self.path / name}' is no regular file of user {os.geteuid()}")
                if facts.st_size > MAX_MESSAGE_BYTES:
                    raise MessageError(
                        f"'{self.path / name}' has {facts.st_size} bytes, and a message {MAX_MESSAGE_BYTES} at most"
                    )
                return file.read(facts.st_size)
        except FileNotFoundError:
            return None
        except OSError as error:  # a link, a socket
            raise MessageError(f"'{self.path / name}' cannot be read: {error.strerror}") from error

    # ---------------------------------------------------------------- what is there

    def holds(self, name: str) -> bool:
        return os.path.lexists(self.path / name)

    def names(self) -> list[str]:
        """The files that agreements make; others are none of ours."""
        try:
            with self._opened() as folder:
                return sorted(filter(is_agreement_file, os.listdir(folder)))
        except FileNotFoundError:
            return []

    def remove(self, *names: str) -> None:
        """Remove files, as far as they are there."""
        with contextlib.suppress(FileNotFoundError), self._opened() as folder:
            for name in names:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=folder)

    def remove_all(self) -> None:
        """Remove the files of agreements, and the folder, unless there is something else in it."""
        self.remove(*self.names())
        with contextlib.suppress(OSError):
            os.rmdir(self.path)
