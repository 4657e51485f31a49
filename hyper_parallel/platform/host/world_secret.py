"""The secret of a world, from the environment: who does not know it cannot join.

``HYPER_PARALLEL_SECRET`` is the secret itself, ``HYPER_PARALLEL_SECRET_FILE`` a file that holds it and that its owner
alone can read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping

__all__ = ["SECRET", "SECRET_FILE", "find_secret"]

SECRET = "HYPER_PARALLEL_SECRET"
SECRET_FILE = "HYPER_PARALLEL_SECRET_FILE"
_LEAST, _MOST = 16, 4096  # bytes
_ADVICE = "make one with: python -c 'import secrets; print(secrets.token_hex(32))'"


def find_secret(environment: Mapping[str, str] = os.environ) -> bytes:
    """The secret that the environment names, or nothing; ValueError for one that keeps nobody out."""
    if SECRET in environment and SECRET_FILE in environment:
        raise ValueError(f"both {SECRET} and {SECRET_FILE} are set; set one of them")
    if SECRET in environment:
        return _checked(os.fsencode(environment[SECRET]), SECRET)
    if SECRET_FILE in environment:
        path = environment[SECRET_FILE]
        return _checked(_read(path), f"{SECRET_FILE}={path}")
    return b""


def _read(path: str) -> bytes:
    """The file's bytes. The checks are of the file that was opened, whatever the path names a moment later."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ValueError(f"{SECRET_FILE}={path} cannot be read: {error.strerror}") from None
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise ValueError(f"{SECRET_FILE}={path} is not a regular file")
        if facts.st_uid != os.geteuid():
            raise ValueError(
                f"{SECRET_FILE}={path} belongs to user {facts.st_uid}, who knows the secret and can change it, and not "
                f"to user {os.geteuid()}, who runs this program; give it a file of its own"
            )
        if facts.st_mode & 0o077:
            raise ValueError(
                f"{SECRET_FILE}={path} has the mode {stat.S_IMODE(facts.st_mode):04o}, so that others can use it; run: "
                f"chmod 600 {path}"
            )
        return os.read(descriptor, _MOST + 1)
    finally:
        os.close(descriptor)


def _checked(secret: bytes, where: str) -> bytes:
    secret = secret.strip()
    if len(secret) < _LEAST:
        what = "is empty" if not secret else f"has {len(secret)} bytes, which can be guessed; {_LEAST} are the least"
        raise ValueError(f"{where} {what}; {_ADVICE}")
    if len(secret) > _MOST:
        raise ValueError(f"{where} has more than {_MOST} bytes; {_ADVICE}")
    return secret
