"""Losses of elements or rows, with every reduction: a cut sum stays pending, a mean is a sum over the global count.

The framework's loss functions reduce inside. On blocks they are told not to, or to reduce what is there.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.shard.dispatching.mixing import plain_as_replicated
from hyper_parallel.core.shard.dispatching.special_ops import SPECIAL_OPS
from hyper_parallel.core.shard.rule_kit.agreed_errors import on_host, with_agreed_errors
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
from hyper_parallel.core.shard.rules.positions import with_checked_positions
from hyper_parallel.core.shard.rules.sharded_letters import arguments, call_with, is_sharded, num_elements
from hyper_parallel.platform import get_platform

_platform = get_platform()
_MEAN = (1, "mean")
_REDUCTIONS = (0, 1, 2, "none", "mean", "sum")

# The arguments of the functions under the ones written in Python, which pass ``reduction`` by keyword, as a word.
_ELEMENTS = {
    "mse_loss": ("input", "target", "reduction"),
    "l1_loss": ("input", "target", "reduction"),
    "smooth_l1_loss": ("input", "target", "reduction", "beta"),
    "huber_loss": ("input", "target", "reduction", "delta"),
    "soft_margin_loss": ("input", "target", "reduction"),
    "binary_cross_entropy": ("input", "target", "weight", "reduction"),
    "binary_cross_entropy_with_logits": ("input", "target", "weight", "pos_weight", "reduction"),
    "kl_div": ("input", "target", "reduction"),
    "poisson_nll_loss": ("input", "target", "log_input", "full", "eps", "reduction"),
    "hinge_embedding_loss": ("input", "target", "margin", "reduction"),
    "margin_ranking_loss": ("input1", "input2", "target", "margin", "reduction"),
}
_ROWS = {
    "cosine_embedding_loss": ("input1", "input2", "target", "margin", "reduction"),
    "triplet_margin_loss": ("anchor", "positive", "negative", "margin", "p", "eps", "swap", "reduction"),
    "multi_margin_loss": ("input", "target", "p", "margin", "weight", "reduction"),
    "multilabel_margin_loss": ("input", "target", "reduction"),
}
# Of these the mean with ``weight`` is over the weights, which the function written in Python spells out.
_WEIGHTED_BY_BODY = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")


def _default_reduction(call: OpCall) -> str:
    """A mean, but some functions under the ones written in Python give all elements."""
    return "none" if call.outputs[0] else "mean"


def reduction_of(call: OpCall, names: tuple[str, ...]) -> Any:
    """The reduction a loss was asked for, None when it is one only the function written in Python knows."""
    given = arguments(call, *names, reduction=_default_reduction(call), size_average=None, reduce=None)
    legacy = given["size_average"] is not None or given["reduce"] is not None
    is_known = not isinstance(given["reduction"], bool) and given["reduction"] in _REDUCTIONS
    return given["reduction"] if is_known and not legacy else None


def _broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    ndim = max(map(len, shapes), default=0)
    sizes = [{shape[len(shape) - back] for shape in shapes if len(shape) >= back} - {1} for back in range(ndim, 0, -1)]
    return tuple(next(iter(size), 1) for size in sizes)


def loss_signature(inputs: tuple[Labels, ...], kept: Labels, reduction: Any, **properties: Any) -> Signature:
    """A loss with dims ``kept`` before its reduction."""
    if reduction in (0, "none"):
        return Signature(inputs, (kept,), **properties)
    summed = dict.fromkeys((letter for letter in kept if letter is not None), "sum")
    return Signature(inputs, ((),), reduces=summed, **properties)


@rule(*_ELEMENTS)
def loss_of_elements(call: OpCall) -> Signature | None:
    names = _ELEMENTS[call.name]
    given = arguments(call, *names)
    reduction = reduction_of(call, names)
    if reduction is None or (call.name in _WEIGHTED_BY_BODY and given.get("weight") is not None):
        return None
    shape = _broadcast([spec.shape for spec in call.tensors])
    inputs = broadcast_labels([spec.shape for spec in call.tensors], shape)
    found = _with_mean(inputs, letters(len(shape)), reduction, shape, names)
    # On the host it refuses probabilities outside of [0, 1].
    return with_agreed_errors(found, on_host) if call.name == "binary_cross_entropy" else found


@rule(*_ROWS)
def loss_of_rows(call: OpCall) -> Signature | None:
    names = _ROWS[call.name]
    given = arguments(call, *names, weight=None)
    reduction = reduction_of(call, names)
    if reduction is None:
        return None
    if call.name.startswith("multi"):
        return _loss_of_classes(call, given, reduction, names)
    wide = [given[name] for name in names[:3] if isinstance(given[name], TensorSpec)]
    if call.name == "cosine_embedding_loss":
        wide = wide[:2]
    if len(wide) + (call.name == "cosine_embedding_loss") < 3:
        return None
    shape = _broadcast([spec.shape for spec in wide])
    labels = (*letters(len(shape) - 1), None)
    cut = [
        tuple(None if label == letters(len(shape))[-1] else label for label in one)
        for one in broadcast_labels([spec.shape for spec in wide], shape)
    ]
    if call.name == "cosine_embedding_loss":
        target = given["target"]
        shape, labels = shape[:-1], labels[:-1]
        if isinstance(target, TensorSpec):
            cut += broadcast_labels([target.shape], shape) if target.ndim <= len(shape) else []
        if len(cut) != len(call.tensors):
            return None
        return _with_mean(tuple(cut), labels, reduction, shape, names)
    return _with_mean(tuple(cut), labels[:-1], reduction, shape[:-1], names)


def _loss_of_classes(call: OpCall, given: dict[str, Any], reduction: Any, names: tuple[str, ...]) -> Signature | None:
    """Rows of scores for classes, which stay whole, with one target or several per row."""
    scores = given["input"]
    if not isinstance(scores, TensorSpec) or scores.ndim == 0:
        return None
    rows = letters(scores.ndim - 1)
    of_target = (*rows, None) if call.name == "multilabel_margin_loss" else rows
    by_tensor: dict[int, Labels] = {
        id(given["weight"]): (None,),
        id(given["target"]): of_target,
        id(scores): (*rows, None),
    }
    inputs = tuple(by_tensor[id(spec)] for spec in call.tensors)
    if any(len(labels) != spec.ndim for labels, spec in zip(inputs, call.tensors, strict=True)):
        return None
    if reduction in (0, "none") and call.outputs[0] != scores.shape[:-1]:
        return None  # the framework gives one element for a single row
    found = _with_mean(inputs, rows, reduction, scores.shape[:-1], names)
    if not isinstance(given["target"], TensorSpec):
        return found
    # Several targets of a row end with -1.
    low = -1 if call.name == "multilabel_margin_loss" else 0
    number = next(place for place, spec in enumerate(call.tensors) if spec is given["target"])
    return with_checked_positions(
        found, f"{call.name}: target", number, scores.ndim - 1, scores.shape[-1], kind=RuntimeError, low=low
    )


def _with_mean(
    inputs: tuple[Labels, ...], kept: Labels, reduction: Any, shape: tuple[int, ...], names: tuple[str, ...]
) -> Signature:
    if reduction not in _MEAN:
        return loss_signature(inputs, kept, reduction, local=_plain)

    def local(call: LocalCall) -> Any:
        return _share_of_mean(call, kept, shape, names)

    return loss_signature(inputs, kept, reduction, local=local)


def _plain(call: LocalCall) -> Any:
    """On plain blocks, for the functions that are written in Python read shapes."""
    return call.func(*call.args, **call.kwargs)


def _share_of_mean(call: LocalCall, kept: Labels, shape: tuple[int, ...], names: tuple[str, ...]) -> Any:
    """The block's mean by its share of the elements, so that half-precision sums do not overflow."""
    if not is_sharded(call, kept):
        return _plain(call)
    num_here, num_all = num_elements(call, kept, shape, range(len(shape)))
    if num_here == 0 < num_all:
        is_word = isinstance(arguments(call, *names).get("reduction"), str)
        return call_with(call, names, reduction="sum" if is_word else 2)
    result = _plain(call)
    return result if num_all == 0 else result * _platform.number_like(num_here / num_all, result)


def _gaussian_nll_loss(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function written in Python, which clamps a copy of the variance in place: that cannot be a pending sum."""
    args, kwargs = plain_as_replicated(args, kwargs, scalars=True)
    args = tuple(
        value.reduce_partial() if isinstance(value, DTensor) and value.layout.has_partial else value for value in args
    )
    return _platform.body_of(func)(*args, **kwargs)


SPECIAL_OPS["gaussian_nll_loss"] = _gaussian_nll_loss
