"""Weights in the form of the Hugging Face hub: a folder of safetensors files, into and out of tensors that are cut.

Names and shapes may differ from the program's: a mapping (:mod:`.key_mapping`) says how. Loading reads only the boxes
that this rank's blocks are made of; saving gathers one tensor (or the few that share one in the files) at a time.

Note [A folder is replaced as a whole]
New files are written into a folder aside and get names that are not in use yet. Readers go by ``model.safetensors`` if
it is there, else by the index, so the save is committed by the one rename (or removal) that changes which of them
readers find. What was there before stays whole until then, and is removed after.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.core.distributed_checkpoint.agreement import Agreement, AloneAgreement, GroupAgreement
from hyper_parallel.core.distributed_checkpoint.key_mapping import KeyMapping, Mapped, Piece
from hyper_parallel.core.distributed_checkpoint.metadata import dtype_name, dtype_size
from hyper_parallel.core.distributed_checkpoint.safetensors_folder import (
    INDEX_FILE,
    SINGLE_FILE,
    SafetensorsFolder,
    raw_dtype,
)
from hyper_parallel.core.distributed_checkpoint.shard_file import DTYPE_OF_SAFETENSORS_NAME
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.platform import get_platform

__all__ = ["LoadedNames", "load_hugging_face", "save_hugging_face"]

Shape = tuple[int, ...]
Mapping_ = KeyMapping | Iterable[Mapping[str, Any]] | None

DEFAULT_SHARD_BYTES = 5 << 30
_LISTED = 20
_NAME_OF_DTYPE = {dtype: name for name, dtype in DTYPE_OF_SAFETENSORS_NAME.items()}


class LoadedNames(NamedTuple):
    """What a load left alone: names of the program that are not in the files, and of the files that nobody wanted."""

    missing: list[str]
    unused: list[str]


# ---------------------------------------------------------------------------------------------------------------------
# Loading
# ---------------------------------------------------------------------------------------------------------------------


def load_hugging_face(
    state_dict: Mapping[str, Any],
    folder: str | os.PathLike[str] | SafetensorsFolder,
    *,
    mapping: Mapping_ = None,
    allow_missing: bool = False,
    allow_unused: bool = False,
    cast: bool = False,
    no_dist: bool = False,
) -> LoadedNames:
    """Fill the tensors of ``state_dict`` in place from a folder of safetensors files; every rank reads its own blocks.

    Names that are missing in the files, or in them but unused, are an error that lists them unless allowed; so is a
    dtype that differs, unless ``cast``. A tied tensor needs to be in the files under one of its names.
    """
    agreement = _agreement(no_dist)
    rules = KeyMapping.of(mapping)

    def work() -> LoadedNames:
        source = folder if isinstance(folder, SafetensorsFolder) else SafetensorsFolder(folder)
        mapped = rules.from_files(source.known())
        names = _compare_names(state_dict, mapped, source.path, allow_missing, allow_unused)
        _check_fit(state_dict, mapped, source.path, cast)
        pieces = mapped.by_our_name()
        # In the order of the files: disks like to read forward.
        places = {
            name: min((source.tensors[p.file_name][::3] for p in found), default=("", 0))
            for name, found in pieces.items()
        }
        for name in sorted(set(state_dict) & set(pieces), key=places.__getitem__):
            _fill_tensor(state_dict[name], mapped.our_dtypes[name], pieces[name], source)
        return names

    result: list[LoadedNames] = []
    agreement.round("loading safetensors files", lambda: result.append(work()))
    return result[0]


def _compare_names(
    state_dict: Mapping[str, Any], mapped: Mapped, path: Path, allow_missing: bool, allow_unused: bool
) -> LoadedNames:
    missing = [name for name in state_dict if name not in mapped.our_shapes]
    if missing:
        there = {_address(value) for name, value in state_dict.items() if name in mapped.our_shapes}
        missing = [name for name in missing if _address(state_dict[name]) not in there]
    unused = [name for name in mapped.our_shapes if name not in state_dict]
    problems = []
    if missing and not allow_missing:
        problems.append(f"not in the files: {_listed(missing)} (allow_missing=True leaves them as they are)")
    if unused and not allow_unused:
        problems.append(
            f"in the files but not wanted: {_listed(unused)} (allow_unused=True, or a rule that drops them)"
        )
    if problems:
        raise ValueError(f"'{path}': {'; '.join(problems)}")
    return LoadedNames(missing, unused)


def _check_fit(state_dict: Mapping[str, Any], mapped: Mapped, path: Path, cast: bool) -> None:
    problems = []
    for name, value in state_dict.items():
        if name not in mapped.our_shapes:
            continue
        if not get_platform().is_tensor(value):
            problems.append(f"'{name}' is a {type(value).__name__} here, and files hold tensors only")
        elif tuple(value.shape) != mapped.our_shapes[name]:
            problems.append(f"'{name}' has shape {mapped.our_shapes[name]} in the files and {tuple(value.shape)} here")
        elif isinstance(value, DTensor) and value.layout.has_partial:
            problems.append(f"'{name}' has a pending sum ({value.layout}), which cannot be loaded into")
        elif _dtype_of(value) != mapped.our_dtypes[name] and not cast:
            problems.append(
                f"'{name}' is {mapped.our_dtypes[name]} in the files and {_dtype_of(value)} here; pass cast=True"
            )
    if problems:
        raise ValueError(f"'{path}': {_listed(problems, '; ')}")


def _fill_tensor(target: Any, dtype: str, pieces: Sequence[Piece], source: SafetensorsFolder) -> None:
    platform = get_platform()
    if isinstance(target, DTensor):
        if target.device_mesh.get_coordinate() is None:
            return
        sizes, offsets = target.layout.local_region(tuple(target.shape))
    else:
        sizes, offsets = tuple(target.shape), (0,) * target.ndim
    if 0 in sizes:
        return
    if dtype == _dtype_of(target):
        array = platform.raw_array(target)
        fill_box(array, offsets, pieces, source)
        platform.set_raw(target, array)
    else:
        block = platform.new_tensor(sizes, platform.str_to_dtype(dtype), "cpu")
        fill_box(platform.raw_array(block), offsets, pieces, source)
        platform.load_into_param(target, block)


def fill_box(array: np.ndarray[Any, Any], offsets: Shape, pieces: Sequence[Piece], source: Any) -> None:
    """Fill the box at ``offsets`` of one of our tensors from the files; ``source.view(name, offsets, sizes)`` reads."""
    for piece in pieces:
        here, there, in_file = [], list(piece.file_offsets), [1] * len(piece.file_offsets)
        for at, size, start, length, dim in zip(
            offsets, array.shape, piece.our_offsets, piece.our_sizes, piece.dims, strict=True
        ):
            first, last = max(at, start), min(at + size, start + length)
            if first >= last:
                break
            here.append(slice(first - at, last - at))
            if dim is not None:
                there[dim] += first - start
                in_file[dim] = last - first
        else:
            array[tuple(here)] = _turned(source.view(piece.file_name, there, in_file), piece)


def _turned(box: np.ndarray[Any, Any], piece: Piece) -> np.ndarray[Any, Any]:
    """A box of the files with the dims of ours."""
    kept = [dim for dim in piece.dims if dim is not None]
    stacked = [dim for dim in range(box.ndim) if dim not in kept]
    turned = box.transpose(*kept, *stacked)[(..., *(0 for _ in stacked))] if box.ndim else box
    return turned[tuple(None if dim is None else slice(None) for dim in piece.dims)] if piece.dims else turned


def _turned_back(box: np.ndarray[Any, Any], piece: Piece) -> np.ndarray[Any, Any]:
    """A box of ours with the dims of the files."""
    kept = [dim for dim in piece.dims if dim is not None]
    plain = box[tuple(0 if dim is None else slice(None) for dim in piece.dims)] if piece.dims else box
    order = np.argsort(kept) if kept else ()
    turned = plain.transpose(*order) if kept else plain
    return turned[tuple(slice(None) if dim in kept else None for dim in range(len(piece.file_offsets)))]


# ---------------------------------------------------------------------------------------------------------------------
# Saving
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


def save_hugging_face(
    state_dict: Mapping[str, Any],
    folder: str | os.PathLike[str],
    *,
    mapping: Mapping_ = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    no_dist: bool = False,
) -> None:
    """Write the tensors of ``state_dict``, whole, into a folder of safetensors files; other files there stay.

    Every rank calls, with the same names. Tensors that are cut are gathered one after the other, and each file is
    written by one of the ranks. A tied tensor is written under its first name. An older set of weights in the folder is
    replaced as a whole.
    """
    target = Path(os.path.abspath(folder))
    agreement = _agreement(no_dist)
    tensors = _untied(state_dict)
    known = {name: (tuple(value.shape), _dtype_of(value)) for name, value in tensors.items()}
    mapped = KeyMapping.of(mapping).to_files(known)
    plan = FolderPlan(mapped.file_shapes, mapped.file_dtypes, max_shard_bytes)
    aside = target.parent / f".{target.name}.saving"

    def begin(everybody: list[Any]) -> None:
        if any(other != everybody[0] for other in everybody[1:]):
            raise ValueError("the ranks have different names, shapes or dtypes in their state dicts")
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)

    try:
        agreement.round("saving safetensors files", lambda: known, begin)
        owned = {number for number in range(len(plan.headers)) if number % agreement.world_size == agreement.rank}
        agreement.round(
            "saving safetensors files",
            lambda: _write_files(tensors, mapped, plan, owned, aside),
            lambda _: commit_folder(aside, target, plan),
        )
    finally:
        if agreement.is_coordinator:
            shutil.rmtree(aside, ignore_errors=True)


def _untied(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    seen: set[Any] = set()
    tensors = {}
    for name, value in state_dict.items():
        if not get_platform().is_tensor(value):
            raise TypeError(f"'{name}' is a {type(value).__name__}; safetensors files hold tensors only")
        if isinstance(value, DTensor) and value.layout.has_partial:
            raise ValueError(f"'{name}' has a pending sum ({value.layout}); call reduce_partial() first")
        address = _address(value)
        if address not in seen:
            tensors[name] = value
            seen.add(address)
    return tensors


def _write_files(tensors: Mapping[str, Any], mapped: Mapped, plan: FolderPlan, owned: set[int], aside: Path) -> None:
    platform = get_platform()
    by_file = mapped.by_file_name()
    wanted: dict[str, list[str]] = {}  # our name -> tensors of the files that this rank writes from it
    for name, pieces in by_file.items():
        if plan.entries[name].file in owned:
            wanted.setdefault(pieces[0].our_name if pieces else "", []).append(name)
    files = {number: _create(aside / str(number), plan, number) for number in sorted(owned)}
    try:
        for group in mapped.groups:
            whole = {}
            for name in group:
                value = tensors[name]
                whole[name] = platform.raw_array(value.full_tensor() if isinstance(value, DTensor) else value)
            for name in [file_name for ours in group for file_name in wanted.get(ours, ())]:
                entry = plan.entries[name]
                _write_at(files[entry.file], assemble(entry, by_file[name], whole), entry.start)
        for descriptor in files.values():
            os.fsync(descriptor)
    finally:
        for descriptor in files.values():
            os.close(descriptor)


def assemble(entry: Any, pieces: Sequence[Piece], whole: Mapping[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The bits of a tensor of the files, from ours."""
    array = np.empty(entry.shape, raw_dtype(entry.dtype))
    for piece in pieces:
        box = whole[piece.our_name][_slices(piece.our_offsets, piece.our_sizes)]
        array[_slices(piece.file_offsets, piece.file_sizes)] = _turned_back(box, piece)
    return array


