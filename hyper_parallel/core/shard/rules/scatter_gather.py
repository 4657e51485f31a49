"""Reading and writing along one dim by index tensors: gather, scatter, index_select, index_add, take, embedding.

Note [Rows that other ranks hold]
Along a cut dim a rank reads the rows it has and gives zeros for others, as a pending sum: an embedding over a cut
vocabulary costs one reduction of its result and never moves the table. A rank writes only into the rows it has; what is
meant for others goes into a spare row that is thrown away.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.shard.rule_kit.empty_blocks import with_spare_row
from hyper_parallel.core.shard.rule_kit.rule_table import rule
from hyper_parallel.core.shard.rule_kit.signature import (
    Labels,
    LocalCall,
    OpCall,
    Signature,
    TensorSpec,
    letters,
    without,
)
from hyper_parallel.core.shard.rules.index_entries import can_be_partial, rows_here
from hyper_parallel.core.shard.rules.positions import with_checked_positions
from hyper_parallel.core.shard.rules.views import ALONE
from hyper_parallel.platform import get_platform

_platform = get_platform()
_FIRST_AND_LAST = (frozenset({0, 2}),)


def _bound(call: OpCall | LocalCall, *names: str) -> dict[str, Any]:
    found = dict(zip(names, call.args, strict=False))
    found.update(call.kwargs)
    return found


def _all_replicated(call: OpCall) -> Signature:
    """A tensor without dims takes part, which has nothing to cut."""
    inputs = tuple((None,) * spec.ndim for spec in call.tensors)
    return Signature(inputs, tuple((None,) * len(shape) for shape in call.outputs))


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------


def _reads_rows(spec: TensorSpec, dim: int) -> dict[str, str]:
    """The letter of a dim that is read by an index, pending where it is cut; nothing where it must be whole."""
    (letter,) = letters(1, dim)
    assert letter is not None
    return {letter: "sum"} if spec.layout.shard_axes[dim] and can_be_partial(spec) else {}


def _read_rows(call: LocalCall, dim: int, block: Any, index: Any, read: Callable[[Any, Any], tuple[Any, Any]]) -> Any:
    """Zeros for rows that other ranks have. ``read(block, index)`` gives rows, and where the index's dims are."""
    if not call.inputs[0].shard_axes[dim]:
        return read(block, index)[0]
    offset = call.inputs[0].local_offset(call.input_shapes[0])[dim]
    here, elsewhere = rows_here(block, dim, index, call.input_shapes[0][dim], offset)
    rows, shape = read(with_spare_row(block, dim) if block.shape[dim] == 0 else block, here)
    return rows.masked_fill(elsewhere.reshape(shape), 0)


@rule("index_select", by_dtype=True)
def index_select(call: OpCall) -> Signature | None:
    bound = _bound(call, "input", "dim", "index")
    spec, index = bound["input"], bound["index"]
    if not isinstance(spec, TensorSpec) or not isinstance(index, TensorSpec) or call.tensors[0] is not spec:
        return None
    if spec.ndim == 0:
        return _all_replicated(call)
    dim = bound["dim"] % spec.ndim
    names = letters(spec.ndim)
    reduces = _reads_rows(spec, dim)
    source = names if reduces else without(names, [dim])
    positions: Labels = ("i",) * index.ndim
    output = (*names[:dim], "i" if index.ndim else None, *names[dim + 1 :])

    def local(here: LocalCall) -> Any:
        given = _bound(here, "input", "dim", "index")

        def read(block: Any, rows: Any) -> tuple[Any, Any]:
            return here.func(block, dim, rows), (-1, *(1,) * (len(names) - dim - 1))

        return _read_rows(here, dim, given["input"], given["index"], read)

    found = Signature((source, positions), (output,), reduces, linear=ALONE, local=local if reduces else None)
    return with_checked_positions(found, call.name, 1, dim, spec.shape[dim])


@rule("gather", by_dtype=True)
def gather(call: OpCall) -> Signature | None:
    bound = _bound(call, "input", "dim", "index")
    spec, index = bound["input"], bound["index"]
    if not isinstance(spec, TensorSpec) or not isinstance(index, TensorSpec) or bound.get("sparse_grad"):
        return None
    if call.tensors[0] is not spec or (index.ndim != spec.ndim and spec.ndim and index.ndim):
        return None
    if spec.ndim == 0 or index.ndim == 0:
        return _all_replicated(call)
    dim = bound["dim"] % spec.ndim
    return _gather(call, spec, index, dim, ("input", "dim", "index"))


@rule("take_along_dim", by_dtype=True)
def take_along_dim(call: OpCall) -> Signature | None:
    bound = _bound(call, "input", "indices", "dim")
    spec, index, dim = call.tensors[0], bound["indices"], bound.get("dim")
    if dim is None or not isinstance(index, TensorSpec) or bound["input"] is not spec or spec.ndim != index.ndim:
        return None
    return _gather(call, spec, index, dim % spec.ndim, ("input", "indices", "dim"))


