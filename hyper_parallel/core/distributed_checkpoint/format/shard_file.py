"""Data files: safetensors shards, each a length, a JSON header, and the bytes of its chunks one after the other."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.core.distributed_checkpoint.base.checksum import crc32c
from hyper_parallel.core.distributed_checkpoint.base.metadata import MetadataIndex
from hyper_parallel.core.distributed_checkpoint.storage.file_names import data_file_name
from hyper_parallel.core.distributed_checkpoint.storage.storage import Buffer, StorageWriter

# What safetensors calls the dtypes; others (complex128 for instance) are stored as their bytes.
_SAFETENSORS_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
DTYPE_OF_SAFETENSORS_NAME = {name: dtype for dtype, name in _SAFETENSORS_NAMES.items()}

_BLOCK = 1 << 20  # bytes that are checked, and then written while they are in the processor's cache


@dataclass
class StagedItem:
    """A chunk or an object whose bytes are at hand. ``dtype`` and ``shape`` describe it in the file's header."""

    index: MetadataIndex
    dtype: str
    shape: tuple[int, ...]
    data: Buffer
    encoding: str | None = None  # of an object


@dataclass
class DeviceBytes:
    """The bits of a tensor outside of the host's memory, to be copied later."""

    tensor: Any
    num_bytes: int

    def __len__(self) -> int:
        return self.num_bytes


class WrittenFile(NamedTuple):
    """A data file: its name, the bytes before the data, the bytes of data, and the crc32c of what comes before."""

    name: str
    header_bytes: int
    data_bytes: int
    header_crc: int


class WrittenItem(NamedTuple):
    """Where an item of a plan has got to: the number of the rank's file, and the bytes in its data section."""

    file: int
    start: int
    length: int
    crc32c: int
    encoding: str | None


class RankReport(NamedTuple):
    """What a rank wrote: its files, and for each item of its plan, in order, where it is."""

    files: list[WrittenFile]
    items: list[WrittenItem]


def write_shards(
    writer: StorageWriter, save_name: str, rank: int, items: Sequence[StagedItem], names: list[str] | None = None
) -> RankReport:
    """Write the items into as few files as ``max_shard_bytes`` allows; they are safe when this returns.

    The names of the files are added to ``names``, each before the file exists.
    """
    files: list[WrittenFile] = []
    written: list[WrittenItem] = []
    for number, group in enumerate(_groups(items, writer.max_shard_bytes)):
        header, starts = make_header(group)
        name = data_file_name(save_name, rank, number)
        if names is not None:
            names.append(name)
        content = CheckedContent(header, [item.data for item in group])
        writer.write_file(name, content)
        written += [
            WrittenItem(number, start, len(item.data), crc, item.encoding)
            for item, start, crc in zip(group, starts, content.checksums(), strict=True)
        ]
        files.append(WrittenFile(name, len(header), sum(len(item.data) for item in group), crc32c(header)))
    if files:
        writer.flush()
    return RankReport(files, written)


class CheckedContent:
    """The content of a file, to be looped over in blocks; checksums are taken of what goes by."""

    def __init__(self, header: bytes, data: Sequence[Buffer]) -> None:
        self._header, self._data = header, data
        self._checksums: list[int] = []

    def __iter__(self) -> Iterator[Buffer]:
        yield self._header
        for number, buffer in enumerate(self._data):
            crc = 0
            for at in range(0, len(buffer), _BLOCK):
                block = buffer[at : at + _BLOCK] if len(buffer) > _BLOCK else buffer
                crc = crc32c(block, crc)
                yield block
            if number == len(self._checksums):
                self._checksums.append(crc)

    def checksums(self) -> list[int]:
        """The crc32c of each buffer, also of those that did not go by."""
        self._checksums += map(crc32c, self._data[len(self._checksums) :])
        return self._checksums


def make_header(items: Sequence[StagedItem]) -> tuple[bytes, list[int]]:
    """The start of a safetensors file with these items, and where each starts in the data after it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts = []
    at = 0
    for item in items:
        end = at + len(item.data)
        header[_unique(chunk_name(item.index), header)] = {
            "dtype": _SAFETENSORS_NAMES.get(item.dtype, "U8"),
            "shape": list(item.shape) if item.dtype in _SAFETENSORS_NAMES else [len(item.data)],
            "data_offsets": [at, end],
        }
        starts.append(at)
        at = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, starts


def chunk_name(index: MetadataIndex) -> str:
    """The name of a chunk in its file: the tensor's own where it starts at 0, else with the place it starts at."""
    if not index.offset or not any(index.offset):
        return index.fqn
    return f"{index.fqn}@{','.join(map(str, index.offset))}"


def _unique(name: str, taken: dict[str, Any]) -> str:
    while name in taken:
        name += "'"
    return name


def _groups(items: Sequence[StagedItem], max_bytes: int) -> Iterator[list[StagedItem]]:
    group: list[StagedItem] = []
    size = 0
    for item in items:
        if group and size + len(item.data) > max_bytes:
            yield group
            group, size = [], 0
        group.append(item)
        size += len(item.data)
    if group:
        yield group


def as_buffer(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The array's bytes in row-major order, as uint8; by reference if they lie that way."""
    if math.prod(array.shape) == 0:
        return np.empty(0, np.uint8)
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
