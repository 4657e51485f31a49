"""Whether what a metadata file says can be true: checksums find damage, this finds content that never was right.

The chunks of a tensor must cover it, each element once; the chunks and objects in a file must cover its data, each byte
once; files must lie in the checkpoint's own folder. So nothing that is read later can point anywhere else, be larger
than the files, or leave a byte unchecked.

Note [The check is bounded too]
What a stranger wrote may be true and yet take hours to check, so numbers are looked at before they are multiplied and
counts before anything is counted out: a tensor has up to 64 dims (as numpy's arrays do) and less than 2**63 bytes, a
grid has as many cells as the tensor has chunks listed, and whether boxes cover a tensor is told in one pass over them
(``exact_cover.py``).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Set
from typing import Any

from hyper_parallel.core.distributed_checkpoint.base.exact_cover import covers_once
from hyper_parallel.core.distributed_checkpoint.base.grids import Grid
from hyper_parallel.core.distributed_checkpoint.base.metadata import STORABLE_DTYPES, dtype_size
from hyper_parallel.core.distributed_checkpoint.base.shown_text import shown, shown_value
from hyper_parallel.core.distributed_checkpoint.storage.file_names import is_data_file
from hyper_parallel.platform.shared.region import Region, Shape

MAX_DIMS = 64
_MAX_COUNT = 1 << 63
_MAX_CRC = 1 << 32
_MAX_HEADER = 1 << 30
_LOOKED_AT = 200  # boxes among which two that overlap are looked for, to name them

_BODY = frozenset(("world_size", "platform", "files", "layouts", "tensors", "objects"))
_TENSOR = frozenset(("dtype", "shape", "file", "start", "crc32c"))
_TENSOR_TOO = frozenset(("grid", "boxes", "layout", "requires_grad"))
_OBJECT = frozenset(("file", "start", "length", "crc32c", "encoding"))
_LAYOUT = frozenset(("device_type", "mesh_shape", "mesh_dim_names", "rank_list", "cuts", "partials"))

Ranges = list[list[tuple[int, int, str]]]  # for each file (start, length, what is there)


def check_body(content: Any) -> None:
    """Raise a ValueError that says what is wrong with the body of a metadata file, if anything is."""
    _check_keys(content, "the body", _BODY)
    _require(_is_count(content["world_size"], 1), "world_size", content["world_size"], "is not a number of ranks")
    platform = content["platform"]
    _require(platform is None or isinstance(platform, str), "platform", platform, "is not a name")
    for kind, wanted in (("files", list), ("layouts", list), ("tensors", dict), ("objects", dict)):
        _require(type(content[kind]) is wanted, kind, content[kind], f"is not a {wanted.__name__}")
    sizes = [_checked_file(number, file) for number, file in enumerate(content["files"])]
    names = [file[0] for file in content["files"]]
    _require(len(set(names)) == len(names), "files", names, "names a file twice")
    for number, layout in enumerate(content["layouts"]):
        _check_layout(f"layout {number}", layout)
    both = content["tensors"].keys() & content["objects"].keys()
    _require(not both, "tensors", sorted(both), "are objects too")
    ranges: Ranges = [[] for _ in sizes]
    for name, entry in content["tensors"].items():
        _check_tensor(f"the tensor '{shown(name)}'", entry, content["layouts"], ranges)
    for name, entry in content["objects"].items():
        _check_object(f"the object '{shown(name)}'", entry, ranges)
    for name, size, found in zip(names, sizes, ranges, strict=True):
        _check_ranges(name, size, found)


def _require(is_right: bool, where: str, value: Any, what: str) -> None:
    if not is_right:
        raise _wrong(where, value, what)


def _wrong(where: str, value: Any, what: str) -> ValueError:
    return ValueError(f"{where}: {shown_value(value)} {what}")


def _check_keys(entry: Any, where: str, needed: Set[str], optional: Set[str] = frozenset()) -> None:
    _require(type(entry) is dict, where, entry, "is not a dict")
    if entry.keys() != needed:
        missing, unknown = needed - entry.keys(), entry.keys() - needed - optional
        _require(not missing, where, sorted(missing), "are missing")
        _require(not unknown, where, sorted(unknown), "are not known")


def _is_count(value: Any, least: int = 0, end: int = _MAX_COUNT) -> bool:
    return type(value) is int and least <= value < end


def _are_counts(values: Any, end: int = _MAX_COUNT) -> bool:
    if type(values) is not list or not values:
        return type(values) is list
    return set(map(type, values)) == {int} and min(values) >= 0 and max(values) < end


def _is_shape(values: Any) -> bool:
    return _are_counts(values) and len(values) <= MAX_DIMS


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


# ---------------------------------------------------------------- parts of the body


def _checked_file(number: int, file: Any) -> int:
    """The bytes of data of a file."""
    where = f"file {number}"
    _require(type(file) is list and len(file) == 4, where, file, "is not [name, header bytes, data bytes, crc32c]")
    name, header_bytes, data_bytes, crc = file
    _require(_is_text(name) and is_data_file(name), where, name, "is not the name of a data file in the checkpoint")
    _require(_is_count(header_bytes, 8, _MAX_HEADER), where, header_bytes, "is not a size of a header")
    _require(_is_count(data_bytes), where, data_bytes, "is not a size")
    _require(_is_count(crc, 0, _MAX_CRC), where, crc, "is not a crc32c")
    return data_bytes


def _check_layout(where: str, layout: Any) -> None:
    _check_keys(layout, where, _LAYOUT)
    shape, names, ranks, cuts = (layout[key] for key in ("mesh_shape", "mesh_dim_names", "rank_list", "cuts"))
    _require(_is_text(layout["device_type"]), where, layout["device_type"], "is not a type of device")
    _require(_is_shape(shape) and 0 not in shape, where, shape, "is not the shape of a mesh")
    are_names = names is None or (type(names) is list and len(names) == len(shape) and all(map(_is_text, names)))
    _require(are_names, where, names, f"are not names for a mesh of {len(shape)} axes")
    are_ranks = _are_counts(ranks) and len(ranks) == math.prod(shape) and len(set(ranks)) == len(ranks)
    _require(are_ranks, where, ranks, f"are not the ranks of mesh {shape}")
    are_cuts = type(cuts) is list and len(cuts) <= MAX_DIMS and all(_are_counts(axes, len(shape)) for axes in cuts)
    used = [axis for axes in cuts for axis in axes] if are_cuts else []
    _require(are_cuts and len(set(used)) == len(used), where, cuts, f"do not shard over the axes of mesh {shape}")
    partials = layout["partials"]
    are_partials = type(partials) is list and len(partials) == len(shape)
    are_partials = are_partials and all(partial is None or _is_text(partial) for partial in partials)
    _require(are_partials, where, partials, "is not one for each axis")


def _check_tensor(where: str, entry: Any, layouts: list[Any], ranges: Ranges) -> None:
    _check_keys(entry, where, _TENSOR, _TENSOR_TOO)
    shape, dtype = entry["shape"], entry["dtype"]
    _require(_is_shape(shape), where, shape, "is not a shape")
    _require(_is_text(dtype) and dtype in STORABLE_DTYPES, where, dtype, "is not a dtype that this version knows")
    size = dtype_size(dtype)
    has_size = math.prod(filter(None, shape)) * size < _MAX_COUNT
    _require(has_size, where, shape, "is not a shape that anything could have")
    layout, requires_grad = entry.get("layout"), entry.get("requires_grad", False)
    if layout is not None:
        if not _is_count(layout, 0, len(layouts)):
            raise _wrong(where, layout, f"is not one of the {len(layouts)} layouts")
        if len(layouts[layout]["cuts"]) != len(shape):
            raise _wrong(where, layouts[layout]["cuts"], f"do not shard shape {shape}")
    _require(type(requires_grad) is bool, where, requires_grad, "is not true or false")
    if ("grid" in entry) == ("boxes" in entry):
        raise _wrong(where, sorted(entry), "has not one of 'grid' and 'boxes'")
    volumes = _volumes_of_grid(where, entry) if "grid" in entry else _volumes_of_boxes(where, entry)
    for key, end in (("file", len(ranges)), ("start", _MAX_COUNT), ("crc32c", _MAX_CRC)):
        if not _are_counts(entry[key], end) or len(entry[key]) != len(volumes):
            raise _wrong(where, entry[key], f"is not a '{key}' below {end} for each of the {len(volumes)} chunks")
    for file, start, volume in zip(entry["file"], entry["start"], volumes, strict=True):
        ranges[file].append((start, volume * size, where))


def _volumes_of_grid(where: str, entry: Any) -> Collection[int]:
    """The elements of each chunk."""
    shape, grid = tuple(entry["shape"]), entry["grid"]
    if type(grid) is not list or len(grid) != len(shape) or not all(map(_are_counts, grid)):
        raise _wrong(where, grid, "is not a list for each dim")
    cells = tuple(map(tuple, grid))
    if problem := grid_problem(cells, shape):
        raise _wrong(where, grid, problem)
    # Before the cells are counted out: a few lists can make more of them than memory holds.
    num_cells = 0 if 0 in shape else math.prod(map(len, grid))
    if type(entry["file"]) is not list or len(entry["file"]) != num_cells:
        raise _wrong(where, entry["file"], f"is not a 'file' for each of {num_cells} chunks")
    return _cell_volumes(cells, shape)


def _volumes_of_boxes(where: str, entry: Any) -> Collection[int]:
    shape, boxes = tuple(entry["shape"]), entry["boxes"]
    if type(boxes) is not list or not all(_is_box(box, len(shape)) for box in boxes):
        raise _wrong(where, boxes, "are no boxes")
    if problem := boxes_problem([Region(tuple(at), tuple(sizes)) for at, sizes in boxes], shape):
        raise _wrong(where, boxes, problem)
    return [math.prod(sizes) for _, sizes in boxes]


def _check_object(where: str, entry: Any, ranges: Ranges) -> None:
    _check_keys(entry, where, _OBJECT)
    _require(_is_count(entry["file"], 0, len(ranges)), where, entry["file"], f"is not one of the {len(ranges)} files")
    for key, end in (("start", _MAX_COUNT), ("length", _MAX_COUNT), ("crc32c", _MAX_CRC)):
        _require(_is_count(entry[key], 0, end), where, entry[key], f"is not a '{key}'")
    _require(_is_text(entry["encoding"]), where, entry["encoding"], "is not the name of an encoding")
    ranges[entry["file"]].append((entry["start"], entry["length"], where))


def _check_ranges(name: str, size: int, found: list[tuple[int, int, str]]) -> None:
    at = 0
    for start, length, where in sorted(found):
        if start + length > size:
            raise ValueError(f"{where} ends at byte {start + length} of the {size} bytes of data in '{name}'")
        if length and start != at:
            what = "overlaps what comes before it" if start < at else "leaves a gap before it"
            raise ValueError(f"{where}, at byte {start} of the data in '{name}', {what}, which ends at {at}")
        at += length
    if at != size:
        raise ValueError(f"nothing is said about the last {size - at} of the {size} bytes of data in '{name}'")


# ---------------------------------------------------------------- chunks


def _is_box(box: Any, ndim: int) -> bool:
    return type(box) is list and len(box) == 2 and all(_are_counts(part) and len(part) == ndim for part in box)


@functools.lru_cache(maxsize=4096)
def grid_problem(grid: Grid, shape: Shape) -> str:
    """What keeps the cells of a grid from covering a tensor; "" when they do."""
    if 0 in shape:
        return ""
    for starts, size in zip(grid, shape, strict=True):
        if not starts or starts[0] != 0 or list(starts) != sorted(set(starts)) or starts[-1] >= size:
            return f"does not split shape {list(shape)}: in each dim chunks start at 0 and later, each once"
    return ""


@functools.lru_cache(maxsize=4096)
def _cell_volumes(grid: Grid, shape: Shape) -> tuple[int, ...]:
    """The elements of each cell, row-major."""
    if 0 in shape:
        return ()
    volumes = [1]
    for starts, size in zip(grid, shape, strict=True):
        sides = [end - start for start, end in zip(starts, [*starts[1:], size], strict=True)]
        volumes = [volume * side for volume in volumes for side in sides]
    return tuple(volumes)


def boxes_problem(boxes: list[Region], shape: Shape) -> str:
    """What keeps boxes from covering a tensor, each element once; "" when they do."""
    for offsets, sizes in boxes:
        if 0 in sizes or any(at + size > end for at, size, end in zip(offsets, sizes, shape, strict=True)):
            return f"has a box at {list(offsets)} of size {list(sizes)}, which is no part of shape {list(shape)}"
    if covers_once(boxes, shape):
        return ""
    num_covered, num_elements = sum(math.prod(sizes) for _, sizes in boxes), math.prod(shape)
    for one, other in itertools.combinations(boxes[:_LOOKED_AT], 2):
        if Region.overlap(one, other) is not None:
            return f"has boxes that overlap: at {list(one[0])} and at {list(other[0])}"
    if num_covered >= num_elements:
        return "has boxes that overlap"
    return f"covers {num_covered} of the {num_elements} elements of shape {list(shape)}"
