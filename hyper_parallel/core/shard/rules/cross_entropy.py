"""Cross entropy and negative log-likelihood, also over cut classes: the logits stay where they are.

Of each row four numbers travel at most: its largest logit, the sum of its exponentials, the logit of its target, and,
when labels are smoothed, the sum of its logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.rule_kit.rule_table import rule
from hyper_parallel.core.shard.rule_kit.signature import Labels, LocalCall, OpCall, Signature, TensorSpec, letters
from hyper_parallel.core.shard.rules.losses import loss_signature
from hyper_parallel.core.shard.rules.positions import check_positions
from hyper_parallel.core.shard.rules.sharded_letters import (
    all_reduced,
    arguments,
    block_region,
    call_with,
    group_of,
    in_working_precision,
    is_sharded,
    refuse_integers,
    sum_over,
    varied,
)
from hyper_parallel.core.shard.rules.softmax import sharded_logsumexp
from hyper_parallel.platform import get_platform

_platform = get_platform()
_ARGUMENTS = ("input", "target", "weight", "reduction", "ignore_index", "label_smoothing")
_DEFAULTS = {"weight": None, "reduction": 1, "ignore_index": -100, "label_smoothing": 0.0}


@rule("cross_entropy_loss", "nll_loss_nd")
def cross_entropy(call: OpCall) -> Signature | None:
    given = arguments(call, *_ARGUMENTS, **_DEFAULTS)
    logits, target = given["input"], given["target"]
    if not isinstance(logits, TensorSpec):
        return None
    labels = letters(logits.ndim)
    class_dim = _class_dim(logits.ndim)
    rows = labels[:class_dim] + labels[class_dim + 1 :]
    by_tensor: dict[int, Labels] = {id(given["weight"]): (labels[class_dim],)}
    if isinstance(target, TensorSpec):
        by_tensor[id(target)] = labels if _is_distribution(logits.shape, target.shape) else rows
    by_tensor[id(logits)] = labels
    inputs = tuple(by_tensor[id(spec)] for spec in call.tensors)
    if given["reduction"] not in (0, 1, 2) or any(
        len(one) != spec.ndim for one, spec in zip(inputs, call.tensors, strict=True)
    ):
        return None
    return loss_signature(
        inputs,
        rows,
        given["reduction"],
        handled=frozenset({labels[class_dim]}),
        local=_cross_entropy,
        needs_local=lambda planned: is_sharded(planned, labels),
    )


def _class_dim(ndim: int) -> int:
    return 0 if ndim == 1 else 1


def _is_distribution(logits: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Whether the target gives a probability for every class instead of one class."""
    return tuple(logits) == tuple(target)


def _cross_entropy(call: LocalCall) -> Any:
    """A loss per row, and the sum of all rows on this rank divided by what the mean is over on all ranks."""
    given = arguments(call, *_ARGUMENTS, **_DEFAULTS)
    logits, shape = given["input"], call.input_shapes[0]
    labels = letters(len(shape))
    class_dim = _class_dim(len(shape))
    is_distribution = _is_distribution(tuple(logits.shape), tuple(given["target"].shape))
    group = group_of(call, labels[class_dim : class_dim + 1])
    rows = None if is_distribution else _ShardedRows(call, given, group, class_dim)
    if group is not None:
        refuse_integers(call, logits)
    if group is None:
        losses = call_with(call, _ARGUMENTS, reduction=0)
    elif rows is None:
        losses = _of_distribution(given, group, class_dim, shape[class_dim])
    elif _platform.get_op_name(call.func) == "nll_loss_nd":
        losses = rows.likelihood()
    else:
        losses = rows.entropy()
    if given["reduction"] == 0:
        return losses.to(logits.dtype)
    if given["reduction"] == 2:
        return losses.sum().to(logits.dtype)
    if rows is None:
        total: Any = math.prod(size for dim, size in enumerate(shape) if dim != class_dim)
    else:
        batch = group_of(call, labels[:class_dim] + labels[class_dim + 1 :])
        total = all_reduced(rows.row_weights().sum(), "sum", batch)
    return (losses / total).sum().to(logits.dtype)


def _shares(smoothing: float, num_classes: int, scores: Any) -> tuple[Any, Any]:
    """What smoothing of labels leaves to the target, and what it gives to each class."""
    return _platform.number_like(1 - smoothing, scores), _platform.number_like(smoothing / num_classes, scores)


def _of_distribution(given: dict[str, Any], group: Any, class_dim: int, num_classes: int) -> Any:
    """forward: the all-reduces of logsumexp and one more; backward: one all-reduce."""
    logits, target = in_working_precision(given["input"]), in_working_precision(given["target"])
    smoothing = given["label_smoothing"]
    if smoothing:
        on_target, on_each = _shares(smoothing, num_classes, target)
        target = target * on_target + on_each
    if given["weight"] is not None:
        target = target * _along(given["weight"], class_dim, logits.ndim)
    normaliser = varied(sharded_logsumexp(logits, (class_dim,), group), group)
    return sum_over(((normaliser - logits) * target).sum(dim=class_dim), group)


def _along(weight: Any, dim: int, ndim: int) -> Any:
    return weight.reshape([weight.shape[0] if one == dim else 1 for one in range(ndim)])


class _Facts(NamedTuple):
    """Rows of class scores whose classes are sharded over ``group``, in numbers."""

    group: Any
    dim: int
    num_classes: int
    num_here: int
    smoothing: float


def _at_target(scores: Any, own: Any, is_elsewhere: Any, facts: _Facts) -> Any:
    """The scores of the targets that are here, zeros for the others; the class dim is kept."""
    if facts.num_here == 0:
        return scores.sum(dim=facts.dim, keepdim=True)
    return scores.gather(facts.dim, own).masked_fill(is_elsewhere, 0)


