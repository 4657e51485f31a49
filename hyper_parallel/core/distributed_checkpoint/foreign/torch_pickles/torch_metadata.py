"""The metadata of torch's checkpoints: which tensors and objects there are, and where each chunk lies; all is checked.

What holds for every checkpoint that torch writes must hold here: chunks cover their tensor, each element once; a chunk
takes no more bytes than its place in a file has; no two places share bytes; files lie in the checkpoint's own folder.
So nothing that is read later can be larger than the files, or come from elsewhere.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.core.distributed_checkpoint.base.exact_cover import covers_once
from hyper_parallel.core.distributed_checkpoint.base.metadata import dtype_size
from hyper_parallel.core.distributed_checkpoint.base.shown_text import shown
from hyper_parallel.core.distributed_checkpoint.foreign.torch_pickles.torch_globals import known_global
from hyper_parallel.core.distributed_checkpoint.foreign.torch_pickles.torch_pickle import read_pickle
from hyper_parallel.core.distributed_checkpoint.foreign.torch_pickles.torch_records import Dtype, Record, described
from hyper_parallel.platform.shared.region import Region, Shape

_MAX_DIMS = 32  # of an array of numpy's
_MAX_NAME = 1 << 16
_MAX_FILE_NAME = 255
_MAX_NUMBER = 1 << 63


class Place(NamedTuple):
    """The bytes of a file that one archive of torch's takes."""

    file: str
    offset: int
    length: int


