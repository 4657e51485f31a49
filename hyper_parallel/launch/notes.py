"""What a rank notes down for whoever started it: the step it is at and the last checkpoint. It outlives a ``kill -9``.

The notes of a rank are two numbers in a file that is mapped into memory: to write one costs no system call.
"""

from __future__ import annotations

import mmap
import os
import struct
from pathlib import Path
from typing import NamedTuple

__all__ = ["FOLDER_VARIABLE", "Notes", "note_checkpoint", "note_step", "notes_path", "read_notes"]

FOLDER_VARIABLE = (
    "HYPER_PARALLEL_RANK_FOLDER"  # where ranks leave notes and errors; nobody reads them where it is unset
)
_NUMBER = struct.Struct("<q")
_NONE = -1


class Notes(NamedTuple):
    """The step a rank was at and the step of the last checkpoint it knows of; None: it has not said."""

    step: int | None = None
    checkpoint: int | None = None


_mapped: dict[Path, mmap.mmap] = {}  # opened once a process


def note_step(step: int) -> None:
    """Called by a rank at the start of each step: an error, or a death without a word, is reported with it."""
    _write(0, step)


def note_checkpoint(step: int) -> None:
    """Called by every rank when the checkpoint of a step is whole: restarts go on while there are new ones."""
    _write(1, step)


def own_step() -> int | None:
    """The step this process has noted."""
    path = _own_path()
    return read_notes(path).step if path is not None else None


def notes_path(folder: Path, rank: int) -> Path:
    """The file of a rank's notes."""
    return folder / f"notes-{rank}"


def clear_notes(path: Path) -> None:
    """A file of notes in which nothing has been said."""
    path.write_bytes(_NUMBER.pack(_NONE) * 2)


def read_notes(path: Path) -> Notes:
    """What a rank has noted."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return Notes()
    values = [number for (number,) in _NUMBER.iter_unpack(data[: 2 * _NUMBER.size])]
    return Notes(*(None if number == _NONE else number for number in values))


def _own_path() -> Path | None:
    folder, rank = os.environ.get(FOLDER_VARIABLE), os.environ.get("RANK")
    return None if folder is None or rank is None else notes_path(Path(folder), int(rank))


def _write(place: int, number: int) -> None:
    path = _own_path()
    if path is None:
        return
    if path not in _mapped:
        if not path.exists():
            clear_notes(path)
        with path.open("r+b") as file:
            _mapped[path] = mmap.mmap(file.fileno(), 2 * _NUMBER.size)
    _NUMBER.pack_into(_mapped[path], place * _NUMBER.size, number)