def _gather(call: OpCall, spec: TensorSpec, index: TensorSpec, dim: int, names: tuple[str, ...]) -> Signature:
    labels = letters(spec.ndim)
    output = call.outputs[0]
    reduces = _reads_rows(spec, dim)
    source = [label if spec.shape[d] == output[d] else None for d, label in enumerate(labels)]
    source[dim] = labels[dim] if reduces else None
    # A dim of which the index uses the first elements only, or one that is stretched, stays whole in both.
    both = [spec.shape[d] == output[d] == index.shape[d] or d == dim for d in range(spec.ndim)]
    stretches = call.name == "take_along_dim"
    positions = [
        label if (index.shape[d] == output[d] and (both[d] or stretches)) else None for d, label in enumerate(labels)
    ]
    positions[dim] = "i"
    if not stretches:
        source = [label if both[d] else None for d, label in enumerate(source)]
    result = [p or s for p, s in zip(positions, source, strict=True)]
    result[dim] = "i"

    def local(here: LocalCall) -> Any:
        given = _bound(here, *names)

        def read(block: Any, index: Any) -> tuple[Any, Any]:
            rows = here.func(block, index, dim) if stretches else here.func(block, dim, index)
            return rows, index.shape

        asked = given[names[names.index("dim") % 2 + 1]]
        if stretches and spec.shape[dim]:
            asked = asked % spec.shape[dim]  # the framework counts on from the start
        return _read_rows(here, dim, given["input"], asked, read)

    found = Signature(
        (tuple(source), tuple(positions)), (tuple(result),), reduces, linear=ALONE, local=local if reduces else None
    )
    if stretches:
        return found
    return with_checked_positions(found, call.name, 1, dim, spec.shape[dim], kind=RuntimeError)


@rule("take")
def take(call: OpCall) -> Signature | None:
    """By position among all elements."""
    if len(call.tensors) != 2:
        return None
    index = letters(call.tensors[1].ndim)
    shape = call.tensors[0].shape
    found = Signature(((None,) * len(shape), index), (index,), linear=ALONE)
    return with_checked_positions(found, "take", 1, 0, math.prod(shape), wraps=True)


@rule("embedding", by_dtype=True)
def embedding(call: OpCall) -> Signature | None:
    """Functions of the framework differ in which comes first, the positions or the table.

    The gradient of the table is dense, also when a sparse one is asked for.
    """
    first, second = call.tensors[:2]
    table_first = _platform.dtype_name(first.dtype).startswith(("float", "bfloat", "complex"))
    if not table_first and not _platform.dtype_name(second.dtype).startswith(("float", "bfloat", "complex")):
        shape = call.outputs[0]  # a table of integers: the shapes tell which it is, if they differ
        table_first = shape == (*second.shape, *first.shape[-1:])
        if table_first and shape == (*first.shape, *second.shape[-1:]):
            return None
    names = _EMBEDDING if not table_first else _EMBEDDING_OPERATOR
    bound = _bound(call, *names)
    if bound.get("max_norm") is not None or bound.get("scale_grad_by_freq"):
        return None
    table, index = (first, second) if table_first else (second, first)
    positions = tuple(f"i{label}" for label in letters(index.ndim))
    reduces = {"v": "sum"} if can_be_partial(table) else {}
    rows: Labels = ("v" if reduces else None, "h")
    inputs = (rows, positions) if table_first else (positions, rows)
    place = 0 if table_first else 1

    def local(here: LocalCall) -> Any:
        return _embed(here, names, place)

    linear = (frozenset({place}),)
    needed = local if table.layout.shard_axes[0] or bound.get("sparse") else None
    found = Signature(inputs, ((*positions, "h"),), reduces, linear=linear, local=needed)
    return with_checked_positions(found, call.name, 1 - place, 0, table.shape[0], source=place)


_EMBEDDING = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
_EMBEDDING_OPERATOR = ("weight", "indices", "padding_idx", "scale_grad_by_freq", "sparse")


def _embed(call: LocalCall, names: tuple[str, ...], place: int) -> Any:
    bound = _bound(call, *names)
    table, index = bound["weight"], bound["input" if "input" in bound else "indices"]
    layout, shape = call.inputs[place], call.input_shapes[place]
    offset = layout.local_offset(shape)[0]
    here, elsewhere = rows_here(table, 0, index, shape[0], offset)
    table = with_spare_row(table, 0) if table.shape[0] == 0 else table
    rows = table.index_select(0, here.reshape(-1)).reshape(*here.shape, table.shape[1])
    padding = bound.get("padding_idx")
    if padding is not None:  # the values of that row, without a gradient
        padding = padding + shape[0] if padding < 0 and names is _EMBEDDING else padding
        is_padding = (index == padding).unsqueeze(-1)
        fixed = table.detach().index_select(0, here.reshape(-1)).reshape(rows.shape).masked_fill(~is_padding, 0)
        rows = rows.masked_fill(is_padding, 0) + fixed
    return rows.masked_fill(elsewhere.unsqueeze(-1), 0)


