"""Operators that rearrange, stretch, join and split dims: dims that an operator leaves as they are stay cut."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.layout import Shape
from hyper_parallel.core.shard.rule_kit.empty_blocks import with_spare_rows
from hyper_parallel.core.shard.rule_kit.rule_table import rule
from hyper_parallel.core.shard.rule_kit.signature import (
    Labels,
    LocalCall,
    OpCall,
    Signature,
    broadcast_labels,
    letters,
    without,
)
from hyper_parallel.core.shard.rules.views import ALONE, view_labels


def dim_list(given: Any, ndim: int) -> list[int]:
    """One dim or several, counted from the front."""
    dims = given if isinstance(given, (list, tuple)) else [given]
    return [dim % ndim if ndim else 0 for dim in dims]


def all_together(call: OpCall) -> tuple[frozenset[int], ...]:
    """Linear in all tensors together."""
    return (frozenset(range(len(call.tensors))),)


# ---------------------------------------------------------------------------------------------------------------------
# Orders of dims
# ---------------------------------------------------------------------------------------------------------------------


def _permuted(call: OpCall, order: list[int]) -> Signature:
    labels = letters(len(order))
    return Signature((labels,), (tuple(labels[dim] for dim in order),), linear=ALONE)


def _swapped(call: OpCall, first: int, second: int) -> Signature:
    order = list(range(call.tensors[0].ndim))
    if order:
        order[first], order[second] = order[second], order[first]
    return _permuted(call, order)


@rule("transpose", "transpose_copy")
def transpose(call: OpCall) -> Signature:
    given = call.bind("input", "dim0", "dim1")
    first, second = (given[f"dim{at}"] if f"dim{at}" in given else given[f"axis{at}"] for at in (0, 1))
    return _swapped(call, first, second)


@rule("t", "t_copy", "mT", "mH", "H", "adjoint")
def matrix_transpose(call: OpCall) -> Signature:
    return _swapped(call, -2, -1) if call.tensors[0].ndim >= 2 else _permuted(call, list(range(call.tensors[0].ndim)))


@rule("T")
def reversed_dims(call: OpCall) -> Signature:
    return _permuted(call, list(reversed(range(call.tensors[0].ndim))))


@rule("permute", "permute_copy")
def permute(call: OpCall) -> Signature:
    dims = call.kwargs["dims"] if "dims" in call.kwargs else call.args[1:]
    if len(dims) == 1 and isinstance(dims[0], (list, tuple)):
        dims = dims[0]
    return _permuted(call, dim_list(tuple(dims), call.tensors[0].ndim))


@rule("movedim")
def movedim(call: OpCall) -> Signature:
    bound = call.bind("input", "source", "destination")
    ndim = call.tensors[0].ndim
    source, destination = dim_list(bound["source"], ndim), dim_list(bound["destination"], ndim)
    placed = dict(zip(destination, source, strict=True))
    others = iter(dim for dim in range(ndim) if dim not in source)
    return _permuted(call, [placed[dim] if dim in placed else next(others) for dim in range(ndim)])


# ---------------------------------------------------------------------------------------------------------------------
# Stretching and repeating
# ---------------------------------------------------------------------------------------------------------------------


def _aligned(before: Shape, after: Shape) -> tuple[Labels, Labels]:
    """Labels where dims, counted from the end, that keep their size go together."""
    labels = broadcast_labels([before], after)[0]
    return labels, (None,) * (len(after) - len(before)) + labels


@rule("expand", "expand_copy", "broadcast_to")
def expand(call: OpCall) -> Signature:
    before, after = _aligned(call.tensors[0].shape, call.outputs[0])

    def local_sizes(local: LocalCall) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        return None, (local.local_output_shape(),), {}

    return Signature((before,), (after,), linear=ALONE, rewrite=local_sizes)


@rule("repeat", "tile")
def repeat(call: OpCall) -> Signature:
    before, after = _aligned(call.tensors[0].shape, call.outputs[0])
    return Signature((before,), (after,), linear=ALONE)


@rule("repeat_interleave")
def repeat_interleave(call: OpCall) -> Signature | None:
    bound = call.bind("input", "repeats", "dim", dim=None)
    if not isinstance(bound.get("repeats"), int) or not call.tensors[0].ndim:
        return None
    shape = call.tensors[0].shape
    labels = letters(len(shape))
    if bound["dim"] is None:
        inputs = (labels[0], *(None for _ in labels[1:]))
        return Signature((inputs,), (labels[:1],), linear=ALONE, divisors={labels[0]: shape[0]})
    (dim,) = dim_list(bound["dim"], len(shape))
    divisors: dict[Any, int] = {} if bound["repeats"] == 1 else {labels[dim]: shape[dim]}

    def local_size(local: LocalCall) -> Any:
        return local.func(local.args[0], bound["repeats"], dim=dim)

    local = local_size if bound.get("output_size") is not None else None
    return Signature((labels,), (labels,), linear=ALONE, divisors=divisors, local=local)


@rule("broadcast_tensors")
def broadcast_tensors(call: OpCall) -> Signature:
    inputs = broadcast_labels([spec.shape for spec in call.tensors], call.outputs[0])
    labels = letters(len(call.outputs[0]))
    return Signature(inputs, (labels,) * len(inputs), local=_expand_each)


def _expand_each(call: LocalCall) -> Any:
    blocks = call.args[0] if isinstance(call.args[0], (list, tuple)) else call.args
    return tuple(block.expand(call.local_output_shape(index)) for index, block in enumerate(blocks))


@rule("meshgrid")
def meshgrid(call: OpCall) -> Signature:
    labels: list[str | None] = []
    inputs: list[Labels] = []
    for spec, letter in zip(call.tensors, letters(len(call.tensors)), strict=True):
        inputs.append((letter,) * spec.ndim)
        labels.append(letter if spec.ndim else None)
    if call.kwargs.get("indexing", "ij") == "xy" and len(labels) > 1:
        labels[0], labels[1] = labels[1], labels[0]
    return Signature(tuple(inputs), (tuple(labels),) * len(inputs))


@rule("cartesian_prod")
def cartesian_prod(call: OpCall) -> Signature:
    (length,) = call.tensors[0].shape
    if len(call.tensors) == 1:
        return Signature((("a",),), (("a",),), linear=ALONE)
    inputs = (("a",), *((None,) for _ in call.tensors[1:]))
    return Signature(inputs, (("a", None),), divisors={"a": length})


# ---------------------------------------------------------------------------------------------------------------------
# Joining
# ---------------------------------------------------------------------------------------------------------------------


@rule("cat")
def cat(call: OpCall) -> Signature:
    bound = call.bind("tensors", "dim", dim=0)
    labels = letters(len(call.outputs[0]))
    (dim,) = dim_list(bound.get("axis", bound["dim"]), len(labels))
    joined = without(labels, [dim])
    # An empty vector may be joined to anything.
    inputs = [joined if spec.ndim == len(labels) else (None,) * spec.ndim for spec in call.tensors]
    whole = next((place for place, spec in enumerate(call.tensors) if spec.shape == call.outputs[0]), None)
    if whole is not None:  # the others are empty, as caches are at first, and this one may lie as it does
        inputs[whole] = joined = labels
    return Signature(tuple(inputs), (joined,), linear=all_together(call))


@rule("stack")
def stack(call: OpCall) -> Signature:
    bound = call.bind("tensors", "dim", dim=0)
    (dim,) = dim_list(bound["dim"], len(call.outputs[0]))
    labels = letters(call.tensors[0].ndim)
    output = (*labels[:dim], None, *labels[dim:])
    return Signature((labels,) * len(call.tensors), (output,), linear=all_together(call))


@rule("hstack", "vstack", "dstack", "column_stack")
def stack_along(call: OpCall) -> Signature:
    """Tensors with too few dims first get dims of size 1, which no tensor may have cut."""
    ndim = len(call.outputs[0])
    joined = {"hstack": min(1, ndim - 1), "vstack": 0, "dstack": 2, "column_stack": 1}[call.name]
    own_dims = [_own_dims(call.name, spec.ndim, ndim) for spec in call.tensors]
    whole = [dim for dim in range(ndim) if dim == joined or any(dim not in own for own in own_dims)]
    labels = without(letters(ndim), whole)
    inputs = tuple(tuple(labels[dim] for dim in own) for own in own_dims)
    return Signature(inputs, (labels,), linear=all_together(call))


def _own_dims(name: str, ndim: int, joined_ndim: int) -> list[int]:
    """Where the dims of a tensor are among those of the result."""
    if ndim == 1 and name in ("vstack", "dstack") and joined_ndim > 1:
        return [1]
    return list(range(ndim))


# ---------------------------------------------------------------------------------------------------------------------
# Splitting
# ---------------------------------------------------------------------------------------------------------------------


def _along_dim(call: OpCall, dims: list[int]) -> Signature:
    """One tensor in; ``dims`` are whole, in the input and in all outputs, which have the same dims."""
    labels = without(letters(call.tensors[0].ndim), dims)
    return Signature((labels,), (labels,) * len(call.outputs), linear=ALONE)


@rule("split", "split_with_sizes", "split_with_sizes_copy", "split_copy", "chunk", "tensor_split")
@rule("unsafe_split", "unsafe_chunk", "unsafe_split_with_sizes")
def split(call: OpCall) -> Signature | None:
    if len(call.tensors) > 1:  # where to split is in a tensor
        return None
    bound = call.bind("input", "sections", "dim", dim=0)
    return _along_dim(call, dim_list(bound["dim"], call.tensors[0].ndim))


@rule("hsplit", "vsplit", "dsplit")
def split_along(call: OpCall) -> Signature:
    dim = {"hsplit": min(1, call.tensors[0].ndim - 1), "vsplit": 0, "dsplit": 2}[call.name]
    return _along_dim(call, [dim])


@rule("unbind", "unbind_copy")
def unbind(call: OpCall) -> Signature:
    (dim,) = dim_list(call.bind("input", "dim", dim=0)["dim"], call.tensors[0].ndim)
    labels = without(letters(call.tensors[0].ndim), [dim])
    output = (*labels[:dim], *labels[dim + 1 :])
    return Signature((labels,), (output,) * len(call.outputs), linear=ALONE)


@rule("narrow", "narrow_copy")
def narrow(call: OpCall) -> Signature | None:
    bound = call.bind("input", "dim", "start", "length")
    shape = call.tensors[0].shape
    (dim,) = dim_list(bound["dim"], len(shape))
    if shape[dim] != bound["length"]:
        return _along_dim(call, [dim])

    def whole(local: LocalCall) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        return None, (dim, 0, local.local_output_shape()[dim]), {}

    labels = letters(len(shape))
    return Signature((labels,), (labels,), linear=ALONE, rewrite=whole)


@rule("slice")
def slice_dim(call: OpCall) -> Signature:
    (dim,) = dim_list(call.bind("input", "dim", dim=0)["dim"], call.tensors[0].ndim)
    return _along_dim(call, [dim])


@rule("unfold", "unfold_copy")
def unfold(call: OpCall) -> Signature | None:
    """Sliding windows along a dim. The operator of the same name that makes columns of images has no dim more."""
    spec = call.tensors[0]
    if len(call.outputs[0]) != spec.ndim + 1 or not spec.ndim:
        return None
    (dim,) = dim_list(call.bind("input", "dimension", "size", "step")["dimension"], spec.ndim)
    labels = without(letters(spec.ndim), [dim])
    return Signature((labels,), ((*labels, None),), linear=ALONE)


# ---------------------------------------------------------------------------------------------------------------------
# Moving elements along dims
# ---------------------------------------------------------------------------------------------------------------------


@rule("roll")
def roll(call: OpCall) -> Signature:
    dims = call.bind("input", "shifts", "dims", dims=())["dims"]
    ndim = call.tensors[0].ndim
    given = dims if isinstance(dims, (list, tuple)) else [dims]
    return _along_dim(call, dim_list(given, ndim) if len(given) else list(range(ndim)))


@rule("flip")
def flip(call: OpCall) -> Signature:
    dims = call.kwargs["dims"] if "dims" in call.kwargs else call.args[1:]
    if isinstance(dims, (list, tuple)) and len(dims) == 1 and isinstance(dims[0], (list, tuple)):
        dims = dims[0]
    return _along_dim(call, dim_list(dims, call.tensors[0].ndim))


@rule("fliplr", "flipud")
def flip_matrix(call: OpCall) -> Signature:
    return _along_dim(call, [1 if call.name == "fliplr" else 0])


@rule("rot90")
def rot90(call: OpCall) -> Signature:
    dims = call.bind("input", "k", "dims", dims=(0, 1))["dims"]
    return _along_dim(call, dim_list(dims, call.tensors[0].ndim))


@rule("pad", "constant_pad_nd")
def pad(call: OpCall) -> Signature:
    bound = call.bind("input", "pad", "mode", "value", mode="constant", value=None)
    widths = bound["pad"]
    ndim = call.tensors[0].ndim
    padded = [ndim - 1 - index // 2 for index, width in enumerate(widths) if width]
    value = bound["value"]  # a floating-point number is not looked at: the plan serves all of them
    adds_zeros = value is None or (type(value) is int and value == 0)
    is_linear = bound["mode"] in ("reflect", "replicate", "circular") or (bound["mode"] == "constant" and adds_zeros)
    labels = without(letters(ndim), padded)
    local = with_spare_rows if bound["mode"] != "constant" else None  # most modes refuse a block without elements
    return Signature((labels,), (labels,), linear=ALONE if is_linear else (), local=local)


# ---------------------------------------------------------------------------------------------------------------------
# Diagonals and triangles
# ---------------------------------------------------------------------------------------------------------------------


@rule("tril", "triu")
def triangle(call: OpCall) -> Signature:
    """A block's diagonal is as far from the given one as its first row is from its first column."""
    labels = letters(call.tensors[0].ndim)
    diagonal = call.bind("input", "diagonal", diagonal=0)["diagonal"]

    def shifted(local: LocalCall) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
        row, column = local.inputs[0].local_offset(local.input_shapes[0])[-2:]
        return None, (diagonal + row - column,), {}

    return Signature((labels,), (labels,), linear=ALONE, rewrite=shifted)


