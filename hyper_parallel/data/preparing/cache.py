"""Prepared data on disk: a folder is whole or absent, and made once, however many processes ask for it.

Note [A prepared folder is whole or absent]
It is written aside, under a name that begins with a dot, with a file that has the size and checksum of all others; then
it is renamed. Processes of one host wait for each other at a lock, which the kernel drops with its owner, so what lies
aside while one holds the lock is left over from a killed one and is removed. Hosts that share a file system without
locks may both prepare; the second rename fails, and the first folder is taken.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import crc32c

from hyper_parallel.platform.host.atomic_file import atomic_file, fsync_path

__all__ = ["META", "check_folder", "default_cache", "prepare_folder", "remembered_digest", "write_meta"]

META = "meta.json"
FORMAT = 1
_OWN = "crc32c"  # the checksum of all else that meta.json says
CHECKED_BYTES = 1 << 30  # above, an opened folder is checked by the sizes of its files only
_WAIT_SECONDS = 0.1
_SETTLED_NS = 2_000_000_000  # a file younger than this may change again within the resolution of its time

Waiting = Callable[[], None]


def default_cache() -> Path:
    """``HYPER_PARALLEL_CACHE``, or a folder in the user's cache."""
    named = os.environ.get("HYPER_PARALLEL_CACHE")
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hyper-parallel"


def prepare_folder(
    root: Path, name: str, build: Callable[[Path], dict[str, Any]], waiting: Waiting = lambda: None
) -> tuple[Path, dict[str, Any]]:
    """(the folder ``root / name``, its facts): as it is when it is whole, else made by ``build(folder) -> facts``.

    A damaged one is made again, with a warning. ``waiting`` is called while another process prepares it, and may raise.
    """
    folder = root / name
    if folder.exists() and not (damage := find_damage(folder)):
        return folder, read_meta(folder)
    try:
        root.mkdir(parents=True, exist_ok=True)
        lock = os.open(root / f".{name}.lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise type(error)(
            f"cannot write prepared data to '{root}': {error.strerror}; name another folder as cache, or set "
            "HYPER_PARALLEL_CACHE"
        ) from error
    with _alone(lock, waiting):
        for leftover in root.glob(f".{name}.*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)
        if folder.exists():
            damage = find_damage(folder)
            if not damage:
                return folder, read_meta(folder)
            warnings.warn(f"the prepared data in '{folder}' is damaged ({damage}); it is made again", stacklevel=2)
        return folder, _make(root, name, build)


def _make(root: Path, name: str, build: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    aside = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".partial", dir=root))
    try:
        write_meta(aside, build(aside))
        aside.chmod(0o777 & ~_umask())  # mkdtemp's folders are their owner's only
        folder = root / name
        if folder.exists():
            shutil.rmtree(folder)
        try:
            os.rename(aside, folder)
        except OSError:
            if not folder.exists() or find_damage(folder):
                raise
        fsync_path(root)
        return read_meta(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextlib.contextmanager
def _alone(descriptor: int, waiting: Waiting) -> Iterator[None]:
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waiting()
                time.sleep(_WAIT_SECONDS)
            except OSError:
                break  # no locks here: see the note
        yield
    finally:
        os.close(descriptor)


def write_meta(folder: Path, facts: dict[str, Any]) -> None:
    """Put the facts, and size and checksum of every file, into a folder, and all of it on disk."""
    files = {}
    for path in sorted(folder.iterdir()):
        fsync_path(path)
        files[path.name] = {"bytes": path.stat().st_size, "crc32c": _checksum(path)}
    meta = {"format": FORMAT, **facts, "files": files}
    with atomic_file(folder / META) as aside:
        aside.write_text(_text(meta | {_OWN: _sum(meta)}))


def read_meta(folder: Path) -> dict[str, Any]:
    """The facts of a prepared folder."""
    meta = json.loads((folder / META).read_bytes())
    if not isinstance(meta, dict) or meta.get("format") != FORMAT or not isinstance(meta.get("files"), dict):
        raise ValueError(f"'{folder / META}' is not of this version of HyperParallel")
    if meta.pop(_OWN, None) != _sum(meta):
        raise ValueError(f"the content of {META} has changed")
    return meta


def _sum(meta: dict[str, Any]) -> int:
    return int(crc32c.crc32c(_text(meta).encode()))


def _text(meta: dict[str, Any]) -> str:
    return json.dumps(meta, indent=1, sort_keys=True)


def find_damage(folder: Path, *, thorough: bool = False) -> str:
    """What is wrong with a prepared folder, "" if nothing: sizes, and checksums (of all sizes if ``thorough``)."""
    try:
        files = read_meta(folder)["files"]
        for name, facts in files.items():
            size = (folder / name).stat().st_size
            if size != facts["bytes"]:
                return f"{name} has {size} bytes instead of {facts['bytes']}"
        if thorough or sum(facts["bytes"] for facts in files.values()) <= CHECKED_BYTES:
            for name, facts in files.items():
                if _checksum(folder / name) != facts["crc32c"]:
                    return f"the content of {name} has changed"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def check_folder(folder: Path, *, thorough: bool = False) -> dict[str, Any]:
    """The facts of a prepared folder that is whole; an error for any other."""
    if damage := find_damage(folder, thorough=thorough):
        raise ValueError(
            f"'{folder}' holds no whole prepared data ({damage}); remove it and run hyper-parallel data prepare again"
        )
    return read_meta(folder)


def remembered_digest(root: Path, file: Path, digest: Callable[[Path], str]) -> str:
    """``digest(file)``, remembered in the cache until size, time or place of the file changes."""
    before = file.stat()
    key = [str(file.resolve()), before.st_size, before.st_mtime_ns, before.st_ino]
    note = root / "digests" / f"{crc32c.crc32c(json.dumps(key).encode()):08x}.json"
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(note.read_bytes())
        if known["key"] == key:
            return str(known["digest"])
    found = digest(file)
    if time.time_ns() - before.st_mtime_ns > _SETTLED_NS:
        with contextlib.suppress(OSError):  # a cache that cannot be written to is an error elsewhere
            note.parent.mkdir(parents=True, exist_ok=True)
            with atomic_file(note) as aside:
                aside.write_text(json.dumps({"key": key, "digest": found}))
    return found


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            value = crc32c.crc32c(block, value)
    return value


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
