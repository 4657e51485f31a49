"""The folder beside a Hugging Face folder in which a save of it is written, before its files are moved into place.

It has a name and a mark of its own, so that saves at the same time do not meet, and what a killed one has left is known
to be that: see Note [What clean-up may remove] in ``save_marks.py``.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from hyper_parallel.core.distributed_checkpoint.storage.cleanup import opened_folder, remove_ended_saves, remove_files
from hyper_parallel.core.distributed_checkpoint.storage.file_names import (
    aside_file_name,
    aside_folder_name,
    data_file_name,
    is_aside_folder,
)
from hyper_parallel.core.distributed_checkpoint.storage.save_marks import SaveMark


class AsideFolder:
    """Where the save ``save_name`` of the folder ``target`` is written; the coordinator makes it, and removes it."""

    def __init__(self, target: Path, save_name: str) -> None:
        self.path = target.parent / aside_folder_name(target.name, save_name)
        self.index = self.path / aside_file_name(save_name)
        self._save_name = save_name
        self._mark: SaveMark | None = None

    def file(self, number: int) -> Path:
        """The place of one of its files."""
        return self.path / data_file_name(self._save_name, 0, number)

    def make(self) -> None:
        """Make it, and remove what killed saves have left of theirs."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        for sister in self.path.parent.iterdir():
            if is_aside_folder(sister.name) and remove_ended_saves(sister):
                with contextlib.suppress(OSError):
                    sister.rmdir()
        self.path.mkdir()
        self._mark = SaveMark(self.path, self._save_name)

    def remove(self) -> None:
        """Remove what is left of it; never raises."""
        with contextlib.suppress(OSError):
            if self._mark is not None:
                with opened_folder(self.path) as folder:
                    remove_files(folder, {self._save_name}, set())
                self._mark.take_down()
            os.rmdir(self.path)
