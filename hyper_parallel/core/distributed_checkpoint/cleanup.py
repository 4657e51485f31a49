"""Which checkpoints a directory holds, the latest of them, dropping old ones, and removing what killed saves left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
from pathlib import Path

from hyper_parallel.core.distributed_checkpoint.file_names import is_data_file, lock_file_name, save_of
from hyper_parallel.core.distributed_checkpoint.storage import METADATA_FILE, CheckpointId

_NUMBER = re.compile(r"\d+")


def checkpoints(directory: CheckpointId) -> list[Path]:
    """The checkpoints in a directory, the oldest first.

    Ordered by the last number in their names (``step-9`` before ``step-10``), those without a number first; equal ones
    by the time they were committed.
    """
    root = Path(os.fspath(directory))
    if not root.is_dir():
        return []
    found = []
    for entry in root.iterdir():
        with contextlib.suppress(OSError):
            found.append((_number(entry.name), (entry / METADATA_FILE).stat().st_mtime_ns, entry))
    return [entry for *_, entry in sorted(found)]


def latest(directory: CheckpointId) -> Path | None:
    """The newest whole checkpoint in ``directory``, or None."""
    found = checkpoints(directory)
    return found[-1] if found else None


def keep_last(directory: CheckpointId, num: int) -> list[Path]:
    """Remove all checkpoints in ``directory`` but the newest ``num``; those that were removed.

    Call it on one rank, after a save. The metadata goes first, so that a checkpoint is never half there.
    """
    if num < 1:
        raise ValueError(f"keep_last({str(directory)!r}, {num}): at least 1 checkpoint must be kept")
    removed = checkpoints(directory)[:-num]
    for checkpoint in removed:
        (checkpoint / METADATA_FILE).unlink()
        shutil.rmtree(checkpoint)
    return removed


def remove_leftovers(checkpoint: Path) -> list[Path]:
    """Remove what killed saves left in a checkpoint's directory, and in sister directories that hold no checkpoint.

    Only files with names that a save gives are touched, and none of a save that is still running.
    """
    removed = _remove_from(checkpoint)
    for sister in checkpoint.parent.iterdir():
        with contextlib.suppress(OSError):  # It may be another user's, gone, or not empty: what is left is not ours.
            if sister.name != checkpoint.name and sister.is_dir() and not (sister / METADATA_FILE).exists():
                found = _remove_from(sister)
                removed += found
                if found:
                    sister.rmdir()
    return removed


def _remove_from(directory: Path) -> list[Path]:
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    saves = {name: save for name in names if (save := save_of(name)) is not None}
    if not saves:
        return []
    living = {save for save in set(saves.values()) if _is_running(directory / lock_file_name(save))}
    try:
        committed = (directory / METADATA_FILE).read_bytes()
    except OSError:
        committed = b""
    removed = []
    for name, save in saves.items():
        if save in living or (is_data_file(name) and name.encode() in committed):
            continue
        with contextlib.suppress(OSError):
            os.unlink(directory / name)
            removed.append(directory / name)
    return removed


def _is_running(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _number(name: str) -> int:
    numbers = _NUMBER.findall(name)
    return int(numbers[-1]) if numbers else -1
