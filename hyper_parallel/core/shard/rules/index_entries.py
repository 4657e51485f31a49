"""The entries of an index such as ``x[1, ..., 2:5, rows]``: what each one is and which dim it takes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.dtensor.layout import Shape
from hyper_parallel.core.shard.rule_kit.signature import TensorSpec
from hyper_parallel.platform import get_platform

_platform = get_platform()

INT, RANGE, NEW, TENSOR = "int", "range", "new", "tensor"


@dataclass(frozen=True)
class Item:
    """One entry of an index: what it is, the dim of the tensor it takes (the first, for a mask), and its value."""

    kind: str
    dim: int
    value: Any = None
    bounds: tuple[int, int, int] = (0, 0, 1)  # of a range: start, stop, step, in the whole dim

    def is_all_of(self, size: int) -> bool:
        return self.kind == RANGE and self.bounds[2] == 1 and self.bounds[0] == 0 and self.bounds[1] >= size

    @property
    def length(self) -> int:
        return len(range(*self.bounds))


def parse(index: Any, shape: Shape) -> list[Item] | None:
    """The entries of an index on a tensor of ``shape``, the ellipsis written out; None for forms that are gathered."""
    entries = list(index) if isinstance(index, tuple) else [index]
    if any(is_odd(entry) for entry in entries):
        return None
    taken = sum(1 for entry in entries if entry is not None and entry is not Ellipsis)
    missing = len(shape) - taken
    if missing < 0:
        return None
    if not any(entry is Ellipsis for entry in entries):
        entries.append(Ellipsis)
    items: list[Item] = []
    dim = 0
    for entry in entries:
        if entry is Ellipsis:
            for _ in range(missing):
                items.append(Item(RANGE, dim, None, (0, shape[dim], 1)))
                dim += 1
            missing = 0
            continue
        if entry is None:
            items.append(Item(NEW, dim))
            continue
        if isinstance(entry, slice):
            items.append(Item(RANGE, dim, None, entry.indices(shape[dim])))
        elif isinstance(entry, (TensorSpec, list, range)):
            items.append(Item(TENSOR, dim, entry))
        else:
            position = operator.index(entry)
            items.append(Item(INT, dim, position + shape[dim] if position < 0 else position))
        dim += 1
    return items


def is_odd(entry: Any) -> bool:
    """Masks, nested lists, arrays, numbers inside tensors: forms whose shapes or values a plan does not know."""
    if entry is None or entry is Ellipsis:
        return False
    if isinstance(entry, slice):
        bounds = (entry.start, entry.stop, entry.step)
        return not all(bound is None or type(bound) is int for bound in bounds)
    if isinstance(entry, TensorSpec):
        return entry.ndim == 0 or dtype_kind(entry) not in ("int64", "int32", "int16", "int8")
    if isinstance(entry, (list, range)):
        return not entry or not all(type(number) is int for number in entry)
    return type(entry) is not int


def dtype_kind(spec: TensorSpec) -> str:
    """The name of a dtype: "float32", "bool"."""
    return _platform.dtype_name(spec.dtype)


def can_be_partial(spec: TensorSpec) -> bool:
    """Whether zeros of other ranks may be added to the values: numbers, not truth values."""
    return dtype_kind(spec).startswith(("float", "bfloat", "int"))


def only_row(block: Any, dim: int, position: int, offset: int, length: int) -> Any:
    """Row ``position`` of the whole dim, kept as a dim of size 1: itself where this rank has it, else zeros."""
    if offset <= position < offset + length:
        return block.narrow(dim, position - offset, 1)
    return block.narrow(dim, 0, 0).sum(dim, keepdim=True).to(block.dtype)


def rows_here(block: Any, dim: int, index: Any, size: int, offset: int) -> tuple[Any, Any]:
    """For positions in a whole dim of ``size``: those in this block, 0 for others, and where they are others."""
    index = index.masked_fill(index < 0, 0) + (index + size) * (index < 0)
    elsewhere = (index < offset) | (index >= offset + block.shape[dim])
    return (index - offset).masked_fill(elsewhere, 0), elsewhere


def broadcast_shape(shapes: Sequence[Shape]) -> Shape:
    longest = max(len(shape) for shape in shapes)
    sizes = [1] * longest
    for shape in shapes:
        for dim, size in enumerate(shape, longest - len(shape)):
            sizes[dim] = size if sizes[dim] == 1 else sizes[dim]
    return tuple(sizes)


def index_shape(index: Any) -> Shape:
    return index.shape if isinstance(index, TensorSpec) else (len(index),)


def is_list_of_numbers(index: Any) -> bool:
    return isinstance(index, list) and all(type(entry) is int for entry in index)
