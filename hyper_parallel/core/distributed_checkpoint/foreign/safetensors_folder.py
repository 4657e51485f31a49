"""A folder of safetensors files as the Hugging Face hub has them: one file, or several with an index beside them.

Only headers are read at first; of a tensor a box is read, or looked up through a memory map, so what nobody asks for is
not read.

Note [Folders of strangers]
Such folders are downloaded. An index may name plain files of its own folder only (which may be links, as in the cache
of the hub), nothing is opened that is no regular file, and headers and indexes of more than ``MAX_HEADER_BYTES`` (the
limit of the safetensors library too) are refused before they are read. A file must be what that library writes: its
tensors lie one after the other, from the end of the header to the end of the file.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.core.distributed_checkpoint.base.errors import CorruptCheckpointError
from hyper_parallel.core.distributed_checkpoint.base.metadata import dtype_size
from hyper_parallel.core.distributed_checkpoint.base.regular_files import open_regular, read_regular
from hyper_parallel.core.distributed_checkpoint.base.shown_text import listed, shown, shown_value
from hyper_parallel.core.distributed_checkpoint.base.strict_json import parse_json
from hyper_parallel.core.distributed_checkpoint.format.index_check import MAX_DIMS
from hyper_parallel.core.distributed_checkpoint.format.shard_file import DTYPE_OF_SAFETENSORS_NAME
from hyper_parallel.core.distributed_checkpoint.storage.file_boxes import FileBoxes

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000

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
        names, weight_map = _file_names(self.path)
        for name in names:
            self.tensors |= _read_header(self.path, name)
        self._check_index(weight_map)

    def _check_index(self, weight_map: Mapping[str, str]) -> None:
        wrong = sorted(
            name for name, file in weight_map.items() if name not in self.tensors or self.tensors[name].file != file
        )
        if wrong:
            raise CorruptCheckpointError(
                f"'{self.path / INDEX_FILE}' names tensors that are not in their files: {listed(wrong)}; the folder is "
                "a mix of several saves, or was not copied whole"
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
            with open_regular(self.path / name) as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._maps[name] = np.frombuffer(mapped, np.uint8)
        return self._maps[name]

    def known(self) -> dict[str, tuple[Shape, str]]:
        """(shape, dtype) of each tensor, what a mapping asks for."""
        return {name: (stored.shape, stored.dtype) for name, stored in self.tensors.items()}


def raw_dtype(dtype: str) -> np.dtype[Any]:
    """The numpy dtype in which the bits of a dtype are kept."""
    size = dtype_size(dtype)
    return np.dtype("V16" if size == 16 else f"u{size}")


# ---------------------------------------------------------------- what a folder says


def _read_header(folder: Path, name: str) -> dict[str, StoredTensor]:
    path = folder / name
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= min(size - 8, MAX_HEADER_BYTES) else b""
    except FileNotFoundError:
        raise FileNotFoundError(f"'{path}' is named in '{INDEX_FILE}' but is not there; copy it again") from None
    try:
        if len(text) != length:
            raise ValueError(f"its header would have {length} bytes")
        header = parse_json(text)
        if type(header) is not dict:
            raise ValueError("its header is not an object")
        found, places = {}, []
        for tensor, entry in header.items():
            if tensor != "__metadata__":
                found[tensor], place = _stored_tensor(name, tensor, entry, 8 + length)
                places.append((*place, tensor))
        _check_places(places, size - 8 - length)
    except ValueError as error:
        raise CorruptCheckpointError(
            f"'{path}' ({size} bytes) is not a whole safetensors file ({error}); it was cut short or damaged. "
            "Copy it again"
        ) from error
    return found


def _stored_tensor(file: str, name: str, entry: Any, base: int) -> tuple[StoredTensor, tuple[int, int]]:
    """A tensor of a header, and the bytes of data that it takes."""
    found: dict[str, Any] = entry if type(entry) is dict else {}
    dtype, shape, place = (found.get(key, "") for key in ("dtype", "shape", "data_offsets"))
    if type(dtype) is not str or dtype not in DTYPE_OF_SAFETENSORS_NAME:
        raise ValueError(f"'{shown(name)}' has the dtype {shown_value(dtype)}")
    if not _are_counts(shape) or not _are_counts(place) or len(place) != 2 or len(shape) > MAX_DIMS:
        raise ValueError(f"'{shown(name)}' has shape {shown_value(shape)} and lies at {shown_value(place)}")
    stored = StoredTensor(file, DTYPE_OF_SAFETENSORS_NAME[dtype], tuple(shape), base + place[0])
    if place[1] - place[0] != stored.num_bytes:
        raise ValueError(f"'{shown(name)}' is not whole: shape {shape} in {place[1] - place[0]} bytes")
    return stored, (place[0], place[1])


def _are_counts(values: Any) -> bool:
    return type(values) is list and all(type(value) is int and 0 <= value < 1 << 63 for value in values)


def _check_places(places: list[tuple[int, int, str]], size: int) -> None:
    at, before = 0, "the header"
    for start, end, tensor in sorted(places):
        if start != at:
            what = "overlap" if start < at else "have a gap between them"
            raise ValueError(f"{before} and '{shown(tensor)}' {what}")
        at, before = end, f"'{shown(tensor)}'"
    if at != size:
        raise ValueError(f"it has {size} bytes of data where its tensors take {at}")


def _file_names(folder: Path) -> tuple[list[str], Mapping[str, str]]:
    """The files to read, and in which of them an index says that tensors are."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder '{folder}'")
    if os.path.lexists(folder / SINGLE_FILE):  # as everybody else reads such folders
        return [SINGLE_FILE], {}
    if os.path.lexists(folder / INDEX_FILE):
        weight_map = read_weight_map(folder)
        return sorted(set(weight_map.values())), weight_map
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    if not names:
        raise FileNotFoundError(f"'{folder}' holds neither '{INDEX_FILE}' nor a safetensors file")
    if len(names) > 1:
        raise FileNotFoundError(
            f"'{folder}' holds {len(names)} safetensors files but no '{INDEX_FILE}' that tells which belong together"
        )
    return names, {}


def read_weight_map(folder: Path) -> Mapping[str, str]:
    """The file of each tensor, by the index of a folder: plain names of files in it."""
    index = folder / INDEX_FILE
    data = read_regular(index, MAX_HEADER_BYTES)
    try:
        content = parse_json(data)
        weight_map = content.get("weight_map") if type(content) is dict else None
        if type(weight_map) is not dict or not weight_map:
            raise ValueError(f"its 'weight_map' is {shown_value(weight_map)}")
    except ValueError as error:
        raise CorruptCheckpointError(f"'{index}' is not an index of safetensors files: {error}") from error
    outside = [name for name in weight_map.values() if not _is_plain(name)]
    if outside:
        names = ", ".join(dict.fromkeys(map(shown_value, outside[:20])))
        raise CorruptCheckpointError(f"'{index}' names what are no files of its folder: {names}")
    return weight_map


def _is_plain(name: Any) -> bool:
    """Whether this can be the name of a file in a folder, and of nothing else."""
    if type(name) is not str or name in ("", ".", "..") or len(name) > 255:
        return False
    return not any(character in "/\0" or 0xD800 <= ord(character) <= 0xDFFF for character in name)
