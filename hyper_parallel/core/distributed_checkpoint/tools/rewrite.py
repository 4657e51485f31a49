"""Writing a checkpoint again in another form: another kind, other names and shapes, other layouts. By one process, with
bounded memory: one data file (for a Hugging Face folder: one tensor) is in memory at a time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hyper_parallel.core.distributed_checkpoint.base.checksum import crc32c
from hyper_parallel.core.distributed_checkpoint.base.metadata import MetadataIndex, dtype_size
from hyper_parallel.core.distributed_checkpoint.foreign.folder_files import (
    DEFAULT_SHARD_BYTES,
    FolderPlan,
    assemble,
    commit_folder,
    create_file,
    fill_box,
    folder_path,
    write_at,
)
from hyper_parallel.core.distributed_checkpoint.foreign.key_mapping import KeyMapping, Piece
from hyper_parallel.core.distributed_checkpoint.format.index_file import (
    CheckpointIndex,
    StoredObject,
    StoredTensor,
    encode_index,
    grid_or_boxes,
)
from hyper_parallel.core.distributed_checkpoint.format.json_state import encode_object
from hyper_parallel.core.distributed_checkpoint.format.shard_file import StagedItem, WrittenFile, as_buffer, make_header
from hyper_parallel.core.distributed_checkpoint.format.stored_files import RAW_DTYPES
from hyper_parallel.core.distributed_checkpoint.storage.aside_folder import AsideFolder
from hyper_parallel.core.distributed_checkpoint.storage.file_names import data_file_name, new_save_name
from hyper_parallel.core.distributed_checkpoint.storage.storage import default_writer
from hyper_parallel.core.distributed_checkpoint.tools.selection import LayoutsByName as LayoutsByName
from hyper_parallel.core.distributed_checkpoint.tools.selection import Selection as Selection
from hyper_parallel.platform.shared.region import Region

Progress = Callable[[int, int], None]

DATA_FILE_BYTES = 256 << 20


def split_box(box: Region, element_size: int, max_bytes: int) -> Iterator[Region]:
    """The box in pieces of at most ``max_bytes``, cut along its first dims."""
    offsets, sizes = box
    if math.prod(sizes) * element_size <= max_bytes or math.prod(sizes) <= 1:
        yield box
        return
    dim = next(dim for dim, size in enumerate(sizes) if size > 1)
    rest = math.prod(sizes[dim + 1 :]) * element_size
    step = max(max_bytes // rest, 1)
    for at in range(0, sizes[dim], step):
        length = min(step, sizes[dim] - at)
        starts = (*offsets[:dim], offsets[dim] + at, *offsets[dim + 1 :])
        part = Region(starts, (*sizes[:dim], length, *sizes[dim + 1 :]))
        yield from split_box(part, element_size, max_bytes)


# ---------------------------------------------------------------------------------------------------------------------
# To our own kind
# ---------------------------------------------------------------------------------------------------------------------


class _Chunk(NamedTuple):
    name: str
    box: Region
    owner: int


def write_checkpoint(
    selection: Selection,
    destination: str | os.PathLike[str],
    *,
    mapping: Any = None,
    layouts_by_name: LayoutsByName | None = None,
    max_file_bytes: int = DATA_FILE_BYTES,
    objects: str = "plain",
    progress: Progress | None = None,
) -> int:
    """Write a checkpoint of our kind; the number of tensors in it.

    ``objects``: "plain" data only, "pickle" where needed too, or "skip" them.
    """
    source = selection
    mapped = KeyMapping.of(mapping).from_files(source.known())
    if layouts_by_name is not None:
        layouts_by_name.check_used(mapped.our_shapes)
    pieces = mapped.by_our_name()
    layouts: list[dict[str, Any]] = []
    index = CheckpointIndex(
        layouts=layouts, world_size=1 if layouts_by_name is None else math.prod(layouts_by_name.shape)
    )
    index.platform = getattr(getattr(source.source, "index", None), "platform", None)
    chunks: list[_Chunk] = []
    for name, shape in mapped.our_shapes.items():
        dtype = mapped.our_dtypes[name]
        axes = layouts_by_name.of(name, shape) if layouts_by_name is not None else None
        number = None
        if layouts_by_name is not None and axes is not None:
            boxes = list(layouts_by_name.boxes(axes, shape))
            layout = layouts_by_name.layout(axes)
            if layout not in layouts:
                layouts.append(layout)
            number = layouts.index(layout)
        elif layouts_by_name is None and _is_as_it_was(pieces[name], source):
            boxes = [(box, 0) for box in source.boxes(pieces[name][0].file_name) if 0 not in box[1]]
        else:
            boxes = [] if 0 in shape else [(Region.whole(shape), 0)]
        parts = [(part, owner) for box, owner in boxes for part in split_box(box, dtype_size(dtype), max_file_bytes)]
        grid, order = grid_or_boxes(shape, [part for part, _ in parts])
        parts = [parts[place] for place in order]
        found = None if grid is not None else [part for part, _ in parts]
        count = len(parts)
        index.tensors[name] = StoredTensor(dtype, shape, [0] * count, [0] * count, [0] * count, grid, found, number)
        chunks += [_Chunk(name, part, owner) for part, owner in parts]
    encoded = _encoded_objects(selection, objects)
    _write_chunks(source, mapped.our_dtypes, pieces, index, chunks, encoded, destination, max_file_bytes, progress)
    return len(index.tensors)


def _is_as_it_was(pieces: Sequence[Piece], source: Selection) -> bool:
    """Whether a tensor of ours is one of the source's, whole and not turned."""
    if len(pieces) != 1:
        return False
    (piece,) = pieces
    shape = source.known()[piece.file_name][0]
    return piece.dims == tuple(range(len(shape))) and piece.our_sizes == shape


