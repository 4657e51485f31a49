"""Reading parts of a tensor by position: ``x[index]`` in all its forms, and ``select``.

Note [An element of a cut dim]
``x[3]`` of a cut dim is held by one rank. It gives its row and the others give zeros, as a pending sum: nothing is sent
until somebody needs the value. Ranges of a cut dim are gathered, since their rows lie elsewhere afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hyper_parallel.core.shard.rule_kit.empty_blocks import with_spare_row
from hyper_parallel.core.shard.rule_kit.rule_table import rule
from hyper_parallel.core.shard.rule_kit.signature import (
    Labels,
    LocalCall,
    OpCall,
    Signature,
    TensorSpec,
    broadcast_labels,
    letters,
)
from hyper_parallel.core.shard.rules.index_entries import (
    INT,
    NEW,
    RANGE,
    TENSOR,
    Item,
    broadcast_shape,
    can_be_partial,
    index_shape,
    is_list_of_numbers,
    only_row,
    parse,
    rows_here,
)
from hyper_parallel.core.shard.rules.positions import with_checked_positions
from hyper_parallel.core.shard.rules.views import ALONE
from hyper_parallel.platform import get_platform

_platform = get_platform()


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
        elif spec.layout.shard_axes[item.dim] and can_be_partial(spec):
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

    reading = Signature(
        (tuple(found.inputs), *index_labels),
        (tuple(found.output),),
        reduces=found.reduces,
        linear=ALONE,
        local=read if found.picked or found.tensors else None,
    )
    given = [item for item in found.tensors if isinstance(item.value, TensorSpec)]
    for number, item in enumerate(given, 1):
        size = spec.shape[item.dim]
        reading = with_checked_positions(reading, "getitem", number, item.dim, size, wraps=True)
    return reading


def _index_labels(spec: TensorSpec, found: _Reading) -> tuple[tuple[Labels, ...], Labels]:
    """The labels of the index tensors, and those of the dims they give together."""
    specs = [item.value for item in found.tensors if isinstance(item.value, TensorSpec)]
    shapes = [index_shape(item.value) for item in found.tensors]
    added = broadcast_shape(shapes)
    if len(specs) < len(shapes):  # a list is the same on all ranks, so tensors that go with it must be whole
        return tuple((None,) * each.ndim for each in specs), (None,) * len(added)
    labels = tuple(
        tuple(None if label is None else f"i{label}" for label in each)
        for each in broadcast_labels([each.shape for each in specs], added)
    )
    if len(found.tensors) == 1 and can_be_partial(spec):
        dim = found.tensors[0].dim
        if spec.layout.shard_axes[dim]:
            label = letters(spec.ndim)[dim]
            assert label is not None
            found.inputs[dim] = label
            found.reduces[label] = "sum"
    return labels, tuple(f"i{label}" for label in letters(len(added)))


def _read(call: LocalCall, picked: Sequence[tuple[int, int]]) -> Any:
    block, index = call.args
    entries = list(index) if isinstance(index, (tuple, list)) and not is_list_of_numbers(index) else [index]
    shape = call.input_shapes[0]
    offsets, lengths = call.inputs[0].deciding_region(shape) if picked else call.inputs[0].local_region(shape)
    for dim, position in picked:
        if call.inputs[0].shard_axes[dim]:
            block = only_row(block, dim, position, offsets[dim], lengths[dim])
            entries[_place_of(entries, dim, len(shape))] = 0
    tensors = [place for place, entry in enumerate(entries) if _platform.is_tensor(entry)]
    if len(tensors) == 1:
        (place,) = tensors
        dim = _dim_at(entries, place, len(shape))
        if call.inputs[0].shard_axes[dim]:
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
        offsets, lengths = local.inputs[0].deciding_region(local.input_shapes[0])
        block = local.args[0] if local.args else local.kwargs["input"]
        if local.inputs[0].shard_axes[dim]:
            return local.func(only_row(block, dim, position, offsets[dim], lengths[dim]), dim, 0)
        return local.func(block, dim, position)

    reading = read if found.picked else None
    return Signature((tuple(found.inputs),), (tuple(found.output),), reduces=found.reduces, linear=ALONE, local=reading)
