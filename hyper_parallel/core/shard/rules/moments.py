"""Variance, standard deviation and vector norms. Over a cut dim only the statistics travel, never the elements."""

from __future__ import annotations

import math
from typing import Any

from hyper_parallel.core.shard.rule_kit.rule_table import rule
from hyper_parallel.core.shard.rule_kit.signature import (
    LocalCall,
    OpCall,
    Signature,
    broadcast_labels,
    letters,
    without,
)
from hyper_parallel.core.shard.rules.extremes import shared_extreme
from hyper_parallel.core.shard.rules.reductions import is_of_floats, labels_of, reduced_dims, reduced_group, reduction
from hyper_parallel.core.shard.rules.sharded_letters import (
    all_reduced,
    arguments,
    group_of,
    in_working_precision,
    is_sharded,
    num_elements,
    shared_sum,
    varied,
)
from hyper_parallel.platform import get_platform

_platform = get_platform()


class _Moments(_platform.Function):  # type: ignore[name-defined]
    """forward: sum of squared deviations and mean over all blocks, two all-reduces; backward: nothing travels."""

    @staticmethod
    def forward(ctx: Any, block: Any, dims: tuple[int, ...], count: int, group: Any) -> Any:
        mean = all_reduced(block.sum(dim=dims, keepdim=True), "sum", group) / count
        deviations = block - mean
        squares = (deviations * deviations.conj()).real if block.is_complex() else deviations * deviations
        ctx.save_for_backward(block, mean)
        ctx.how = (dims, count, group)
        return all_reduced(squares.sum(dim=dims, keepdim=True), "sum", group), mean.clone()

    @staticmethod
    def backward(ctx: Any, of_squares: Any, of_mean: Any) -> Any:
        block, mean = ctx.saved_tensors
        dims, count, group = ctx.how
        if _platform.needs_grad(block):  # to be differentiated once more
            mean = shared_sum(block.sum(dim=dims, keepdim=True), group) / count
        gradient = varied(of_squares, group) * 2 * (block - mean) + varied(of_mean, group) / count
        return gradient, None, None, None


@rule("var", "std", "var_mean", "std_mean", by_dtype=True)
def var_std(call: OpCall) -> Signature | None:
    if not is_of_floats(call):
        return None
    given = _spread_arguments(call)
    return reduction(call, given["dim"], bool(given["keepdim"]), local=_var_std)


def _spread_arguments(call: OpCall | LocalCall) -> dict[str, Any]:
    """``var(x, unbiased)`` and ``var(x, dim, unbiased, keepdim)`` are forms beside the one with a correction."""
    is_short = len(call.args) > 1 and isinstance(call.args[1], bool)
    names = ("input", "unbiased") if is_short else ("input", "dim", "unbiased", "keepdim")
    given = arguments(call, *names, dim=None, unbiased=True, keepdim=False, correction=None)
    if given["correction"] is None:
        given["correction"] = 1 if given["unbiased"] else 0
    return given


def _var_std(call: LocalCall) -> Any:
    given = _spread_arguments(call)
    shape, block = call.input_shapes[0], given["input"]
    dims = reduced_dims(len(shape), given["dim"])
    _, count = num_elements(call, labels_of(call), shape, dims)
    squares, mean = _Moments.apply(in_working_precision(block), dims, count, reduced_group(call, dims))
    result = _over_freedom(squares, count - given["correction"])
    name = _platform.get_op_name(call.func)
    if name.startswith("std"):
        is_zero = result == 0
        result = result.masked_fill(is_zero, 1).sqrt().masked_fill(is_zero, 0)
    results = [result.to(block.real.dtype if block.is_complex() else block.dtype), mean.to(block.dtype)]
    if not given["keepdim"]:
        results = [one.squeeze(dims) for one in results]
    return tuple(results) if name.endswith("mean") else results[0]


def _over_freedom(squares: Any, freedom: float) -> Any:
    return squares / max(freedom, 0)


# ---------------------------------------------------------------- norms


