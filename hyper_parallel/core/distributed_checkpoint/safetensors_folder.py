"""A folder of safetensors files as the Hugging Face hub has them: one file, or several with an index beside them.

Only headers are read at first; of a tensor a box is read, or looked up through a memory map, so what nobody asks for is
not read.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.core.distributed_checkpoint.errors import CorruptCheckpointError
from hyper_parallel.core.distributed_checkpoint.file_boxes import FileBoxes
from hyper_parallel.core.distributed_checkpoint.metadata import dtype_size
from hyper_parallel.core.distributed_checkpoint.shard_file import DTYPE_OF_SAFETENSORS_NAME

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

Shape = tuple[int, ...]


class StoredTensor(NamedTuple):
    """A tensor in a file: ``start`` is its first byte, counted from the start of the file."""

    file: str
    dtype: str
    shape: Shape
    start: int

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * dtype_size(self.dtype)


class SafetensorsFolder:
    """The tensors of a folder by name; ``bytes_read`` counts what was asked for."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.path = Path(folder)
        self.tensors: dict[str, StoredTensor] = {}
        self.bytes_read = 0
        self._files = FileBoxes(self.path)
        self._maps: dict[str, np.ndarray[Any, Any]] = {}
        for name in _file_names(self.path):
            self._read_header(name)
        self._check_index()

    def _read_header(self, name: str) -> None:
        path = self.path / name
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                length = int.from_bytes(file.read(8), "little")
                text = file.read(length) if 8 + length <= size else b""
        except FileNotFoundError:
            raise FileNotFoundError(f"'{path}' is named in '{INDEX_FILE}' but is not there; copy it again") from None
        try:
            header = json.loads(text, object_pairs_hook=_without_twins)
            places = []
            for tensor, entry in header.items():
                if tensor == "__metadata__":
                    continue
                dtype = DTYPE_OF_SAFETENSORS_NAME[entry["dtype"]]
                start, end = entry["data_offsets"]
                shape = tuple(entry["shape"])
                if not all(type(number) is int and number >= 0 for number in (start, end, *shape)):
                    raise ValueError(f"'{tensor}' has shape {list(shape)} and lies at {start} to {end}")
                stored = StoredTensor(name, dtype, shape, 8 + length + start)
                if end - start != stored.num_bytes or stored.start + stored.num_bytes > size:
                    raise ValueError(f"'{tensor}' is not whole")
                if end > start:
                    places.append((start, end, tensor))
                self.tensors[tensor] = stored
            for (_, end, tensor), (start, _, other) in itertools.pairwise(sorted(places)):
                if start < end:
                    raise ValueError(f"'{tensor}' and '{other}' overlap")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CorruptCheckpointError(
                f"'{path}' ({size} bytes) is not a whole safetensors file ({error!r}); it was cut short or damaged. "
                "Copy it again"
            ) from error

    def _check_index(self) -> None:
        index = self.path / INDEX_FILE
        if not index.exists() or (self.path / SINGLE_FILE).exists():
            return
        weight_map = json.loads(index.read_text())["weight_map"]
        wrong = sorted(
            name for name, file in weight_map.items() if name not in self.tensors or self.tensors[name].file != file
        )
        if wrong:
            raise CorruptCheckpointError(
                f"'{index}' names tensors that are not in their files: {', '.join(wrong[:20])}; the folder is a mix of "
                "several saves, or was not copied whole"
            )

    def read(self, name: str, offsets: Shape, out: np.ndarray[Any, Any]) -> None:
        """Fill ``out`` with the bits of a box of a tensor; see Note [Why loads do not map files]."""
        stored = self.tensors[name]
        self._files.read_box(stored.file, stored.start, stored.shape, offsets, out.shape, out)
        self.bytes_read += out.nbytes

    def view(self, name: str, offsets: Sequence[int], sizes: Sequence[int]) -> np.ndarray[Any, Any]:
        """The bits of a box of a tensor, by reference to the file, as unsigned integers of its element size."""
        stored = self.tensors[name]
        whole = self._map(stored.file)[stored.start : stored.start + stored.num_bytes]
        array = whole.view(raw_dtype(stored.dtype)).reshape(stored.shape)
        self.bytes_read += math.prod(sizes) * dtype_size(stored.dtype)
        return array[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]

    def _map(self, name: str) -> np.ndarray[Any, Any]:
        if name not in self._maps:
            with open(self.path / name, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._maps[name] = np.frombuffer(mapped, np.uint8)
        return self._maps[name]

    def known(self) -> dict[str, tuple[Shape, str]]:
        """(shape, dtype) of each tensor, what a mapping asks for."""
        return {name: (stored.shape, stored.dtype) for name, stored in self.tensors.items()}


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object whose names are all different: of two values for one name nobody knows which is meant."""
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"'{next(name for name in names if names.count(name) > 1)}' is named twice")
    return found


def raw_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype in which the bits of a dtype are kept."""
    size = dtype_size(dtype)
    return np.dtype("V16" if size == 16 else f"u{size}")


def _file_names(folder: Path) -> list[str]:
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder '{folder}'")
    index = folder / INDEX_FILE
    if (folder / SINGLE_FILE).exists():  # as everybody else reads such folders
        return [SINGLE_FILE]
    if index.exists():
        try:
            weight_map: Mapping[str, str] = json.loads(index.read_text())["weight_map"]
            names = sorted(set(weight_map.values()))
            outside = [name for name in names if os.path.basename(name) != name]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptCheckpointError(f"'{index}' is not an index of safetensors files: {error!r}") from error
        if outside:
            raise CorruptCheckpointError(f"'{index}' names files outside of its folder: {outside}")
        return names
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise FileNotFoundError(f"'{folder}' holds neither '{INDEX_FILE}' nor a safetensors file")
    if len(names) > 1:
        raise FileNotFoundError(
            f"'{folder}' holds {len(names)} safetensors files but no '{INDEX_FILE}' that tells which belong together"
        )
    return names
