"""The files of a folder in the form of the Hugging Face hub: which tensor goes where, putting tensors together from
pieces, and replacing an older set of files. No framework is needed here.

Note [A folder is replaced as a whole]
New files are written into a folder aside and get names that are not in use yet. Readers go by ``model.safetensors`` if
it is there, else by the index, so the save is committed by the one rename (or removal) that changes which of them
readers find. What was there before stays whole until then, and is removed after: ``model.safetensors``, and the files
that the older index names. Other files in the folder are not touched.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from hyper_parallel.core.distributed_checkpoint.base.errors import CorruptCheckpointError
from hyper_parallel.core.distributed_checkpoint.base.metadata import dtype_size
from hyper_parallel.core.distributed_checkpoint.foreign.key_mapping import Piece
from hyper_parallel.core.distributed_checkpoint.foreign.safetensors_folder import (
    INDEX_FILE,
    SINGLE_FILE,
    raw_dtype,
    read_weight_map,
)
from hyper_parallel.core.distributed_checkpoint.format.shard_file import DTYPE_OF_SAFETENSORS_NAME
from hyper_parallel.core.distributed_checkpoint.storage.aside_folder import AsideFolder
from hyper_parallel.core.distributed_checkpoint.storage.storage import local_path, storage_for
from hyper_parallel.platform.host.atomic_file import fsync_path

Shape = tuple[int, ...]

DEFAULT_SHARD_BYTES = 5 << 30
_NAME_OF_DTYPE = {dtype: name for name, dtype in DTYPE_OF_SAFETENSORS_NAME.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Tensors from pieces
# ---------------------------------------------------------------------------------------------------------------------


def fill_box(
    array: np.ndarray[Any, Any], offsets: Shape, pieces: Sequence[Piece], read: Callable[[str, Shape, Any], None]
) -> None:
    """Fill the box at ``offsets`` of one of our tensors from the files.

    ``read(name, offsets, out)`` fills an array, a view of ours with the dims of the files, from a tensor of theirs.
    """
    for piece in pieces:
        here, there = [], list(piece.file_offsets)
        for at, size, start, length, dim in zip(
            offsets, array.shape, piece.our_offsets, piece.our_sizes, piece.dims, strict=True
        ):
            first, last = max(at, start), min(at + size, start + length)
            if first >= last:
                break
            here.append(slice(first - at, last - at))
            if dim is not None:
                there[dim] += first - start
        else:
            read(piece.file_name, tuple(there), _turned_back(_view(array, here), piece))


def _turned_back(box: np.ndarray[Any, Any], piece: Piece) -> np.ndarray[Any, Any]:
    """A box of ours with the dims of the files, by reference."""
    kept = [dim for dim in piece.dims if dim is not None]
    plain = _view(box, (0 if dim is None else slice(None) for dim in piece.dims))
    turned = plain.transpose(*np.argsort(kept)) if kept else plain
    return _view(turned, (slice(None) if dim in kept else None for dim in range(len(piece.file_offsets))))


def _view(array: np.ndarray[Any, Any], index: Iterable[int | slice | None]) -> np.ndarray[Any, Any]:
    """A part of an array by reference, also where it has no dims."""
    place = (*index, ...)
    return array[place]


class Boxes(Protocol):
    """``boxes[name][slices]`` is that box of a tensor."""

    def __getitem__(self, name: str, /) -> Any: ...


def assemble(entry: Any, pieces: Sequence[Piece], whole: Boxes) -> np.ndarray[Any, Any]:
    """The bits of a tensor of the files, from ours."""
    array = np.empty(entry.shape, raw_dtype(entry.dtype))
    for piece in pieces:
        box = whole[piece.our_name][_slices(piece.our_offsets, piece.our_sizes)]
        array[_slices(piece.file_offsets, piece.file_sizes)] = _turned_back(box, piece)
    return array


def _slices(offsets: Shape, sizes: Shape) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))


# ---------------------------------------------------------------------------------------------------------------------
# Files
# ---------------------------------------------------------------------------------------------------------------------


class _Entry(NamedTuple):
    """Where a tensor goes: the number of its file, and the place of its first byte there."""

    file: int
    start: int
    shape: Shape
    dtype: str


class FolderPlan:
    """Which tensor goes into which file, and the files' headers: arithmetic on names, shapes and dtypes."""

    def __init__(self, shapes: Mapping[str, Shape], dtypes: Mapping[str, str], max_shard_bytes: int) -> None:
        if max_shard_bytes < 1:
            raise ValueError(f"max_shard_bytes must be at least 1, got {max_shard_bytes}")
        self.entries: dict[str, _Entry] = {}
        self.headers: list[bytes] = []
        self.sizes: list[int] = []
        self.total_bytes = 0
        num_bytes = {name: math.prod(shape) * dtype_size(dtypes[name]) for name, shape in shapes.items()}
        for group in _shards(num_bytes, max_shard_bytes):
            # Wide elements first, so that every tensor starts at a multiple of its element size.
            group.sort(key=lambda name: -dtype_size(dtypes[name]))
            self._add_file(group, shapes, dtypes, num_bytes)

    def _add_file(
        self, names: list[str], shapes: Mapping[str, Shape], dtypes: Mapping[str, str], num_bytes: Mapping[str, int]
    ) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name in names:
            if name == "__metadata__":
                raise ValueError("'__metadata__' is no name for a tensor in a safetensors file; rename it by a mapping")
            if dtypes[name] not in _NAME_OF_DTYPE:
                raise TypeError(f"'{name}' has dtype {dtypes[name]}, which safetensors files cannot hold; cast it")
            end = at + num_bytes[name]
            header[name] = {
                "dtype": _NAME_OF_DTYPE[dtypes[name]],
                "shape": list(shapes[name]),
                "data_offsets": [at, end],
            }
            at = end
        text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        head = len(text).to_bytes(8, "little") + text
        for name in names:
            start = len(head) + header[name]["data_offsets"][0]
            self.entries[name] = _Entry(len(self.headers), start, tuple(shapes[name]), dtypes[name])
        self.headers.append(head)
        self.sizes.append(len(head) + at)
        self.total_bytes += at

    def file_names(self, taken: Iterable[str]) -> list[str]:
        """Names for the files, none of which is in use."""
        count, used = len(self.headers), set(taken)
        if count == 1:
            return [SINGLE_FILE]
        stem, number = "model", 0
        while True:
            names = [f"{stem}-{index + 1:05d}-of-{count:05d}.safetensors" for index in range(count)]
            if used.isdisjoint(names):
                return names
            number += 1
            stem = f"model.{number}"

    def index(self, names: Sequence[str]) -> bytes:
        """The content of the index file."""
        weight_map = {name: names[entry.file] for name, entry in sorted(self.entries.items())}
        return json.dumps({"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}, indent=2).encode()


def _shards(num_bytes: Mapping[str, int], max_bytes: int) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for name, length in num_bytes.items():
        if group and size + length > max_bytes:
            yield group
            group, size = [], 0
        group.append(name)
        size += length
    yield group


def folder_path(folder: str | os.PathLike[str]) -> Path:
    """Where a folder is; it must be one of a file system."""
    if storage_for(folder) != "filesystem":
        raise ValueError(f"weights are written to a folder, and '{os.fspath(folder)}' is a URL; copy the folder there")
    return Path(os.path.abspath(local_path(folder)))


def create_file(path: Path, plan: FolderPlan, number: int) -> int:
    """A new file of its final size, with its header; open for writing."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.ftruncate(descriptor, plan.sizes[number])
        write_at(descriptor, np.frombuffer(plan.headers[number], np.uint8), 0)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def write_at(descriptor: int, array: np.ndarray[Any, Any], start: int) -> None:
    """Write the array's bytes to a place in a file."""
    if array.size == 0:
        return
    view = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    while len(view):
        written = os.pwrite(descriptor, view, start)
        view, start = view[written:], start + written


def commit_folder(aside: AsideFolder, target: Path, plan: FolderPlan) -> None:
    """Move the files from aside to where they belong; see Note [A folder is replaced as a whole]."""
    target.mkdir(exist_ok=True)
    names = plan.file_names(path.name for path in target.glob("*.safetensors"))
    doomed = _weights_in(target) - set(names)
    if len(names) == 1:
        os.replace(aside.file(0), target / SINGLE_FILE)
        doomed.add(INDEX_FILE)
    else:
        for number, name in enumerate(names):
            os.rename(aside.file(number), target / name)
        with open(aside.index, "wb") as file:
            file.write(plan.index(names))
            file.flush()
            os.fsync(file.fileno())
        fsync_path(target)
        os.replace(aside.index, target / INDEX_FILE)
    fsync_path(target)
    for name in doomed:
        with contextlib.suppress(FileNotFoundError, IsADirectoryError):
            os.unlink(target / name)
    fsync_path(target)
    fsync_path(target.parent)


def _weights_in(target: Path) -> set[str]:
    """The files of the weights that a folder holds: those that readers would read, and no others."""
    names = {SINGLE_FILE}
    with contextlib.suppress(OSError, CorruptCheckpointError):
        names.update(name for name in read_weight_map(target).values() if name.endswith(".safetensors"))
    return names