def _slices(offsets: Shape, sizes: Shape) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))


def _create(path: Path, plan: FolderPlan, number: int) -> int:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.ftruncate(descriptor, plan.sizes[number])
    _write_at(descriptor, np.frombuffer(plan.headers[number], np.uint8), 0)
    return descriptor


def _write_at(descriptor: int, array: np.ndarray[Any, Any], start: int) -> None:
    if array.size == 0:
        return
    view = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    while len(view):
        written = os.pwrite(descriptor, view, start)
        view, start = view[written:], start + written


def commit_folder(aside: Path, target: Path, plan: FolderPlan) -> None:
    """Move the files ``0``, ``1``, ... of a folder aside to where they belong; see Note [A folder is replaced ...]."""
    target.mkdir(exist_ok=True)
    old_files = {path.name for path in target.glob("*.safetensors")}
    old_index = (target / INDEX_FILE).exists()
    names = plan.file_names(old_files)
    old_weights = old_files if old_index or old_files == {SINGLE_FILE} else set()
    if len(names) == 1:
        os.replace(aside / "0", target / SINGLE_FILE)
        doomed = old_weights - {SINGLE_FILE}
        if old_index:
            os.unlink(target / INDEX_FILE)
    else:
        for number, name in enumerate(names):
            os.rename(aside / str(number), target / name)
        index = aside / INDEX_FILE
        with open(index, "wb") as file:
            file.write(plan.index(names))
            file.flush()
            os.fsync(file.fileno())
        _fsync(target)
        os.replace(index, target / INDEX_FILE)
        doomed = old_weights
    _fsync(target)
    for name in doomed:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(target / name)
    _fsync(target)
    _fsync(target.parent)


def _fsync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------------------------------------------------------


def _agreement(no_dist: bool) -> Agreement:
    return AloneAgreement() if no_dist or get_platform().get_world_size() == 1 else GroupAgreement()


def _dtype_of(value: Any) -> str:
    return dtype_name(get_platform().dtype_name(value.dtype))


def _address(value: Any) -> Any:
    """Equal for tensors that are one and the same memory."""
    platform = get_platform()
    if not platform.is_tensor(value):
        return id(value)
    block = platform.detached(value)
    return (block.data_ptr(), tuple(block.shape), block.stride()) if math.prod(block.shape) else id(value)


def _listed(names: Sequence[str], between: str = ", ") -> str:
    more = len(names) - _LISTED
    return between.join(names[:_LISTED]) + (f" and {more} more" if more > 0 else "")
