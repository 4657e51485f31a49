"""Checkpoints of any kind as one thing: names, shapes, and boxes of tensors to look at. For tools without a model.

Kinds: our own, folders of safetensors files (Hugging Face), and torch's distributed checkpoints. Each source has
``known()``, ``boxes(name)``, ``view(name, offsets, sizes)``, ``objects()`` and ``close()``.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hyper_parallel.core.distributed_checkpoint.base.metadata import dtype_size
from hyper_parallel.core.distributed_checkpoint.foreign import torch_dcp
from hyper_parallel.core.distributed_checkpoint.foreign.safetensors_folder import SafetensorsFolder
from hyper_parallel.core.distributed_checkpoint.foreign.torch_dcp import TorchCheckpoint, view_of_boxes
from hyper_parallel.core.distributed_checkpoint.format.json_state import decode_object
from hyper_parallel.core.distributed_checkpoint.format.stored_files import RAW_DTYPES, StoredFiles
from hyper_parallel.core.distributed_checkpoint.storage.file_names import is_data_file
from hyper_parallel.core.distributed_checkpoint.storage.storage import METADATA_FILE, default_reader, storage_for
from hyper_parallel.platform.shared.region import Region

OURS, HUGGING_FACE, TORCH = "hyper-parallel", "hugging-face", "torch"


def kind_of(place: str | os.PathLike[str]) -> str | None:
    """Which kind of checkpoint is at a path or URL; None when there is none."""
    if storage_for(place) == "fsspec":
        return OURS
    path = Path(os.fspath(place).removeprefix("file://"))
    # Also where it is a device, or a link that leads nowhere: the reader says what is wrong with it.
    if os.path.lexists(path / METADATA_FILE):
        return OURS
    if os.path.lexists(path / torch_dcp.METADATA_FILE):
        return TORCH
    others = (file for file in path.glob("*.safetensors") if not is_data_file(file.name))
    return HUGGING_FACE if path.is_dir() and any(others) else None


def open_source(place: str | os.PathLike[str]) -> Any:
    """A checkpoint of any kind, opened for reading."""
    kind = kind_of(place)
    if kind == OURS:
        return OurCheckpoint(place)
    if kind == TORCH:
        return TorchCheckpoint(place)
    if kind == HUGGING_FACE:
        return SafetensorsSource(place)
    if not os.path.isdir(place):
        raise FileNotFoundError(f"there is no checkpoint at '{os.fspath(place)}': no such folder")
    if any(map(is_data_file, os.listdir(place))):
        raise FileNotFoundError(
            f"there is no checkpoint at '{os.fspath(place)}': it has files of a save, but no {METADATA_FILE}; the save "
            "did not end, or the file was deleted"
        )
    raise FileNotFoundError(
        f"there is no checkpoint at '{os.fspath(place)}': it has no {METADATA_FILE} (hyper-parallel), no "
        f"{torch_dcp.METADATA_FILE} (torch) and no safetensors files (Hugging Face)"
    )


class OurCheckpoint:
    """One of ours. Every chunk that is looked at is checked first, once."""

    kind = OURS

    def __init__(self, place: str | os.PathLike[str]) -> None:
        self.path = place
        self._reader = default_reader(place)
        self.files = StoredFiles(place, self._reader)
        self.index = self.files.index
        self._checked: set[tuple[str, int]] = set()

    def known(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """(shape, dtype) of each tensor."""
        return {name: (tensor.shape, tensor.dtype) for name, tensor in self.index.tensors.items()}

    def boxes(self, name: str) -> list[Region]:
        """The stored chunks."""
        return list(self.index.tensors[name].all_boxes())

    def layout(self, name: str) -> dict[str, Any] | None:
        """The layout that a tensor had when it was saved."""
        number = self.index.tensors[name].layout
        return None if number is None else self.index.layouts[number]

    def objects(self) -> dict[str, tuple[str, int]]:
        """(encoding, bytes) of each object."""
        return {name: (stored.encoding, stored.length) for name, stored in self.index.objects.items()}

    def object_bytes(self, name: str) -> bytes:
        """The bytes of an object, as they are stored."""
        return bytes(self.files.object_bytes(name))

    def object_value(self, name: str, allow_pickle: bool = False) -> Any:
        """An object; pickles must be allowed."""
        return decode_object(self.object_bytes(name), self.index.objects[name].encoding, name, allow_pickle)

    def view(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> np.ndarray[Any, Any]:
        """The bits of a box of a tensor, by reference where it lies in one chunk."""
        tensor = self.index.tensors[name]
        box = Region(tuple(offsets), tuple(sizes))
        return view_of_boxes(
            RAW_DTYPES[dtype_size(tensor.dtype)],
            box,
            ((chunk, functools.partial(self._chunk, name, number)) for number, chunk in tensor.touching(box)),
        )

    def _chunk(self, name: str, number: int) -> np.ndarray[Any, Any]:
        if (name, number) not in self._checked:
            self.files.check_chunk(name, number)
            self._checked.add((name, number))
        return self.files.chunk(self.index.tensors[name], number)

    def close(self) -> None:
        self._reader.close()


class SafetensorsSource(SafetensorsFolder):
    """A folder of safetensors files."""

    kind = HUGGING_FACE

    def boxes(self, name: str) -> list[Region]:
        return [Region.whole(self.tensors[name].shape)]

    def layout(self, name: str) -> None:
        return None

    def objects(self) -> dict[str, tuple[str, int]]:
        return {}

    def close(self) -> None:
        self._maps.clear()
        self._files.close()