def _encoded_objects(selection: Selection, objects: str) -> dict[str, tuple[bytes, str]]:
    encoded: dict[str, tuple[bytes, str]] = {}
    unsafe = []
    if objects == "skip":
        return encoded
    for name, old in selection.object_names.items():
        if hasattr(selection.source, "object_bytes"):
            encoded[name] = selection.source.object_bytes(old), selection.source.objects()[old][0]
            continue
        try:
            value = selection.source.object_value(old, objects == "pickle")
            encoded[name] = encode_object(value, name, objects == "pickle")
        except (ValueError, TypeError) as error:
            unsafe.append(f"'{name}' ({error})")
    if unsafe:
        more = f" and {len(unsafe) - 5} more" if len(unsafe) > 5 else ""
        raise ValueError(
            f"objects that are more than plain data: {'; '.join(unsafe[:5])}{more}. Leave objects out "
            "(--skip-objects), or, if you trust where the checkpoint comes from, let pickle load them (--allow-pickle)"
        )
    return encoded


def _write_chunks(
    source: Selection,
    dtypes: Mapping[str, str],
    pieces: Mapping[str, list[Piece]],
    index: CheckpointIndex,
    chunks: list[_Chunk],
    objects: Mapping[str, tuple[bytes, str]],
    destination: str | os.PathLike[str],
    max_file_bytes: int,
    progress: Progress | None,
) -> None:
    total = sum(math.prod(chunk.box[1]) * dtype_size(dtypes[chunk.name]) for chunk in chunks)
    done = 0
    places = {name: {box[0]: n for n, box in enumerate(t.all_boxes())} for name, t in index.tensors.items()}
    writer = default_writer(destination)
    writer.open(destination)
    save_name = new_save_name()
    written: list[str] = []
    try:
        writer.begin(save_name)
        for owner, number, group in _files(chunks, dtypes, objects, max_file_bytes):
            staged = [_staged(item, source, dtypes, pieces, objects) for item in group]
            header, starts = make_header(staged)
            name = data_file_name(save_name, owner, number)
            written.append(name)
            for item, start, described in zip(staged, starts, group, strict=True):
                crc = crc32c(item.data)
                if isinstance(described, str):
                    encoding = item.encoding or "json"
                    index.objects[described] = StoredObject(len(index.files), start, len(item.data), crc, encoding)
                    continue
                tensor = index.tensors[described.name]
                place = places[described.name][described.box[0]]
                tensor.file[place], tensor.start[place], tensor.crc32c[place] = len(index.files), start, crc
            writer.write_file(name, [header, *(item.data for item in staged)])
            num_bytes = sum(len(item.data) for item in staged)
            index.files.append(WrittenFile(name, len(header), num_bytes, crc32c(header)))
            done += num_bytes
            if progress is not None:
                progress(min(done, total), total)
        writer.flush()
        writer.commit(encode_index(index), [file.name for file in index.files])
    except BaseException:
        writer.discard(written)
        raise
    finally:
        writer.end()