@rule("one_hot")
def one_hot(call: OpCall) -> Signature:
    labels = letters(call.tensors[0].ndim)
    found = Signature((labels,), ((*labels, None),))
    if not labels:
        return found
    return with_checked_positions(found, "one_hot: classes", 0, len(labels), call.outputs[0][-1], kind=RuntimeError)


# ---------------------------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------------------------

_SCATTER = ("input", "dim", "index", "src")
_INDEX = ("input", "dim", "index", "source")
_JOINTLY_LINEAR = frozenset({"scatter", "scatter_add", "index_add", "index_copy"})


@rule("scatter", "scatter_add", "scatter_reduce", by_dtype=True)
def scatter(call: OpCall) -> Signature | None:
    bound = _bound(call, *_SCATTER)
    spec, index = bound["input"], bound["index"]
    if not isinstance(spec, TensorSpec) or not isinstance(index, TensorSpec):
        return None
    if spec.ndim == 0 or index.ndim == 0:
        return None if call.name.endswith("_") and spec.ndim else _all_replicated(call)
    source = bound.get("src", bound.get("value"))
    others = [other for other in (index, source) if isinstance(other, TensorSpec) and other.ndim]
    dim = bound["dim"] % spec.ndim
    names = letters(spec.ndim)
    together = [all(other.shape[d] == spec.shape[d] for other in others) for d in range(spec.ndim)]
    if call.name.endswith("_") and any(
        spec.layout.shard_axes[d] for d in range(spec.ndim) if d != dim and not together[d]
    ):
        return None
    own = tuple(name if together[d] or d == dim else None for d, name in enumerate(names))
    rest = without(own, [dim])
    inputs: list[Labels] = [own, rest]
    if isinstance(source, TensorSpec):
        inputs.append(rest if source.ndim else ())
    is_linear = call.name.rstrip("_") in _JOINTLY_LINEAR and len(inputs) == 3 and bound.get("reduce") is None
    return _writing(call, inputs, dim, _SCATTER, is_linear)


@rule("index_add", "index_copy", "index_reduce", "index_fill", by_dtype=True)
def index_write(call: OpCall) -> Signature | None:
    bound = _bound(call, *_INDEX)
    spec, index = bound["input"], bound["index"]
    if not isinstance(spec, TensorSpec) or not isinstance(index, TensorSpec):
        return None
    if spec.ndim == 0:
        return _all_replicated(call)
    if call.name.startswith("index_reduce") and _platform.dtype_name(spec.dtype) in ("float16", "bfloat16"):
        return None  # PyTorch's kernel fails on a block of one row
    source = bound.get("source", bound.get("value"))
    dim = bound["dim"] % spec.ndim
    names = letters(spec.ndim)
    rest = without(names, [dim])
    inputs: list[Labels] = [names, (None,) * index.ndim]
    if isinstance(source, TensorSpec):
        inputs.append(rest if source.ndim == spec.ndim else (None,) * source.ndim)
    is_linear = call.name.rstrip("_") in _JOINTLY_LINEAR and len(inputs) == 3
    return _writing(call, inputs, dim, _INDEX, is_linear)


def _writing(call: OpCall, inputs: list[Labels], dim: int, names: tuple[str, ...], is_linear: bool) -> Signature | None:
    if len(inputs) != len(call.tensors) or any(
        len(labels) != spec.ndim for labels, spec in zip(inputs, call.tensors, strict=True)
    ):
        return None

    def local(here: LocalCall) -> Any:
        return _write_rows(here, dim, names)

    needed = local if call.tensors[0].layout.shard_axes[dim] else None
    linear = _FIRST_AND_LAST if is_linear else ()
    found = Signature(tuple(inputs), (inputs[0],), linear=linear, local=needed)
    name = call.name.rstrip("_")
    kind = RuntimeError if name.startswith("scatter") or name == "index_add" else IndexError
    size = call.tensors[0].shape[dim]
    return with_checked_positions(found, call.name, 1, dim, size, kind=kind, wraps=name == "index_fill")


def _write_rows(call: LocalCall, dim: int, names: tuple[str, ...]) -> Any:
    if not call.inputs[0].shard_axes[dim]:
        return call.plain()
    bound = _bound(call, *names)
    block, index = bound.pop("input"), bound.pop("index")
    offset = call.inputs[0].local_offset(call.input_shapes[0])[dim]
    here, elsewhere = rows_here(block, dim, index, call.input_shapes[0][dim], offset)
    length = block.shape[dim]
    here = here.masked_fill(elsewhere, length)
    positional = [bound.pop(name) for name in names[1:] if name != "index" and name in bound]
    extra = call.args[len(names) :]
    changed = call.func(with_spare_row(block, dim), positional[0], here, *positional[1:], *extra, **bound)
    changed = changed.narrow(dim, 0, length)
    if call.written is None:
        return changed
    _platform.Tensor.copy_(call.written, changed)
    return call.written
