"""The metadata file: what a checkpoint holds and where, as one JSON document that carries its own checksum.

``{"format": ..., "version": 1, "crc32c": "89abcdef", "body": {...}}``. The body has the files (name, bytes of header,
bytes of data, crc32c of the header), the layouts, the tensors and the objects. The chunks of a tensor are the cells of
a grid (``grid``: where they start in each dim), row-major; a checkpoint of a planner of your own may list ``boxes``
instead. ``file``, ``start`` and ``crc32c`` have one number for each chunk.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.core.distributed_checkpoint.base.errors import CorruptCheckpointError
from hyper_parallel.core.distributed_checkpoint.base.grids import Grid, cell_of, cells_touching
from hyper_parallel.core.distributed_checkpoint.base.index_frame import VERSION, framed, unframed
from hyper_parallel.core.distributed_checkpoint.base.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    Shape,
    StoredBytes,
    TensorProperties,
    TensorStorageMetadata,
    dtype_size,
)
from hyper_parallel.core.distributed_checkpoint.base.strict_json import parse_json
from hyper_parallel.core.distributed_checkpoint.format.index_check import check_body
from hyper_parallel.core.distributed_checkpoint.format.shard_file import WrittenFile
from hyper_parallel.platform.shared.region import Region


@dataclass
class StoredTensor:
    """A tensor in a checkpoint: the boxes of its chunks, and where each is stored."""

    dtype: str
    shape: Shape
    file: list[int]
    start: list[int]
    crc32c: list[int]
    grid: Grid | None = None
    boxes: list[Region] | None = None
    layout: int | None = None
    requires_grad: bool = False

    def all_boxes(self) -> Iterator[Region]:
        """The chunks' boxes in order."""
        if self.grid is None:
            yield from self.boxes or ()
            return
        if 0 in self.shape:
            return
        ends = [[*starts[1:], size] for starts, size in zip(self.grid, self.shape, strict=True)]
        sides = [
            [(at, end - at) for at, end in zip(starts, stops, strict=True)]
            for starts, stops in zip(self.grid, ends, strict=True)
        ]
        for cell in itertools.product(*sides):
            yield Region(tuple(at for at, _ in cell), tuple(size for _, size in cell))

    def box(self, number: int) -> Region:
        """The box of one chunk."""
        return (self.boxes or [])[number] if self.grid is None else cell_of(self.grid, self.shape, number)

    def chunk_sizes(self, number: int) -> Shape:
        """The shape of one chunk."""
        return self.box(number)[1]

    def touching(self, box: Region) -> Iterator[tuple[int, Region]]:
        """(number, box) of the chunks that share elements with ``box``."""
        if self.grid is not None:
            yield from cells_touching(self.grid, self.shape, box)
            return
        if (number := self._numbers.get(box)) is not None:
            yield number, box
            return
        for number, chunk in enumerate(self.boxes or ()):
            if Region.overlap(chunk, box) is not None:
                yield number, chunk

    @functools.cached_property
    def _numbers(self) -> dict[Region, int]:
        return {box: number for number, box in enumerate(self.boxes or ())}


@dataclass
class StoredObject:
    """An object in a checkpoint."""

    file: int
    start: int
    length: int
    crc32c: int
    encoding: str = "json"


@dataclass
class CheckpointIndex:
    """Everything the metadata file says."""

    files: list[WrittenFile] = field(default_factory=list)
    layouts: list[dict[str, Any]] = field(default_factory=list)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    objects: dict[str, StoredObject] = field(default_factory=dict)
    world_size: int = 1
    platform: str | None = None
    crc32c: int = 0  # of the body, when it was read

    def metadata(self) -> Metadata:
        """The same as a :class:`Metadata`; the descriptions of tensors are made when they are asked for."""
        return Metadata(_Descriptions(self), None, _Places(self), self.world_size, VERSION)


def encode_index(index: CheckpointIndex) -> bytes:
    """The metadata file."""
    tensors = {}
    for key, tensor in index.tensors.items():
        entry: dict[str, Any] = {"dtype": tensor.dtype, "shape": tensor.shape}
        if tensor.grid is not None:
            entry["grid"] = tensor.grid
        else:
            entry["boxes"] = tensor.boxes
        entry |= {"file": tensor.file, "start": tensor.start, "crc32c": tensor.crc32c}
        if tensor.layout is not None:
            entry["layout"] = tensor.layout
        if tensor.requires_grad:
            entry["requires_grad"] = True
        tensors[key] = entry
    body = json.dumps(
        {
            "world_size": index.world_size,
            "platform": index.platform,
            "files": index.files,
            "layouts": index.layouts,
            "tensors": tensors,
            "objects": {key: vars(stored) for key, stored in index.objects.items()},
        },
        separators=(",", ":"),
    )
    return framed(body)