class _JoinNorms(_platform.Function):  # type: ignore[name-defined]
    """forward: the p-norm of all ranks' p-norms, an all-reduce; backward: nothing travels."""

    @staticmethod
    def forward(ctx: Any, own: Any, p: float, group: Any) -> Any:
        total = all_reduced(own.clone() if p == 1 else _platform.power(own, p), "sum", group)
        total = total if p == 1 else _platform.power(total, 1 / p)
        ctx.save_for_backward(own, total)
        ctx.how = (p, group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        own, total = ctx.saved_tensors
        p, group = ctx.how
        gradient, total = varied(gradient, group), varied(total, group)
        if p == 1:
            return gradient, None, None
        # A zero has no gradient; where it makes the norm zero, for a negative p, nothing has. There infinity counts as
        # nothing: it is the norm of a block without elements.
        is_out = (own == 0) | (total == 0)
        if p < 0:
            is_out = is_out | (own == math.inf)
        share = _platform.power(own.masked_fill(is_out, 1) / total.masked_fill(total == 0, 1), p - 1)
        return gradient * share.masked_fill(is_out, 0), None, None


@rule("norm", "linalg_vector_norm", "linalg_norm", by_dtype=True)
def vector_norm(call: OpCall) -> Signature | None:
    if not is_of_floats(call):
        return None
    given = _norm_arguments(call)
    spec, dim = call.tensors[0], given["dim"]
    several = spec.ndim > 1 if dim is None else isinstance(dim, (tuple, list)) and len(dim) > 1
    is_named = isinstance(given["p"], str) and given["p"] != "fro"
    if is_named or (call.name == "linalg_norm" and several and given["p"] is not None):
        return _of_matrices(call, dim, bool(given["keepdim"]))
    return reduction(call, dim, bool(given["keepdim"]), local=_vector_norm, only_if_sharded=call.name != "norm")


@rule("linalg_matrix_norm", by_dtype=True)
def matrix_norm(call: OpCall) -> Signature | None:
    if not is_of_floats(call):
        return None
    given = arguments(call, "A", "ord", "dim", "keepdim", dim=(-2, -1), keepdim=False)
    return _of_matrices(call, given["dim"], bool(given["keepdim"]))


def _of_matrices(call: OpCall, dim: Any, keepdim: bool) -> Signature | None:
    """Norms that are not sums over elements need whole matrices; there may be many."""
    dim = (-2, -1) if dim is None else dim
    return reduction(call, dim, keepdim, local=_on_blocks, only_if_sharded=False, unsharded=True)


def _on_blocks(call: LocalCall) -> Any:
    """On plain blocks, for the function that is written in Python reads shapes."""
    return call.func(*call.args, **call.kwargs)


@rule("renorm")
def renorm(call: OpCall) -> Signature:
    given = arguments(call, "input", "p", "dim", "maxnorm")
    spec = call.tensors[0]
    labels = without(letters(spec.ndim), [one for one in range(spec.ndim) if one != given["dim"] % spec.ndim])
    return Signature((labels,), (labels,))


def _norm_arguments(call: OpCall | LocalCall) -> dict[str, Any]:
    given = arguments(call, "input", "p", "dim", "keepdim", dim=None, keepdim=False, dtype=None)
    given.setdefault("p", given.get("ord"))
    return given


def _vector_norm(call: LocalCall) -> Any:
    given = _norm_arguments(call)
    dims = reduced_dims(len(call.input_shapes[0]), given["dim"])
    group = reduced_group(call, dims)
    if group is None:
        return call.func(*call.args, **call.kwargs)
    block = given["input"] if given["dtype"] is None else given["input"].to(given["dtype"])
    return _joined_norm(block, given["p"], dims, bool(given["keepdim"]), group)


def _joined_norm(block: Any, p: Any, dims: tuple[int, ...], keepdim: bool, group: Any) -> Any:
    p = 2.0 if p is None or isinstance(p, str) else float(p)
    if math.isinf(p):
        return shared_extreme(block.abs(), dims, "max" if p > 0 else "min", group, keepdim, True)
    if p < 0 and any(block.shape[dim] == 0 for dim in dims):
        own = block.abs().sum(dim=dims, keepdim=keepdim) + math.inf
    else:
        own = _platform.vector_norm(block, p, dims, keepdim)
    joined = _JoinNorms.apply(in_working_precision(own), p or 1.0, group)
    return joined.to(own.dtype)


@rule("dist", by_dtype=True)
def dist(call: OpCall) -> Signature | None:
    if len(call.tensors) != 2 or not is_of_floats(call):
        return None
    ndim = max(spec.ndim for spec in call.tensors)
    sizes = [
        {spec.shape[spec.ndim - back] for spec in call.tensors if spec.ndim >= back} - {1}
        for back in range(ndim, 0, -1)
    ]
    shape = tuple(next(iter(size), 1) for size in sizes)
    inputs = broadcast_labels([spec.shape for spec in call.tensors], shape)
    return Signature(
        inputs,
        ((),),
        handled=frozenset(letter for letter in letters(ndim) if letter is not None),
        local=_dist,
        needs_local=lambda planned: is_sharded(planned, letters(ndim)),
    )


def _dist(call: LocalCall) -> Any:
    given = arguments(call, "input", "other", "p", p=2)
    difference = given["input"] - given["other"]
    dims = tuple(range(difference.ndim))
    group = group_of(call, letters(difference.ndim))
    return _joined_norm(difference, given["p"], dims, False, group)
