"""Reading and writing parts of a tensor by position: ``x[index]`` in all its forms, ``select`` and ``index_put``.

Note [An element of a cut dim]
``x[3]`` of a cut dim is held by one rank. It gives its row and the others give zeros, as a pending sum: nothing is sent
until somebody needs the value. Ranges of a cut dim are gathered, since their rows lie elsewhere afterwards.

Note [Writing into a cut dim]
Every rank writes the part of the range that it holds. The value is whole along that dim, and each rank takes from it
what belongs to its rows; ranks with nothing to write still have the value in their graph.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.core.dtensor.layout import Shape
from hyper_parallel.core.shard.rule_table import rule
from hyper_parallel.core.shard.rules.views import ALONE
from hyper_parallel.core.shard.signature import (
    Labels,
    LocalCall,
    OpCall,
    Signature,
    TensorSpec,
    broadcast_labels,
    letters,
)
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
    if any(_is_odd(entry) for entry in entries):
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


def _is_odd(entry: Any) -> bool:
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


def can_be_pending(spec: TensorSpec) -> bool:
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


def with_spare_row(block: Any, dim: int) -> Any:
    """The block with a row of zeros behind its last, so that there is one even where the block is empty."""
    return _platform.cat([block, block.narrow(dim, 0, 0).sum(dim, keepdim=True).to(block.dtype)], dim)


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------


@dataclass
class _Reading:
    """Labels found while walking over an index."""

    inputs: list[str | None]
    output: list[str | None] = field(default_factory=list)
    reduces: dict[str, str] = field(default_factory=dict)
    picked: list[int] = field(default_factory=list)  # cut dims of which one row is taken
    tensors: list[Item] = field(default_factory=list)
    place: int = 0  # where the dims of the index tensors go
    is_split: bool = False  # other dims lie between the index tensors
    is_open: bool = False

    def add(self, label: str | None) -> None:
        self.output.append(label)
        self.is_open = False

    def add_tensor(self, item: Item) -> None:
        if not self.tensors:
            self.place = len(self.output)
        elif not self.is_open:
            self.is_split = True
        self.tensors.append(item)
        self.is_open = True


def _walk(spec: TensorSpec, items: Sequence[Item]) -> _Reading:
    names = letters(spec.ndim)
    found = _Reading([None] * spec.ndim)
    for item in items:
        if item.kind == NEW:
            found.add(None)
        elif item.kind == RANGE:
            label = names[item.dim] if item.is_all_of(spec.shape[item.dim]) else None
            found.inputs[item.dim] = label
            found.add(label)
        elif item.kind == TENSOR:
            found.add_tensor(item)
        elif spec.layout.cuts[item.dim] and can_be_pending(spec):
            label = names[item.dim]
            assert label is not None
            found.inputs[item.dim] = label
            found.reduces[label] = "sum"
            found.picked.append(item.dim)
    return found


@rule("getitem", by_dtype=True)
def getitem(call: OpCall) -> Signature | None:
    spec = call.args[0]
    if not isinstance(spec, TensorSpec):
        return None
    items = parse(call.args[1], spec.shape)
    if items is None:
        return None
    found = _walk(spec, items)
    index_labels: tuple[Labels, ...] = ()
    if found.tensors:
        index_labels, added = _index_labels(spec, found)
        place = 0 if found.is_split else found.place
        found.output[place:place] = added
    if len(found.output) != len(call.outputs[0]):
        return None
    positions = {item.dim: item.value for item in items if item.kind == INT}

    def read(local: LocalCall) -> Any:
        return _read(local, [(dim, positions[dim]) for dim in found.picked])

    return Signature(
        (tuple(found.inputs), *index_labels),
        (tuple(found.output),),
        reduces=found.reduces,
        linear=ALONE,
        local=read if found.picked or found.tensors else None,
    )


def _index_labels(spec: TensorSpec, found: _Reading) -> tuple[tuple[Labels, ...], Labels]:
    """The labels of the index tensors, and those of the dims they give together."""
    specs = [item.value for item in found.tensors if isinstance(item.value, TensorSpec)]
    shapes = [_index_shape(item.value) for item in found.tensors]
    added = _broadcast(shapes)
    if len(specs) < len(shapes):  # a list is the same on all ranks, so tensors that go with it must be whole
        return tuple((None,) * each.ndim for each in specs), (None,) * len(added)
    labels = tuple(
        tuple(None if label is None else f"i{label}" for label in each)
        for each in broadcast_labels([each.shape for each in specs], added)
    )
    if len(found.tensors) == 1 and can_be_pending(spec):
        dim = found.tensors[0].dim
        if spec.layout.cuts[dim]:
            label = letters(spec.ndim)[dim]
            assert label is not None
            found.inputs[dim] = label
            found.reduces[label] = "sum"
    return labels, tuple(f"i{label}" for label in letters(len(added)))


def _broadcast(shapes: Sequence[Shape]) -> Shape:
    longest = max(len(shape) for shape in shapes)
    sizes = [1] * longest
    for shape in shapes:
        for dim, size in enumerate(shape, longest - len(shape)):
            sizes[dim] = size if sizes[dim] == 1 else sizes[dim]
    return tuple(sizes)


def _read(call: LocalCall, picked: Sequence[tuple[int, int]]) -> Any:
    block, index = call.args
    entries = list(index) if isinstance(index, (tuple, list)) and not _is_list_of_numbers(index) else [index]
    shape = call.input_shapes[0]
    lengths, offsets = call.inputs[0].local_region(shape)
    for dim, position in picked:
        if call.inputs[0].cuts[dim]:
            block = only_row(block, dim, position, offsets[dim], lengths[dim])
            entries[_place_of(entries, dim, len(shape))] = 0
    tensors = [place for place, entry in enumerate(entries) if _platform.is_tensor(entry)]
    if len(tensors) == 1:
        (place,) = tensors
        dim = _dim_at(entries, place, len(shape))
        if call.inputs[0].cuts[dim]:
            return _read_rows(call.func, block, entries, place, dim, shape[dim], offsets[dim])
    return call.func(block, tuple(entries))


def _read_rows(func: Any, block: Any, entries: list[Any], place: int, dim: int, size: int, offset: int) -> Any:
    """Rows of a cut dim by an index tensor: zeros for those that other ranks have."""
    index, elsewhere = rows_here(block, dim, entries[place], size, offset)
    if block.shape[dim] == 0:
        block = with_spare_row(block, dim)
    rows = func(block, (*entries[:place], index, *entries[place + 1 :]))
    # The mask goes where the index tensor's dims went: behind the dims that the entries before it left.
    later = rows.ndim - _num_dims_before(entries, place, block.ndim) - elsewhere.ndim
    return rows.masked_fill(elsewhere.reshape(*elsewhere.shape, *(1,) * later), 0)


def _is_list_of_numbers(index: Any) -> bool:
    return isinstance(index, list) and all(type(entry) is int for entry in index)


def _num_taken(entries: Sequence[Any]) -> int:
    return sum(1 for entry in entries if entry is not None and entry is not Ellipsis)


def _dim_at(entries: Sequence[Any], place: int, ndim: int) -> int:
    """The dim of the tensor that the entry at ``place`` takes."""
    dim = _num_taken(entries[:place])
    if any(entry is Ellipsis for entry in entries[:place]):
        dim += ndim - _num_taken(entries)
    return dim


def _place_of(entries: Sequence[Any], dim: int, ndim: int) -> int:
    """The entry that takes ``dim`` by one position."""
    for place, entry in enumerate(entries):
        if type(entry) is int and _dim_at(entries, place, ndim) == dim:
            return place
    raise AssertionError(f"no entry of {entries} takes dim {dim}")


def _num_dims_before(entries: Sequence[Any], place: int, ndim: int) -> int:
    """How many dims of the result the entries before ``place`` give."""
    count = 0
    for entry in entries[:place]:
        if entry is Ellipsis:
            count += ndim - _num_taken(entries)
        elif entry is None or isinstance(entry, slice):
            count += 1
    return count


@rule("select", "select_copy", by_dtype=True)
def select(call: OpCall) -> Signature | None:
    bound = call.bind("input", "dim", "index")
    spec = call.tensors[0]
    if type(bound["index"]) is not int or len(call.tensors) > 1:
        return None
    dim = bound["dim"] % spec.ndim
    position = bound["index"] + (spec.shape[dim] if bound["index"] < 0 else 0)
    found = _walk(spec, [Item(INT if d == dim else RANGE, d, position, (0, n, 1)) for d, n in enumerate(spec.shape)])

    def read(local: LocalCall) -> Any:
        lengths, offsets = local.inputs[0].local_region(local.input_shapes[0])
        block = local.args[0] if local.args else local.kwargs["input"]
        if local.inputs[0].cuts[dim]:
            return local.func(only_row(block, dim, position, offsets[dim], lengths[dim]), dim, 0)
        return local.func(block, dim, position)

    reading = read if found.picked else None
    return Signature((tuple(found.inputs),), (tuple(found.output),), reduces=found.reduces, linear=ALONE, local=reading)


# ---------------------------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------------------------


@rule("setitem", by_dtype=True)
def setitem(call: OpCall) -> Signature | None:
    spec, index, value = call.args
    if not isinstance(spec, TensorSpec):
        return None
    if _is_mask(index) and not (isinstance(value, TensorSpec) and value.ndim):
        return _set_where(spec, index, value)
    items = parse(index, spec.shape)
    if items is None:
        return None
    if any(item.kind == TENSOR for item in items):
        return _set_at_tensors(call, spec, items, value)
    given: list[tuple[str | None, int]] = []  # label and size of the dims of x[index]
    names = letters(spec.ndim)
    for item in items:
        if item.kind == NEW:
            given.append((None, 1))
        elif item.kind == RANGE:
            given.append((names[item.dim] if item.is_all_of(spec.shape[item.dim]) else None, item.length))
    inputs = (names, _value_labels(value, given)) if isinstance(value, TensorSpec) else (names,)
    return Signature(inputs, (), writes=0, linear=_together_with_value(call), local=lambda local: _write(local, items))


def _set_at_tensors(call: OpCall, spec: TensorSpec, items: list[Item], value: Any) -> Signature | None:
    """Some entries are index tensors or lists; all dims that are not taken as they are must be whole."""
    chosen = [item.dim for item in items if item.kind != NEW and not item.is_all_of(spec.shape[item.dim])]
    if any(spec.layout.cuts[dim] for dim in chosen):
        return None
    indices = [item.value for item in items if item.kind == TENSOR]
    inputs: list[Labels] = [
        letters(spec.ndim),
        *((None,) * each.ndim for each in indices if isinstance(each, TensorSpec)),
    ]
    if isinstance(value, TensorSpec):
        given = _given_at_tensors(spec, items) if any(spec.layout.cuts) else [(None, 1)] * value.ndim
        if given is None:
            return None
        inputs.append(_value_labels(value, given))
    return Signature(tuple(inputs), (), writes=0, linear=_together_with_value(call), local=_write_at_tensors)


def _together_with_value(call: OpCall) -> tuple[frozenset[int], ...]:
    is_tensor = isinstance(call.args[2], TensorSpec)
    return (frozenset({0, len(call.tensors) - 1}),) if is_tensor else ()


def _value_labels(value: TensorSpec, given: Sequence[tuple[str | None, int]]) -> Labels:
    extra = value.ndim - len(given)
    aligned = list(given)[-extra:] if extra < 0 else [(None, 1)] * extra + list(given)
    return tuple(label if size == wanted else None for size, (label, wanted) in zip(value.shape, aligned, strict=True))


def _is_mask(index: Any) -> bool:
    return isinstance(index, TensorSpec) and dtype_kind(index) == "bool" and index.ndim > 0


def _set_where(spec: TensorSpec, mask: TensorSpec, value: Any) -> Signature | None:
    """One value wherever a mask over the first dims says so."""
    if mask.shape != spec.shape[: mask.ndim]:
        return None
    names = letters(spec.ndim)
    inputs: tuple[Labels, ...] = (names, names[: mask.ndim])
    if isinstance(value, TensorSpec):
        inputs = (*inputs, ())
    return Signature(inputs, (), writes=0, local=_write_at_tensors)


def _given_at_tensors(spec: TensorSpec, items: list[Item]) -> list[tuple[str | None, int]] | None:
    """Labels and sizes of the dims of x[index] when index tensors stand next to each other, among ranges only."""
    places = [place for place, item in enumerate(items) if item.kind == TENSOR]
    is_plain = all(item.kind in (RANGE, TENSOR) for item in items)
    if not is_plain or places != list(range(places[0], places[0] + len(places))):
        return None
    names = letters(spec.ndim)
    given: list[tuple[str | None, int]] = []
    for place, item in enumerate(items):
        if place == places[0]:
            given.extend((None, size) for size in _broadcast([_index_shape(items[at].value) for at in places]))
        if item.kind == RANGE:
            given.append((names[item.dim] if item.is_all_of(spec.shape[item.dim]) else None, item.length))
    return given


def _index_shape(index: Any) -> Shape:
    return index.shape if isinstance(index, TensorSpec) else (len(index),)


def _write_at_tensors(call: LocalCall) -> Any:
    _, index, value = call.args
    if isinstance(index, list) and not _is_list_of_numbers(index):
        index = tuple(index)
    call.func(call.written, index, value)


def _write(call: LocalCall, items: Sequence[Item]) -> Any:
    value = call.args[2]
    shape = call.input_shapes[0]
    lengths, offsets = call.inputs[0].local_region(shape)
    entries: list[Any] = []
    taken: list[tuple[int, int] | None] = []  # for each dim of x[index], single positions included: part of the value
    single: list[int] = []  # dims of x[index] that are single positions
    for item in items:
        if item.kind == NEW:
            entries.append(None)
            taken.append(None)
        elif item.kind == INT:
            here = offsets[item.dim] <= item.value < offsets[item.dim] + lengths[item.dim]
            start = item.value - offsets[item.dim] if here else 0
            entries.append(slice(start, start + here))
            single.append(len(taken))
            taken.append(None)
        else:
            entry, part = _part_of_range(item.bounds, offsets[item.dim], lengths[item.dim])
            entries.append(entry)
            taken.append(None if item.is_all_of(shape[item.dim]) else part)
    if _platform.is_tensor(value) and value.ndim:
        value = _part_of_value(value, taken, single)
    call.func(call.written, tuple(entries), value)


def _part_of_range(bounds: tuple[int, int, int], offset: int, length: int) -> tuple[slice, tuple[int, int]]:
    """The part of a range that lies in a block, in the block; and which of the range's elements these are."""
    start, stop, step = bounds
    count = len(range(start, stop, step))
    first = max(0, -(-(offset - start) // step))
    last = min(count, -(-(offset + length - start) // step))
    if last <= first:
        return slice(0, 0), (0, 0)
    begin = start + first * step - offset
    return slice(begin, begin + (last - first - 1) * step + 1, step), (first, last - first)


def _part_of_value(value: Any, taken: Sequence[tuple[int, int] | None], single: Sequence[int]) -> Any:
    num_given = len(taken) - len(single)
    if value.ndim > num_given:  # leading dims of size 1
        value = value.reshape(value.shape[value.ndim - num_given :])
    place = num_given - value.ndim  # of the value's first dim among those that are not single positions
    kept = [dim for dim in range(len(taken)) if dim not in single][place:]
    if not kept:
        return value
    for dim in range(kept[0], len(taken)):
        at = dim - kept[0]
        if dim in single:
            value = value.unsqueeze(at)
        elif taken[dim] is not None and value.shape[at] != 1:
            value = value.narrow(at, *taken[dim])
    return value


@rule("index_put", "_index_put_impl", by_dtype=True)
def index_put(call: OpCall) -> Signature | None:
    bound = call.bind("input", "indices", "values", "accumulate")
    spec, values = call.tensors[0], bound["values"]
    indices = bound["indices"]
    if not isinstance(values, TensorSpec) or any(entry is None or _is_odd(entry) for entry in indices):
        return None
    num_indexed = len(indices)
    if call.name.endswith("_") and any(spec.layout.cuts[:num_indexed]):
        return None
    names = letters(spec.ndim)
    rest = names[num_indexed:]
    added = _broadcast([entry.shape for entry in indices])
    given = [*((None, size) for size in added), *zip(rest, spec.shape[num_indexed:], strict=True)]
    labels = ((None,) * num_indexed + rest, *((None,) * entry.ndim for entry in indices), _value_labels(values, given))
    return Signature(labels, (labels[0],), linear=(frozenset({0, len(labels) - 1}),), local=_put)


def _put(call: LocalCall) -> Any:
    if call.written is None:
        return call.func(*call.args, **call.kwargs)
    return call.func(call.written, *call.args[1:], **call.kwargs)