def _files(
    chunks: list[_Chunk], dtypes: Mapping[str, str], objects: Mapping[str, tuple[bytes, str]], max_bytes: int
) -> Iterator[tuple[int, int, list[Any]]]:
    """(owner, number of its file, chunks or names of objects) of each data file."""
    by_owner: dict[int, list[Any]] = {0: []}
    for chunk in chunks:
        by_owner.setdefault(chunk.owner, []).append(chunk)
    by_owner[0] += list(objects)
    for owner, items in sorted(by_owner.items()):
        group: list[Any] = []
        size = number = 0
        for item in items:
            is_object = isinstance(item, str)
            length = len(objects[item][0]) if is_object else math.prod(item.box[1]) * dtype_size(dtypes[item.name])
            if group and size + length > max_bytes:
                yield owner, number, group
                group, size, number = [], 0, number + 1
            group.append(item)
            size += length
        if group:
            yield owner, number, group


def _staged(
    item: Any,
    source: Selection,
    dtypes: Mapping[str, str],
    pieces: Mapping[str, list[Piece]],
    objects: Mapping[str, tuple[bytes, str]],
) -> StagedItem:
    if isinstance(item, str):
        data, encoding = objects[item]
        return StagedItem(MetadataIndex(item), "uint8", (len(data),), data, encoding)
    offsets, sizes = item.box
    if _is_as_it_was(pieces[item.name], source):
        array = source.view(pieces[item.name][0].file_name, offsets, sizes)
    else:
        array = np.empty(sizes, RAW_DTYPES[dtype_size(dtypes[item.name])])
        fill_box(array, offsets, pieces[item.name], source.read)
    return StagedItem(MetadataIndex(item.name, offsets), dtypes[item.name], sizes, as_buffer(array))


# ---------------------------------------------------------------------------------------------------------------------
# To a folder of safetensors files
# ---------------------------------------------------------------------------------------------------------------------


def write_folder(
    selection: Selection,
    destination: str | os.PathLike[str],
    *,
    mapping: Any = None,
    max_file_bytes: int = DEFAULT_SHARD_BYTES,
    progress: Progress | None = None,
) -> int:
    """Write the tensors into a folder in the form of the Hugging Face hub; the number of tensors in it.

    Objects have no place there.
    """
    mapped = KeyMapping.of(mapping).to_files(selection.known())
    if not mapped.file_shapes:
        raise ValueError(f"there are no tensors to write in '{selection.source.path}'")
    plan = FolderPlan(mapped.file_shapes, mapped.file_dtypes, max_file_bytes)
    target = folder_path(destination)
    aside = AsideFolder(target, new_save_name())
    pieces = mapped.by_file_name()
    whole = _Boxes(selection)
    done = 0
    try:
        aside.make()
        for number in range(len(plan.headers)):
            descriptor = create_file(aside.file(number), plan, number)
            try:
                for name, entry in plan.entries.items():
                    if entry.file == number:
                        write_at(descriptor, assemble(entry, pieces[name], whole), entry.start)
                        done += math.prod(entry.shape) * dtype_size(entry.dtype)
                        if progress is not None:
                            progress(done, plan.total_bytes)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        commit_folder(aside, target, plan)
    finally:
        aside.remove()
    return len(plan.entries)


class _Boxes:
    """``boxes[name][slices]`` reads that box of a tensor."""

    def __init__(self, source: Selection) -> None:
        self._source = source

    def __getitem__(self, name: str) -> Any:
        return _Box(self._source, name)


class _Box(NamedTuple):
    source: Selection
    name: str

    def __getitem__(self, slices: Any) -> Any:
        return self.source.view(self.name, [s.start for s in slices], [s.stop - s.start for s in slices])