class TorchTensor:
    """A tensor, and its chunks that are not empty: their boxes and places, in the same order."""

    def __init__(self, dtype: str, shape: Shape, chunks: list[tuple[Region, Place]]) -> None:
        self.dtype, self.shape = dtype, shape
        self.boxes = [box for box, _ in chunks]
        self.places = [place for _, place in chunks]

    def touching(self, box: Region) -> Iterable[int]:
        """The numbers of the chunks that share elements with a box, and perhaps of others."""
        if len(self.boxes) == 1:
            return (0,)
        number = self._numbers.get(box)
        if number is not None:
            return (number,)
        starts, ends = self._bounds
        start, size = (np.array(part, np.int64) for part in box)
        return np.flatnonzero(((starts < start + size) & (ends > start)).all(axis=1)).tolist()

    @functools.cached_property
    def _numbers(self) -> dict[Region, int]:
        return {box: number for number, box in enumerate(self.boxes)}

    @functools.cached_property
    def _bounds(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Where the chunks start and end, one row for each."""
        starts, sizes = (
            np.array([box[part] for box in self.boxes], np.int64).reshape(-1, len(self.shape)) for part in (0, 1)
        )
        return starts, starts + sizes


class TorchMetadata(NamedTuple):
    """What a checkpoint holds, by name."""

    tensors: dict[str, TorchTensor]
    objects: dict[str, Place]


def read_metadata(data: bytes) -> TorchMetadata:
    """What a metadata file says; a ValueError says what is wrong with it."""
    described = _fields(read_pickle(data, known_global), "Metadata")
    places = _places(_typed(described.get("storage_data"), dict, "storage_data"))
    result, num_chunks = TorchMetadata({}, {}), 0
    used: dict[str, list[tuple[int, int, str]]] = {}
    for name, entry in _typed(described.get("state_dict_metadata"), dict, "state_dict_metadata").items():
        _checked_name(name)
        if type(entry) is Record and entry.kind == "BytesStorageMetadata":
            taken = [result.objects.setdefault(name, _place_of(places, name, None))]
        else:
            fields = _fields(entry, "TensorStorageMetadata")
            num_chunks += len(_typed(fields.get("chunks"), list, f"'{shown(name)}'"))
            if num_chunks > len(places):  # Many tensors can refer to one long list.
                raise ValueError(f"it has more chunks than the {len(places)} that are stored")
            result.tensors[name] = _tensor(name, fields, places)
            taken = result.tensors[name].places
        for place in taken:
            used.setdefault(place.file, []).append((place.offset, place.length, name))
    for file, ranges in used.items():
        _check_apart(file, ranges)
    return result


def _typed(value: Any, kind: type, where: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{where} is {described(value)}, not a {kind.__name__}")
    return value


def _checked_name(name: Any) -> str:
    if type(name) is not str or len(name) > _MAX_NAME:
        raise ValueError(f"{described(name)} is not the name of a tensor or an object")
    return name


def _fields(record: Any, kind: str) -> dict[str, Any]:
    """The attributes of a record of a kind."""
    if type(record) is not Record or record.kind != kind or type(record.state) is not dict:
        raise ValueError(f"it has {described(record)} where {kind} is expected")
    return record.state


def _shape(value: Any, name: str) -> Shape:
    """A tuple of counts, which ``name`` has."""
    if type(value) is tuple and len(value) <= _MAX_DIMS:
        for number in value:
            if type(number) is not int or not 0 <= number < _MAX_NUMBER:
                break
        else:
            return value
    raise ValueError(f"'{shown(name)}' has {described(value)} for a shape or for offsets in at most {_MAX_DIMS} dims")


def _places(storage_data: dict[Any, Any]) -> dict[tuple[str, Shape | None], Any]:
    """By name and offsets what is said about where it is, unchecked."""
    places: dict[tuple[str, Shape | None], Any] = {}
    for index, place in storage_data.items():
        fields = _fields(index, "MetadataIndex")
        name, offset = _checked_name(fields.get("fqn")), fields.get("offset")
        key = name, None if offset is None else _shape(offset, name)
        if key in places:
            raise ValueError(f"'{shown(name)}' at {described(offset)} is stored twice")
        places[key] = place
    return places


def _place_of(places: dict[tuple[str, Shape | None], Any], name: str, offsets: Shape | None) -> Place:
    """Where a chunk or an object lies."""
    where = f"'{shown(name)}'" if offsets is None else f"'{shown(name)}' at {list(offsets)}"
    place = places.get((name, offsets))
    if place is None:
        raise ValueError(f"{where} is stored nowhere")
    fields = _fields(place, "_StorageInfo")
    file, offset, length = (fields.get(field) for field in ("relative_path", "offset", "length"))
    if fields.get("transform_descriptors"):
        raise ValueError(f"{where} is stored transformed, which only torch with the same extensions can read")
    if type(file) is not str or not _is_file_name(file):
        raise ValueError(
            f"{where} is in the file {described(file)}, which is no name of a file in the checkpoint's folder"
        )
    if type(offset) is not int or type(length) is not int or not 0 <= offset <= offset + length < _MAX_NUMBER:
        raise ValueError(f"{where} is at {described(offset)} with length {described(length)} of its file")
    return Place(file, offset, length)


def _is_file_name(name: str) -> bool:
    return 0 < len(name) <= _MAX_FILE_NAME and name not in (".", "..") and "/" not in name and name.isprintable()


def _tensor(name: str, fields: dict[str, Any], places: dict[tuple[str, Shape | None], Any]) -> TorchTensor:
    shape = _shape(fields.get("size"), name)
    properties = fields.get("properties")
    state = properties.state if type(properties) is Record and properties.kind == "TensorProperties" else None
    dtype = state[0] if type(state) is tuple and state else None
    if type(dtype) is not Dtype:
        raise ValueError(f"'{shown(name)}' has the dtype {described(dtype)}")
    element = dtype_size(dtype.name)
    if math.prod(size or 1 for size in shape) * element >= _MAX_NUMBER:
        raise ValueError(f"'{shown(name)}' has shape {list(shape)}, which no tensor has")
    chunks: list[tuple[Region, Place]] = []
    for chunk in fields["chunks"]:
        parts = _fields(chunk, "ChunkStorageMetadata")
        offsets, sizes = _shape(parts.get("offsets"), name), _shape(parts.get("sizes"), name)
        if not len(offsets) == len(sizes) == len(shape):
            raise ValueError(
                f"'{shown(name)}' has shape {list(shape)} and a chunk at {list(offsets)} of size {list(sizes)}"
            )
        if 0 in sizes:
            continue
        place = _place_of(places, name, offsets)
        if math.prod(sizes) * element > place.length:
            raise ValueError(
                f"'{shown(name)}' at {list(offsets)} of size {list(sizes)} is stored in {place.length} bytes"
            )
        chunks.append((Region(offsets, sizes), place))
    is_whole = len(chunks) == 1 and chunks[0][0] == ((0,) * len(shape), shape)
    if not is_whole and not covers_once((box for box, _ in chunks), shape):
        raise ValueError(
            f"the {len(chunks)} chunks of '{shown(name)}' do not cover shape {list(shape)}, each element once"
        )
    return TorchTensor(dtype.name, shape, chunks)


def _check_apart(file: str, ranges: list[tuple[int, int, str]]) -> None:
    """No two things in a file share bytes: else few bytes could be read again and again under many names."""
    end, last = 0, ""
    for start, length, name in sorted(ranges):
        if start < end:
            raise ValueError(f"'{shown(last)}' and '{shown(name)}' share bytes of the file '{file}'")
        end, last = start + length, name
