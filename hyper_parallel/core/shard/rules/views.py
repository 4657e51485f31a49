"""Other sizes for the same elements: view, reshape, flatten, squeeze and their like, also in place.

Note [Which dims stay cut in a view]
Elements lie in row-major order, so a view pairs groups of dims of equal size: (6, 35) and (2, 3, 5, 7) are the groups
6 - 2, 3 and 35 - 5, 7. Dims that are alone in their group stay cut as they are. In a larger group only the leading dims
may be cut, into a number of parts that divides both: then each rank's rows of one are its rows of the other. The shard
of an inner dim, as the sequence of ``logits.view(-1, vocabulary)``, moves to the leading dim first, by one all-to-all,
where that can be cut so. All else is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.later_reduction import reduced_later
from hyper_parallel.core.dtensor.layout import Layout, Shape
from hyper_parallel.core.shard.dispatching.gather_fallback import run_gathered
from hyper_parallel.core.shard.dispatching.special_ops import SPECIAL_OPS
from hyper_parallel.core.shard.rule_kit.empty_blocks import has_empty_block
from hyper_parallel.core.shard.rule_kit.rule_table import rule
from hyper_parallel.core.shard.rule_kit.signature import Labels, LocalCall, OpCall, Signature, letters
from hyper_parallel.platform import get_platform

_platform = get_platform()
ALONE = (frozenset({0}),)


def view_labels(before: Shape, after: Shape, start: int = 0) -> tuple[Labels, Labels, dict[str, int]]:
    """Labels of a tensor before and after a view, and the divisors of its letters.

    >>> view_labels((4, 6), (4, 2, 3))
    (('a', 'b'), ('a', 'b', None), {'b': 2})
    >>> view_labels((4, 1, 6), (24,))
    (('a', None, None), ('a',), {'a': 4})
    """
    old: list[str | None] = [None] * len(before)
    new: list[str | None] = [None] * len(after)
    divisors: dict[str, int] = {}
    is_empty = 0 in before
    i = j = 0
    count = start
    while i < len(before) and j < len(after):
        (letter,) = letters(1, count)
        if before[i] == after[j]:
            old[i] = new[j] = letter
            i, j, count = i + 1, j + 1, count + 1
        elif before[i] == 1:
            i += 1
        elif after[j] == 1:
            j += 1
        elif is_empty:
            break
        else:
            old[i] = new[j] = letter
            divisors[letter] = math.gcd(before[i], after[j])
            size_before, size_after = before[i], after[j]
            i, j, count = i + 1, j + 1, count + 1
            while size_before != size_after:
                if size_before < size_after:
                    size_before, i = size_before * before[i], i + 1
                else:
                    size_after, j = size_after * after[j], j + 1
    return tuple(old), tuple(new), divisors


def _to_local_sizes(call: LocalCall) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    return None, (call.local_output_shape(),), {}


def _reshape(call: LocalCall) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    return _platform.Tensor.reshape, (call.local_output_shape(),), {}


def _reshaped_copy(call: LocalCall) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    shape = call.local_output_shape()
    return lambda block: _platform.Tensor.reshape(block, shape).clone(), (), {}


def _resized(call: OpCall, rewrite: Callable[[LocalCall], Any]) -> Signature:
    before, after, divisors = view_labels(call.tensors[0].shape, call.outputs[0])
    offers = _moved_shards(call.tensors[0].layout, before, divisors)
    return Signature((before,), (after,), linear=ALONE, divisors=divisors, rewrite=rewrite, offers=offers)


def _moved_shards(layout: Layout, labels: Labels, divisors: dict[str, int]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """For leading dims of groups: the axes that cut them and inner dims of their groups, where the sizes allow it."""
    offers = {}
    for dim, letter in enumerate(labels):
        if letter not in divisors:
            continue
        inner = dim + 1
        while inner < len(labels) and labels[inner] is None:
            inner += 1
        axes = tuple(axis for sharding in layout.shard_axes[dim:inner] for axis in sharding)
        moved = [axes[:length] for length in range(1, len(axes) + 1)]
        parts = [math.prod(layout.mesh.shape[axis] for axis in option) for option in moved]
        offers[letter] = tuple(option for option, num in zip(moved, parts, strict=True) if divisors[letter] % num == 0)
    return offers


@rule("view", "view_copy", by_dtype=True)
def view(call: OpCall) -> Signature:
    sizes = call.args[1:] if len(call.args) > 1 else tuple(call.kwargs.values())
    if len(sizes) == 1 and not isinstance(sizes[0], (int, list, tuple)):
        return _seen_as_dtype(call)
    return _resized(call, _to_local_sizes)


def _seen_as_dtype(call: OpCall) -> Signature:
    """The same bytes as another dtype: the last dim may get another size."""
    (before,), after = [spec.shape for spec in call.tensors], call.outputs[0]
    labels: Labels = letters(len(before))
    if before != after:
        labels = (*labels[:-1], None)
    return Signature((labels,), (labels,))


@rule("reshape", "_unsafe_view")
def reshape(call: OpCall) -> Signature | None:
    return _resized(call, _to_local_sizes)


@rule("flatten", "ravel", "unflatten", "squeeze", "unsqueeze")
def resized(call: OpCall) -> Signature:
    return _resized(call, _reshape)


@rule("squeeze_copy", "unsqueeze_copy")
def resized_copy(call: OpCall) -> Signature:
    return _resized(call, _reshaped_copy)


@rule("view_as_real", "view_as_complex")
def pairs_of_reals(call: OpCall) -> Signature:
    """A complex tensor has one dim less than its real view, the last."""
    shared = letters(min(call.tensors[0].ndim, len(call.outputs[0])))
    before = shared + (None,) * (call.tensors[0].ndim - len(shared))
    after = shared + (None,) * (len(call.outputs[0]) - len(shared))
    if call.name == "view_as_complex":
        return Signature((before,), (after,), linear=ALONE)
    return Signature((before,), (after,), linear=ALONE, local=_empty_pairs, needs_local=has_empty_block)


def _empty_pairs(call: LocalCall) -> Any:
    """The framework's gradient of ``view_as_real`` refuses a block without elements."""
    (block,) = (*call.args, *call.kwargs.values())
    return _platform.cat([block.real.unsqueeze(-1), block.imag.unsqueeze(-1)], -1)


