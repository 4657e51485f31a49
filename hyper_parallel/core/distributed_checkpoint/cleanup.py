"""Which checkpoints a directory holds, the latest of them, dropping old ones, and removing what killed saves left."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from pathlib import Path
from typing import Any

from hyper_parallel.core.distributed_checkpoint.file_locks import is_held, taken
from hyper_parallel.core.distributed_checkpoint.file_names import (
    ALIVE,
    is_agreement,
    is_data_file,
    lock_file_name,
    save_of,
)
from hyper_parallel.core.distributed_checkpoint.storage import METADATA_FILE, CheckpointId, local_path, storage_for

_NUMBER = re.compile(r"\d+")


def checkpoints(directory: CheckpointId, **storage_options: Any) -> list[Any]:
    """The checkpoints in a directory, the oldest first: paths, or URLs where ``directory`` is one that fsspec knows.

    Ordered by the last number in their names (``step-9`` before ``step-10``), those without a number first; equal ones
    by the time they were committed, where that is known. Links to others of them, such as ``newest -> step-10``, are
    left out. ``storage_options`` go to fsspec.
    """
    if storage_for(directory) == "fsspec":
        names = _fsspec_storage().checkpoint_names(os.fspath(directory), **storage_options)
        base = os.fspath(directory).rstrip("/")
        return [f"{base}/{name}" for name in sorted(names, key=lambda name: (_number(name), name))]
    root = local_path(directory)
    if not root.is_dir():
        return []
    found = []
    for entry in root.iterdir():
        if entry.is_symlink() and os.path.dirname(os.path.realpath(entry)) == os.path.realpath(root):
            continue  # another name of one that is here
        with contextlib.suppress(OSError):
            found.append((_number(entry.name), (entry / METADATA_FILE).stat().st_mtime_ns, entry))
    return [entry for *_, entry in sorted(found)]


def latest(directory: CheckpointId, **storage_options: Any) -> Any:
    """The newest whole checkpoint in ``directory``, or None; a path or URL, as :func:`checkpoints` has it."""
    found = checkpoints(directory, **storage_options)
    return found[-1] if found else None


def keep_last(directory: CheckpointId, num: int, **storage_options: Any) -> list[Any]:
    """Remove all checkpoints in ``directory`` but the newest ``num``; those that were removed.

    Call it on one rank, after a save. The metadata goes first, so that a checkpoint is never half there. Of a link to a
    checkpoint elsewhere only the link is removed.
    """
    if num < 1:
        raise ValueError(f"keep_last({str(directory)!r}, {num}): at least 1 checkpoint must be kept")
    removed = checkpoints(directory, **storage_options)[:-num]
    for checkpoint in removed:
        if isinstance(checkpoint, Path) and checkpoint.is_symlink():
            checkpoint.unlink()
        elif isinstance(checkpoint, Path):
            (checkpoint / METADATA_FILE).unlink()
            shutil.rmtree(checkpoint)
        else:
            _fsspec_storage().remove_checkpoint(checkpoint, **storage_options)
    return removed


def _fsspec_storage() -> Any:
    from hyper_parallel.core.distributed_checkpoint import (
        fsspec_storage,
    )  # only where it is needed: it is slow to import

    return fsspec_storage


def remove_leftovers(checkpoint: Path) -> list[Path]:
    """Remove what killed saves left in a checkpoint's directory and in its sister directories.

    Only files with names that a save gives are touched, and none of a save that is still running.
    """
    removed = remove_unnamed(checkpoint)
    for sister in checkpoint.parent.iterdir():
        with contextlib.suppress(OSError):  # It may be another user's, gone, or not empty: what is left is not ours.
            if is_agreement(sister.name):
                removed += _remove_agreement(sister)
            elif sister.name != checkpoint.name and sister.is_dir():
                found = remove_unnamed(sister)
                removed += found
                if found:
                    sister.rmdir()
    return removed


def _remove_agreement(directory: Path) -> list[Path]:
    """Remove what ranks that agreed through files have left, if all of them have ended."""
    found = [directory / name for name in os.listdir(directory)]
    ranks = [path for path in found if path.name.startswith(ALIVE)]
    if not ranks or any(map(is_held, ranks)):
        return []
    shutil.rmtree(directory)
    return found


def remove_unnamed(directory: Path) -> list[Path]:
    """Remove the files of saves that have ended and that the metadata does not name; those of a living save stay."""
    try:
        names = os.listdir(directory)
    except OSError:
        return []
    saves = {name: save for name in names if (save := save_of(name)) is not None}
    is_one_save = len(set(saves.values())) == 1 and all(map(is_data_file, saves))
    if not saves or (is_one_save and METADATA_FILE in names):
        return []
    removed = []
    for save in sorted(set(saves.values())):
        with taken(directory / lock_file_name(save)) as is_over:
            if is_over:
                committed = _committed(directory)  # Now, not before: the save may have ended well just now.
                removed += [
                    path
                    for path in (directory / name for name, its_save in saves.items() if its_save == save)
                    if not (is_data_file(path.name) and path.name.encode() in committed) and _unlink(path)
                ]
    return removed


def _committed(directory: Path) -> bytes:
    try:
        return (directory / METADATA_FILE).read_bytes()
    except OSError:
        return b""


def _unlink(path: Path) -> bool:
    with contextlib.suppress(OSError):
        os.unlink(path)
        return True
    return False


def _number(name: str) -> int:
    numbers = _NUMBER.findall(name)
    return int(numbers[-1]) if numbers else -1