@rule("diagonal", "diagonal_copy", "linalg_diagonal", "diagonal_scatter")
def diagonal(call: OpCall) -> Signature:
    names = ("input", "src") if call.name == "diagonal_scatter" else ("input",)
    bound = call.bind(*names, "offset", "dim1", "dim2")
    first, second = (-2, -1) if call.name == "linalg_diagonal" else (0, 1)
    labels = letters(call.tensors[0].ndim)
    dims = dim_list([bound.get("dim1", first), bound.get("dim2", second)], len(labels))
    whole = without(labels, dims)
    rest = (*(label for dim, label in enumerate(labels) if dim not in dims), None)
    if call.name == "diagonal_scatter":
        return Signature((whole, rest), (whole,), linear=all_together(call))
    return Signature((whole,), (rest,), linear=ALONE)


@rule("diag_embed")
def diag_embed(call: OpCall) -> Signature:
    bound = call.bind("input", "offset", "dim1", "dim2", dim1=-2, dim2=-1)
    labels = letters(call.tensors[0].ndim - 1)
    dims = dim_list([bound["dim1"], bound["dim2"]], len(call.outputs[0]))
    others = iter(labels)
    output = tuple(None if dim in dims else next(others) for dim in range(len(call.outputs[0])))
    return Signature(((*labels, None),), (output,), linear=ALONE)


@rule("diag", "diagflat")
def diag(call: OpCall) -> Signature:
    return Signature(((None,) * call.tensors[0].ndim,), ((None,) * len(call.outputs[0]),), linear=ALONE)


@rule("select_scatter", "slice_scatter")
def scatter_part(call: OpCall) -> Signature:
    (dim,) = dim_list(call.bind("input", "src", "dim", dim=0)["dim"], call.tensors[0].ndim)
    labels = without(letters(call.tensors[0].ndim), [dim])
    src = labels if call.name == "slice_scatter" else (*labels[:dim], *labels[dim + 1 :])
    return Signature((labels, src), (labels,), linear=all_together(call))


__all__ = ["all_together", "dim_list", "view_labels"]
