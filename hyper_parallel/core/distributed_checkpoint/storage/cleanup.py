"""Which checkpoints a directory holds, the latest of them, dropping old ones, and removing what killed saves left."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hyper_parallel.core.distributed_checkpoint.base.errors import CorruptCheckpointError
from hyper_parallel.core.distributed_checkpoint.base.index_frame import FRAME_START, stated_sizes
from hyper_parallel.core.distributed_checkpoint.base.regular_files import open_regular
from hyper_parallel.core.distributed_checkpoint.storage.file_locks import is_held
from hyper_parallel.core.distributed_checkpoint.storage.file_names import (
    ALIVE,
    is_agreement,
    is_agreement_file,
    is_mark,
    lock_file_name,
    new_save_name,
    save_of,
)
from hyper_parallel.core.distributed_checkpoint.storage.save_marks import SaveMark, ended_save, named_files, named_saves
from hyper_parallel.core.distributed_checkpoint.storage.storage import (
    METADATA_FILE,
    CheckpointId,
    default_reader,
    local_path,
    storage_for,
)

_NUMBER = re.compile(r"[0-9]+")


def checkpoints(directory: CheckpointId, **storage_options: Any) -> list[Any]:
    """The checkpoints in a directory, the oldest first: paths, or URLs where ``directory`` is one that fsspec knows.

    Ordered by the last number in their names (``step-9`` before ``step-10``), those without a number first; equal ones
    by the time they were committed, where that is known. Links to others of them, such as ``newest -> step-10``, are
    left out, and so are folders whose metadata does not begin as ours does. ``storage_options`` go to fsspec.
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
        with (
            contextlib.suppress(OSError, CorruptCheckpointError),
            open_regular(entry / METADATA_FILE) as metadata,
        ):
            if metadata.read(len(FRAME_START)) == FRAME_START:
                found.append((_number(entry.name), os.fstat(metadata.fileno()).st_mtime_ns, entry))
    return [entry for *_, entry in sorted(found)]


def latest(directory: CheckpointId, **storage_options: Any) -> Any:
    """The newest whole checkpoint in ``directory``, or None; a path or URL, as :func:`checkpoints` has it.

    Whole means here: the metadata has its checksum, and every file that it lists is there and has its size.
    """
    found = reversed(checkpoints(directory, **storage_options))
    return next((checkpoint for checkpoint in found if _is_whole(checkpoint, storage_options)), None)


def keep_last(directory: CheckpointId, num: int, **storage_options: Any) -> list[Any]:
    """Remove all checkpoints in ``directory`` that are older than the newest ``num`` whole ones; those removed.

    Call it on one rank, after a save. The metadata goes first, so that a checkpoint is never half there. Of a link to a
    checkpoint elsewhere only the link is removed.
    """
    if num < 1:
        raise ValueError(f"keep_last({str(directory)!r}, {num}): at least 1 checkpoint must be kept")
    older = checkpoints(directory, **storage_options)
    while older and num:
        num -= _is_whole(older.pop(), storage_options)
    for checkpoint in older:
        if isinstance(checkpoint, Path) and checkpoint.is_symlink():
            checkpoint.unlink()
        elif isinstance(checkpoint, Path):
            remove_checkpoint(checkpoint)
        else:
            _fsspec_storage().remove_checkpoint(checkpoint, **storage_options)
    return older


def _is_whole(checkpoint: Any, storage_options: dict[str, Any]) -> bool:
    """Whether the metadata has its checksum and its files have their sizes; their content is not read."""
    is_path = isinstance(checkpoint, Path)
    reader = default_reader(checkpoint) if is_path else _fsspec_storage().FsspecReader(**storage_options)
    reader.open(checkpoint)
    try:
        wanted = stated_sizes(reader.read_metadata(), f"{os.fspath(checkpoint)}/{METADATA_FILE}")
        return reader.sizes(wanted) == wanted
    except (CorruptCheckpointError, FileNotFoundError):
        return False
    finally:
        reader.close()


def remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint's folder; killed at any moment, it is whole, or the next save removes the rest of it."""
    with opened_folder(checkpoint) as folder, contextlib.ExitStack() as stack:
        saves = named_saves(folder)
        with contextlib.suppress(OSError):  # The disk may be full, which is why checkpoints are removed.
            mark = SaveMark(checkpoint, new_save_name())
            stack.callback(mark.take_down)
            mark.replaces(saves)
        os.unlink(METADATA_FILE, dir_fd=folder)
        remove_files(folder, saves, set())
    shutil.rmtree(checkpoint)


def _fsspec_storage() -> Any:
    from hyper_parallel.core.distributed_checkpoint.storage import fsspec_storage

    return fsspec_storage


def remove_leftovers(checkpoint: Path) -> list[Path]:
    """Remove what killed saves left in a checkpoint's directory and in its sister directories.

    See Note [What clean-up may remove] in ``save_marks.py``. Sisters that are links are not entered.
    """
    removed = remove_ended_saves(checkpoint, os.O_DIRECTORY)
    with os.scandir(checkpoint.parent) as sisters:
        found = [Path(sister.path) for sister in sisters if sister.is_dir(follow_symlinks=False)]
    for sister in found:
        with contextlib.suppress(OSError):  # It may be another user's, gone, or not empty: what is left is not ours.
            if is_agreement(sister.name):
                removed += _remove_agreement(sister)
            elif sister.name != checkpoint.name:
                gone = remove_ended_saves(sister)
                removed += gone
                if gone:
                    sister.rmdir()
    return removed


def _remove_agreement(directory: Path) -> list[Path]:
    """Remove what ranks that agreed through files have left, if all of them have ended; other files stay."""
    with opened_folder(directory) as folder:
        found = sorted(filter(is_agreement_file, os.listdir(folder)))
        ranks = [directory / name for name in found if name.startswith(ALIVE)]
        if not ranks or any(map(is_held, ranks)):
            return []
        removed = [directory / name for name in found if _unlink(name, folder)]
    directory.rmdir()
    return removed


def remove_ended_saves(directory: Path, flags: int = os.O_DIRECTORY | os.O_NOFOLLOW) -> list[Path]:
    """Remove the files of saves whose marks nobody holds and that the metadata does not name, and the marks."""
    removed: list[str] = []
    try:
        with opened_folder(directory, flags) as folder:
            for mark in sorted(name for name in os.listdir(folder) if is_mark(name)):
                removed += _remove_ended_save(folder, str(save_of(mark)))
    except OSError:
        pass  # another user's, or gone
    return [directory / name for name in removed]


def _remove_ended_save(folder: int, save_name: str) -> list[str]:
    with ended_save(folder, save_name) as save:
        named = None if save is None else named_files(folder)  # Now, not before: it may have ended well just now.
        if save is None or named is None:
            return []
        own, mark = {save.name}, lock_file_name(save.name)
        removed = remove_files(folder, own, named) + remove_files(folder, set(save.replaces), named, save.time)
        return [*removed, mark] if _unlink(mark, folder) else removed


def remove_files(folder: int, saves: set[str], named: set[str], no_later_than: int | None = None) -> list[str]:
    """Remove the files of some saves but for their marks and those that are ``named``; with a time (ns), older ones."""
    removed = []
    for name in os.listdir(folder) if saves else ():
        if save_of(name) not in saves or is_mark(name) or name in named:
            continue
        with contextlib.suppress(OSError):
            changed = os.lstat(name, dir_fd=folder).st_ctime_ns
            if (no_later_than is None or changed <= no_later_than) and _unlink(name, folder):
                removed.append(name)
    return removed


@contextlib.contextmanager
def opened_folder(directory: Path, flags: int = os.O_DIRECTORY | os.O_NOFOLLOW) -> Iterator[int]:
    """A folder that stays the same one, whatever its name comes to mean; by default links are refused."""
    descriptor = os.open(directory, os.O_RDONLY | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _unlink(name: str, folder: int) -> bool:
    with contextlib.suppress(OSError):
        os.unlink(name, dir_fd=folder)
        return True
    return False


def _number(name: str) -> int:
    numbers = _NUMBER.findall(name)
    return int(numbers[-1]) if numbers else -1
