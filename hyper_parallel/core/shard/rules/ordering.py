"""Operators that look along a dim in order: sorting, ranking, running sums, searching. Other dims stay cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.comm_recorder import attributed
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.dispatching.gather_fallback import run_gathered
from hyper_parallel.core.shard.dispatching.special_ops import SPECIAL_OPS
from hyper_parallel.core.shard.rule_kit.agreed_errors import agreed_maximum
from hyper_parallel.core.shard.rule_kit.empty_blocks import lacks_rows, with_spare_rows
from hyper_parallel.core.shard.rule_kit.rule_table import rule
from hyper_parallel.core.shard.rule_kit.signature import Labels, OpCall, Signature, letters, without
from hyper_parallel.core.shard.rules.shape import all_together, dim_list
from hyper_parallel.core.shard.rules.views import ALONE
from hyper_parallel.platform import get_platform

_platform = get_platform()

# The position of the dim among the arguments, behind the tensor, and its default.
_DIMS = {
    "sort": (("dim",), -1),
    "argsort": (("dim",), -1),
    "topk": (("k", "dim"), -1),
    "kthvalue": (("k", "dim"), -1),
    "cummax": (("dim",), None),
    "cummin": (("dim",), None),
    "cumprod": (("dim",), None),
    "logcumsumexp": (("dim",), None),
    "cumsum": (("dim",), None),
}


def _unsharded_dim(call: OpCall) -> Labels:
    names, default = _DIMS[call.name.rstrip("_")]
    bound = call.bind("input", *names, dim=default)
    ndim = call.tensors[0].ndim
    dim = bound.get("axis", bound["dim"])
    # sort and argsort also begin with `stable`, given by keyword or in place of the dim.
    if isinstance(dim, bool) or dim is None:
        dim = -1
    return without(letters(ndim), dim_list(dim, ndim))


@rule("sort", "argsort", "topk")
def along_dim(call: OpCall) -> Signature | None:
    if call.args[1:] and isinstance(call.args[1], bool):
        return None
    labels = _unsharded_dim(call)
    return Signature((labels,), (labels,) * len(call.outputs))


@rule("cummax", "cummin", "cumprod", "logcumsumexp")
def running(call: OpCall) -> Signature:
    """The framework's gradients of nothing, and of one product alone, belong to another graph than those of others."""
    labels = _unsharded_dim(call)
    is_alone = call.name.startswith("cumprod") and None in labels and call.outputs[0][labels.index(None)] == 1
    even = frozenset(filter(None, labels)) if is_alone else frozenset()
    return Signature(
        (labels,),
        (labels,) * len(call.outputs),
        even=even,
        local=with_spare_rows,
        needs_local=lambda planned: planned.mesh.get_coordinate() is not None and lacks_rows(planned),
    )


@rule("cumsum")
def cumsum(call: OpCall) -> Signature:
    labels = _unsharded_dim(call)
    return Signature((labels,), (labels,), linear=ALONE)


@rule("kthvalue")
def kthvalue(call: OpCall) -> Signature:
    labels = _unsharded_dim(call)
    output = labels
    if len(call.outputs[0]) < len(labels):
        (dim,) = dim_list(call.bind("input", "k", "dim", dim=-1)["dim"], len(labels))
        output = (*labels[:dim], *labels[dim + 1 :])
    return Signature((labels,), (output,) * len(call.outputs))


@rule("msort")
def msort(call: OpCall) -> Signature:
    labels = without(letters(call.tensors[0].ndim), [0])
    return Signature((labels,), (labels,))


@rule("diff")
def diff(call: OpCall) -> Signature:
    bound = call.bind("input", "n", "dim", dim=-1)
    ndim = call.tensors[0].ndim
    labels = without(letters(ndim), dim_list(bound["dim"], ndim))
    return Signature((labels,) * len(call.tensors), (labels,), linear=all_together(call))


@rule("bucketize")
def bucketize(call: OpCall) -> Signature | None:
    if len(call.tensors) == 1:  # a number is looked for
        return Signature(((None,) * call.tensors[0].ndim,), ((None,) * len(call.outputs[0]),))
    if call.tensors[1].ndim != 1:
        return None
    values = letters(call.tensors[0].ndim)
    return Signature((values, (None,)), (values,))


@rule("searchsorted")
def searchsorted(call: OpCall) -> Signature | None:
    sequence = call.tensors[0]
    if call.kwargs.get("sorter") is not None:
        return None
    if len(call.tensors) == 1:
        return Signature(((None,),), ((),))
    values = letters(call.tensors[1].ndim)
    leading = values[:-1] if sequence.ndim > 1 else ()
    return Signature(((*leading, None), values), (values,))


@rule("histc")
def histc(call: OpCall) -> Signature | None:
    """Counts of parts add up, when the range of values is given and not found in them."""
    bound = call.bind("input", "bins", "min", "max", min=0, max=0)
    if type(bound["min"]) is not int or type(bound["max"]) is not int or bound["min"] == bound["max"]:
        return None
    labels = letters(call.tensors[0].ndim)
    return Signature((labels,), ((None,),), reduces=dict.fromkeys(labels, "sum"))


def _bincount(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Counts of shards add up to a partial sum, as long as that of the rank with the largest value.

    forward: an all-reduce of that length; one device looks at the values for it, too.
    """
    bound = {**dict(zip(("input", "weights", "minlength"), args, strict=False)), **kwargs}
    tensor, weights = bound["input"], bound.get("weights")
    has_computed_length = isinstance(bound.get("minlength"), DTensor)
    if not isinstance(tensor, DTensor) or tensor.ndim != 1 or tensor._layout.has_partial or has_computed_length:
        return run_gathered(func, args, kwargs)
    layout, mesh = tensor._layout, tensor.device_mesh
    axes = layout.shard_axes[0]
    lie_alike = weights is None or (isinstance(weights, DTensor) and weights._layout is layout)
    if not axes or not lie_alike or mesh.get_coordinate() is None:
        return run_gathered(func, args, kwargs)
    blocks, named = _platform.blocks_of(args, kwargs)
    counts: Any = None
    error: RuntimeError | None = None
    try:
        counts = func(*blocks, **named)
    except RuntimeError as raised:
        error = raised
    length = attributed("inside bincount", agreed_maximum, mesh, axes, 0 if counts is None else len(counts), error)
    if weights is not None and tensor.shape[0] and "int" in str(_platform.dtype_name(counts.dtype)):  # no values here
        single = _platform.dtype_name(weights.dtype) == "float32"
        counts = _platform.tensor_type_cast(counts, "float32" if single else "float64")
    missing = length - len(counts)
    if missing:
        counts = _platform.cat([counts, _platform.zeros((missing,), counts.dtype, counts.device)])
    partials = ["sum" if axis in axes else None for axis in range(mesh.ndim)]
    return _platform.as_dtensor(DTensor, counts, Layout.of(mesh, [()], partials), (length,))


SPECIAL_OPS["bincount"] = _bincount