@rule("atleast_1d", "atleast_2d", "atleast_3d")
def at_least(call: OpCall) -> Signature:
    inputs: list[Labels] = []
    outputs: list[Labels] = []
    for spec, after in zip(call.tensors, call.outputs, strict=True):
        labels, new_labels, _ = view_labels(spec.shape, after, 8 * len(inputs))
        inputs.append(labels)
        outputs.append(new_labels)
    if len(inputs) == 1:
        return Signature(tuple(inputs), tuple(outputs), linear=ALONE, rewrite=_reshape)
    # Letters of one tensor are not those of another's outputs, so none of them may be cut.
    inputs = [(None,) * len(labels) for labels in inputs]
    return Signature(tuple(inputs), tuple((None,) * len(shape) for shape in call.outputs))


# ---------------------------------------------------------------------------------------------------------------------
# As another tensor, whose values do not matter
# ---------------------------------------------------------------------------------------------------------------------


def _like_other(method: str) -> Callable[..., Any]:
    def run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tensor, other = (*args, *kwargs.values())
        return getattr(tensor, method)(tuple(other.shape))

    return run


SPECIAL_OPS.update(
    {name: _like_other(name.removesuffix("_as")) for name in ("view_as", "reshape_as", "expand_as")},
)


# ---------------------------------------------------------------------------------------------------------------------
# Changing the tensor itself
# ---------------------------------------------------------------------------------------------------------------------


def _become(tensor: DTensor, order: list[int | None]) -> DTensor:
    """Tell ``tensor``, whose block has changed, its new dims: the old dim for each, None for a new one."""
    shape = tuple(tensor.shape)
    axes = [() if dim is None else tensor.layout.shard_axes[dim] for dim in order]
    layout = reduced_later(Layout.of(tensor.device_mesh, axes, tensor.layout.partials), tensor.layout.reduced_later)
    for remembered in ("_edges", "_gathered_from"):
        tensor.__dict__.pop(remembered, None)
    return _platform.as_dtensor(type(tensor), tensor, layout, tuple(1 if dim is None else shape[dim] for dim in order))


def _dim(name: str, dim: int, ndim: int) -> int:
    if not -ndim <= dim < ndim:
        raise IndexError(f"{name}: dim {dim} is out of range for {ndim} dims, from {-ndim} to {ndim - 1}")
    return dim % ndim


