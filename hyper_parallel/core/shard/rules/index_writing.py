"""Writing parts of a tensor by position: ``x[index] = value`` in all its forms, and ``index_put``.

Note [Writing into a cut dim]
Every rank writes the part of the range that it holds. The value is whole along that dim, and each rank takes from it
what belongs to its rows; ranks with nothing to write still have the value in their graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hyper_parallel.core.shard.rule_kit.rule_table import rule
from hyper_parallel.core.shard.rule_kit.signature import Labels, LocalCall, OpCall, Signature, TensorSpec, letters
from hyper_parallel.core.shard.rules.index_entries import (
    INT,
    NEW,
    RANGE,
    TENSOR,
    Item,
    broadcast_shape,
    dtype_kind,
    index_shape,
    is_list_of_numbers,
    is_odd,
    parse,
)
from hyper_parallel.platform import get_platform

_platform = get_platform()


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
    if any(spec.layout.shard_axes[dim] for dim in chosen):
        return None
    indices = [item.value for item in items if item.kind == TENSOR]
    inputs: list[Labels] = [
        letters(spec.ndim),
        *((None,) * each.ndim for each in indices if isinstance(each, TensorSpec)),
    ]
    if isinstance(value, TensorSpec):
        given = _given_at_tensors(spec, items) if any(spec.layout.shard_axes) else [(None, 1)] * value.ndim
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
            given.extend((None, size) for size in broadcast_shape([index_shape(items[at].value) for at in places]))
        if item.kind == RANGE:
            given.append((names[item.dim] if item.is_all_of(spec.shape[item.dim]) else None, item.length))
    return given


def _write_at_tensors(call: LocalCall) -> Any:
    _, index, value = call.args
    if isinstance(index, list) and not is_list_of_numbers(index):
        index = tuple(index)
    call.func(call.written, index, value)


def _write(call: LocalCall, items: Sequence[Item]) -> Any:
    value = call.args[2]
    has_dims = _platform.is_tensor(value) and value.ndim > 0
    # x[0] += 1 writes x[0] to itself, which the framework allows where both have the same strides too.
    to_itself = has_dims and _platform.shares_memory(call.written, value)
    shape = call.input_shapes[0]
    offsets, lengths = call.inputs[0].deciding_region(shape)
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
            if here and to_itself:
                entries.append(start)
                continue
            entries.append(slice(start, start + here))
            single.append(len(taken))
            taken.append(None)
        else:
            entry, part = _part_of_range(item.bounds, offsets[item.dim], lengths[item.dim])
            entries.append(entry)
            taken.append(None if item.is_all_of(shape[item.dim]) else part)
    if has_dims:
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
        at, part = dim - kept[0], taken[dim]
        if dim in single:
            value = value.unsqueeze(at)
        elif part is not None and value.shape[at] != 1:
            value = value.narrow(at, *part)
    return value


@rule("index_put", "_index_put_impl", by_dtype=True)
def index_put(call: OpCall) -> Signature | None:
    bound = call.bind("input", "indices", "values", "accumulate")
    spec, values = call.tensors[0], bound["values"]
    indices = bound["indices"]
    if not isinstance(values, TensorSpec) or any(entry is None or is_odd(entry) for entry in indices):
        return None
    num_indexed = len(indices)
    if call.name.endswith("_") and any(spec.layout.shard_axes[:num_indexed]):
        return None
    names = letters(spec.ndim)
    rest = names[num_indexed:]
    added = broadcast_shape([entry.shape for entry in indices])
    given = [*((None, size) for size in added), *zip(rest, spec.shape[num_indexed:], strict=True)]
    labels = ((None,) * num_indexed + rest, *((None,) * entry.ndim for entry in indices), _value_labels(values, given))
    return Signature(labels, (labels[0],), linear=(frozenset({0, len(labels) - 1}),), local=_put)


def _put(call: LocalCall) -> Any:
    if call.written is None:
        return call.func(*call.args, **call.kwargs)
    return call.func(call.written, *call.args[1:], **call.kwargs)