class _ShardedRows:
    """Rows of class scores whose classes are cut over ``group``, or whole when it is None, with one target each."""

    def __init__(self, call: LocalCall, given: dict[str, Any], group: Any, class_dim: int) -> None:
        labels, shape = letters(len(call.input_shapes[0])), call.input_shapes[0]
        offsets, sizes = block_region(call, labels, shape)
        self.scores = given["input"]
        self.facts = _Facts(group, class_dim, shape[class_dim], sizes[class_dim], given["label_smoothing"])
        self.weight = given["weight"]
        if self.weight is not None and _platform.needs_grad(self.weight):
            raise RuntimeError("cross entropy has no gradient with respect to weight; give it weight.detach()")
        target = given["target"].long()
        self.ignored = target == given["ignore_index"]
        check_positions(call, target.masked_fill(self.ignored, 0), *self._bounds(call, given))
        own = target - offsets[class_dim]
        num_here = self.facts.num_here
        self.is_elsewhere = ((own < 0) | (own >= num_here) | self.ignored).unsqueeze(class_dim)
        self.own = own.clamp(0, max(num_here - 1, 0)).unsqueeze(class_dim)

    def _bounds(self, call: LocalCall, given: dict[str, Any]) -> tuple[Layout, int, int, Callable[[int], Exception]]:
        """How the targets lie, the range they must be in, and the error where one is not."""
        num_classes, ignore_index = self.facts.num_classes, given["ignore_index"]

        def error(target: int) -> Exception:
            return IndexError(
                f"cross entropy: the target {target} is not one of the {num_classes} classes; targets are 0 to "
                f"{num_classes - 1}, or ignore_index ({ignore_index})"
            )

        return call.inputs[1], 0, num_classes, error

    def row_weights(self) -> Any:
        """The weights of the rows' targets, 0 for those to be ignored; whole on every rank of the group."""
        if self.weight is None:
            return in_working_precision(self.ignored.logical_not().to(self.scores.dtype))
        if self.facts.num_here == 0:
            own = in_working_precision(self.weight.detach()).new_zeros(self.ignored.shape)
        else:
            own = in_working_precision(self.weight.detach())[self.own.squeeze(self.facts.dim)]
            own = own.masked_fill(self.is_elsewhere.squeeze(self.facts.dim), 0)
        return all_reduced(own, "sum", self.facts.group)

    def likelihood(self) -> Any:
        """Per row the negative score of the target times its weight. One all-reduce forward, none backward."""
        own = _at_target(self.scores, self.own, self.is_elsewhere, self.facts).squeeze(self.facts.dim)
        return -sum_over(own, self.facts.group) * self.row_weights()

    def entropy(self) -> Any:
        """Per row the cross entropy with its target, smoothed over all classes."""
        scores, dim = in_working_precision(self.scores), self.facts.dim
        class_weights = None if self.weight is None else _along(self.weight, dim, scores.ndim).to(scores.dtype)
        return _ShardedEntropy.apply(
            scores,
            self.own,
            self.is_elsewhere,
            self.ignored.unsqueeze(dim),
            self.row_weights().unsqueeze(dim),
            class_weights,
            self.facts,
        )


class _ShardedEntropy(_platform.Function):  # type: ignore[name-defined]
    """forward: the all-reduces of logsumexp and one more; backward: nothing travels.

    All tensors are arguments of their own, none hides in an object: what a program computes with can be read off the
    call.
    """

    @staticmethod
    def forward(
        ctx: Any,
        scores: Any,
        own: Any,
        is_elsewhere: Any,
        ignored: Any,
        weights: Any,
        class_weights: Any,
        facts: _Facts,
    ) -> Any:
        normaliser = sharded_logsumexp(scores, (facts.dim,), facts.group)
        terms = [_at_target(scores, own, is_elsewhere, facts)]
        weight_of_all: Any = float(facts.num_classes)
        if facts.smoothing:
            weighted = scores if class_weights is None else scores * class_weights
            terms.append(weighted.sum(dim=facts.dim, keepdim=True))
            if class_weights is not None:
                weight_of_all = all_reduced(class_weights.sum(), "sum", facts.group)
        at_target, *of_all = all_reduced(
            _platform.cat([term.unsqueeze(0) for term in terms]), "sum", facts.group
        ).unbind(0)
        result = (normaliser - at_target) * weights
        if of_all:
            on_target, on_each = _shares(facts.smoothing, facts.num_classes, scores)
            result = result * on_target + (normaliser * weight_of_all - of_all[0]) * on_each
        ctx.save_for_backward(scores, normaliser)
        ctx.constants = own, is_elsewhere, ignored, weights, class_weights, weight_of_all
        ctx.facts = facts
        return result.masked_fill(ignored, 0).squeeze(facts.dim)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        scores, normaliser = ctx.saved_tensors
        own, is_elsewhere, ignored, weights, class_weights, weight_of_all = ctx.constants
        facts: _Facts = ctx.facts
        if _platform.needs_grad(scores):  # to be differentiated once more
            normaliser = varied(sharded_logsumexp(scores, (facts.dim,), facts.group), facts.group)
        gradient = varied(gradient, facts.group).unsqueeze(facts.dim).masked_fill(ignored, 0)
        on_target, on_each = _shares(facts.smoothing, facts.num_classes, scores)
        at_target, even = gradient * weights * on_target, gradient * on_each
        answer = (scores - normaliser).exp() * (at_target + even * weight_of_all if facts.smoothing else at_target)
        if facts.smoothing:
            answer = answer - (even if class_weights is None else even * class_weights)
        if facts.num_here:
            answer = answer.scatter_add(facts.dim, own, -at_target.masked_fill(is_elsewhere, 0))
        return answer, None, None, None, None, None, None