def _transpose_(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *dims = (*args, *kwargs.values())
    ndim = tensor.ndim
    if _platform.get_op_name(func) == "t_":
        dims = [0, 1] if ndim == 2 else [0, 0]
    order: list[int | None] = list(range(ndim))
    if ndim:
        first, second = (_dim("transpose_", dim, ndim) for dim in dims)
        order[first], order[second] = second, first
    _platform.without_interception(func, *args, **kwargs)
    return _become(tensor, order)


def _unsqueeze_(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, dim = (*args, *kwargs.values())
    order: list[int | None] = list(range(tensor.ndim))
    order.insert(_dim("unsqueeze_", dim, tensor.ndim + 1), None)
    _platform.without_interception(func, tensor, dim)
    return _become(tensor, order)


def _squeeze_(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, *given = (*args, *kwargs.values())
    shape = tuple(tensor.shape)
    asked = range(len(shape)) if not given else given[0] if isinstance(given[0], (tuple, list)) else given
    dropped = sorted({_dim("squeeze_", dim, len(shape)) for dim in asked if len(shape)})
    dropped = [dim for dim in dropped if shape[dim] == 1]
    for dim in dropped:
        if tensor.layout.shard_axes[dim]:
            raise RuntimeError(
                f"squeeze_: dim {dim} of a tensor of global shape {shape} under {tensor.layout} is sharded, so some "
                "ranks have nothing of it; redistribute it first, or use squeeze, which makes a new tensor"
            )
    for dim in reversed(dropped):
        _platform.without_interception(_platform.Tensor.squeeze_, tensor, dim)
    return _become(tensor, [dim for dim in range(len(shape)) if dim not in dropped])


def _new_sizes(rest: tuple[Any, ...]) -> tuple[Any, ...]:
    """The sizes that ``resize_`` or ``resize_as_`` is asked for."""
    if rest and _platform.is_tensor(rest[0]):
        return tuple(rest[0].shape)
    return tuple(rest[0]) if rest and isinstance(rest[0], (list, tuple)) else rest


def _cannot_be_changed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    name = _platform.get_op_name(func)
    tensor = args[0] if args and isinstance(args[0], DTensor) else kwargs.get("self")
    if name in ("resize_", "resize_as_") and tensor is not None and _new_sizes(args[1:]) == tuple(tensor.shape):
        return tensor
    where = "" if tensor is None else f" of global shape {tuple(tensor.shape)} under {tensor.layout}"
    raise RuntimeError(
        f"{name} would change the memory of a distributed tensor{where} behind its layout; make a new tensor with "
        f"new_empty, reshape or as_strided instead"
    )


def _of_memory(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``as_strided`` counts in memory. That of the whole is known only where the elements lie in order on every rank;
    of a tensor that is not cut also where they lie in another order, without gaps.
    """
    tensor = args[0] if args else kwargs.get("input")
    if isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is not None:
        mesh, block = tensor.device_mesh, _platform.local_alias(tensor)
        in_order = block.is_contiguous()
        if tensor.layout.is_replicated and not in_order:
            in_order = tuple(block.clone().stride()) == tuple(block.stride())
        unknown = _platform.index_tensor([[int(not in_order)]], mesh.device_type)
        axes = tuple(axis for axis, size in enumerate(mesh.shape) if size > 1)
        if axes:
            _platform.all_reduce(unknown, mesh.get_group(axes), op="max")
        if unknown.item():
            name = _platform.get_op_name(func)
            raise RuntimeError(
                f"{name} of a distributed tensor of global shape {tuple(tensor.shape)} under {tensor.layout}: its "
                "elements are not in order, so there is no one memory to count in; call contiguous() first"
            )
    return run_gathered(func, args, kwargs)


SPECIAL_OPS.update(
    {
        **dict.fromkeys(("as_strided", "as_strided_copy", "as_strided_scatter"), _of_memory),
        "t_": _transpose_,
        "transpose_": _transpose_,
        "unsqueeze_": _unsqueeze_,
        "squeeze_": _squeeze_,
        **dict.fromkeys(("resize_", "resize_as_", "set_", "as_strided_", "swap_"), _cannot_be_changed),
    }
)
