"""Calls of MindSpore's loss functions, and how many numbers their means are over.

They are those of ``mindspore.ops`` and ``mint.nn.functional``, and what the cells of ``mindspore.nn`` average by
themselves (``LossBase.get_loss``).
"""

from __future__ import annotations

import functools
import inspect
import math
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mindspore import mint, nn, ops

from hyper_parallel.platform.contract.modules import SeenLoss
from hyper_parallel.platform.mindspore import private_api

__all__ = ["LOSSES", "watch_losses", "watched"]

_OF_CLASSES = ("cross_entropy", "nll_loss")
_OF_ELEMENTS = (
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "soft_margin_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)
LOSSES = {
    function: name
    for place in (ops, mint.nn.functional)
    for name in (*_OF_CLASSES, *_OF_ELEMENTS, "ctc_loss")
    if isinstance(function := getattr(place, name, None), types.FunctionType)
}

_seen: list[list[SeenLoss]] = []  # of the contexts that are entered


@contextmanager
def watch_losses() -> Iterator[list[SeenLoss]]:
    """Inside, calls of loss functions that give one number are added to the list."""
    _seen.append([])
    try:
        yield _seen[-1]
    finally:
        _seen.pop()


def watched(plain: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """``call``, which stands in the place of the function ``plain``; of a loss function one that tells of its calls."""
    name = LOSSES.get(plain)
    if name is None:
        return call
    signature = inspect.signature(plain)

    @functools.wraps(plain)
    def tell(*args: Any, **kwargs: Any) -> Any:
        if not _seen:
            return call(*args, **kwargs)
        with watch_losses():  # what the function itself calls is no loss of the model's
            value = call(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        reduction = bound.arguments["reduction"]
        if reduction != "none":
            _seen[-1].append(SeenLoss(name, reduction, _count(name, bound.arguments), value))
        return value

    return tell


def _count(name: str, given: dict[str, Any]) -> Any:
    values, target, *_ = given.values()
    if name == "ctc_loss":
        return len(given["target_lengths"])
    if name in _OF_ELEMENTS:
        if given["reduction"] == "batchmean":
            return int(values.shape[0])
        return math.prod(np.broadcast_shapes(tuple(values.shape), tuple(target.shape)))
    if given["weight"] is not None:
        return None
    if "Float" in str(target.dtype):
        return math.prod(target.shape) // int(target.shape[-1 if target.ndim == 1 else 1])
    with private_api.no_grad():
        return (target != given["ignore_index"]).sum()


def _watch_cells() -> None:
    plain = nn.LossBase.get_loss

    @functools.wraps(plain)
    def get_loss(self: Any, x: Any, weights: float = 1.0) -> Any:
        value = plain(self, x, weights)
        if _seen and self.reduce:
            reduction = "mean" if self.average else "sum"
            _seen[-1].append(SeenLoss(type(self).__name__, reduction, math.prod(x.shape), value))
        return value

    nn.LossBase.get_loss = get_loss


_watch_cells()