def decode_index(data: bytes, where: str) -> CheckpointIndex:
    """What a metadata file says; ``where`` names it in errors. Any damage is found."""
    version, crc, body = unframed(data, where)
    if version > VERSION:
        raise CorruptCheckpointError(
            f"'{where}' is of version {version} and this program reads up to version {VERSION}; update hyper-parallel"
        )
    try:
        content = parse_json(body)
        check_body(content)
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"'{where}' cannot be true: {error}. Load another checkpoint") from error
    tensors = {}
    for key, entry in content["tensors"].items():
        entry["shape"] = tuple(entry["shape"])
        if "grid" in entry:
            entry["grid"] = tuple(map(tuple, entry["grid"]))
        if "boxes" in entry:
            entry["boxes"] = [(tuple(offsets), tuple(sizes)) for offsets, sizes in entry["boxes"]]
        tensors[key] = StoredTensor(**entry)
    return CheckpointIndex(
        [WrittenFile(*file) for file in content["files"]],
        content["layouts"],
        tensors,
        {key: StoredObject(**entry) for key, entry in content["objects"].items()},
        content["world_size"],
        content["platform"],
        crc,
    )


class _Descriptions(Mapping[str, Any]):
    """Descriptions of tensors and objects by name."""

    def __init__(self, index: CheckpointIndex) -> None:
        self._index = index
        self._made: dict[str, Any] = {}

    def __getitem__(self, key: str) -> Any:
        if key not in self._made:
            self._made[key] = self._make(key)
        return self._made[key]

    def _make(self, key: str) -> Any:
        index = self._index
        if key in index.objects:
            stored = index.objects[key]
            return BytesStorageMetadata(stored.encoding, stored.length)
        tensor = index.tensors[key]
        layout = None if tensor.layout is None else index.layouts[tensor.layout]
        chunks = [ChunkStorageMetadata(*box) for box in tensor.all_boxes()]
        return TensorStorageMetadata(TensorProperties(tensor.dtype, tensor.requires_grad), tensor.shape, chunks, layout)

    def __contains__(self, key: object) -> bool:
        return key in self._index.tensors or key in self._index.objects

    def __iter__(self) -> Iterator[str]:
        yield from self._index.tensors
        yield from self._index.objects

    def __len__(self) -> int:
        return len(self._index.tensors) + len(self._index.objects)


class _Places(Mapping[MetadataIndex, StoredBytes]):
    """Where chunks and objects are stored."""

    def __init__(self, index: CheckpointIndex) -> None:
        self._index = index
        self._numbers: dict[str, dict[Shape, int]] = {}

    def __getitem__(self, at: MetadataIndex) -> StoredBytes:
        index = self._index
        stored = index.objects.get(at.fqn)
        if stored is not None:
            return StoredBytes(index.files[stored.file].name, stored.start, stored.length, stored.crc32c)
        tensor = index.tensors[at.fqn]
        if at.fqn not in self._numbers:
            self._numbers[at.fqn] = {box[0]: number for number, box in enumerate(tensor.all_boxes())}
        number = self._numbers[at.fqn][at.offset if at.offset is not None else (0,) * len(tensor.shape)]
        length = math.prod(tensor.chunk_sizes(number)) * dtype_size(tensor.dtype)
        return StoredBytes(index.files[tensor.file[number]].name, tensor.start[number], length, tensor.crc32c[number])

    def __iter__(self) -> Iterator[MetadataIndex]:
        for key, tensor in self._index.tensors.items():
            for number, (offsets, _) in enumerate(tensor.all_boxes()):
                yield MetadataIndex(key, offsets, number)
        for key in self._index.objects:
            yield MetadataIndex(key)

    def __len__(self) -> int:
        return sum(len(tensor.file) for tensor in self._index.tensors.values()) + len(self._index.objects)


def grid_or_boxes(shape: Shape, boxes: Sequence[Region]) -> tuple[Grid | None, list[int]]:
    """The grid whose cells are these boxes, or None; and the order that makes them row-major."""
    order = sorted(range(len(boxes)), key=lambda number: boxes[number][0])
    grid = tuple(tuple(sorted({offsets[dim] for offsets, _ in boxes})) for dim in range(len(shape)))
    # Counted first: few boxes that are no grid can have more cells between them than memory holds.
    has_cells = bool(boxes) and math.prod(map(len, grid)) == len(boxes)
    cells = StoredTensor("", shape, [], [], [], grid).all_boxes() if has_cells else iter(())
    is_grid = list(cells) == [boxes[number] for number in order] and (bool(boxes) or 0 in shape)
    return (grid if is_grid else None), order
