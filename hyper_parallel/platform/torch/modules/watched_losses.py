"""Calls of PyTorch's loss functions, and how many numbers their means are over."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from hyper_parallel.platform.contract.modules import SeenLoss

_OF_CLASSES = (F.cross_entropy, F.nll_loss)
_OF_ELEMENTS = (
    *(F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div, F.soft_margin_loss),
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.poisson_nll_loss),
)
_SIGNATURES: dict[Callable[..., Any], inspect.Signature] = {
    function: inspect.signature(function) for function in (*_OF_CLASSES, *_OF_ELEMENTS, F.ctc_loss)
}


@contextmanager
def watch_losses() -> Iterator[list[SeenLoss]]:
    """Inside, calls of loss functions that give one number are added to the list."""
    seen: list[SeenLoss] = []
    with _Watching(seen):
        yield seen


class _Watching(TorchFunctionMode):
    def __init__(self, seen: list[SeenLoss]) -> None:
        super().__init__()
        self._seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        signature = _SIGNATURES.get(func)
        if signature is not None:
            bound = signature.bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            reduction = _reduction(bound.arguments)
            if reduction != "none":
                self._seen.append(SeenLoss(func.__name__, reduction, _count(func, reduction, bound.arguments), value))
        return value


def _reduction(given: dict[str, Any]) -> str:
    average, reduce = given.get("size_average"), given.get("reduce")
    if average is None and reduce is None:
        return str(given["reduction"])
    if reduce is False:
        return "none"
    return "sum" if average is False else "mean"


def _count(func: Callable[..., Any], reduction: str, given: dict[str, Any]) -> Any:
    if func is F.ctc_loss:
        return len(given["target_lengths"])
    values, target = given["input"], given["target"]
    if func in _OF_ELEMENTS:
        return int(values.shape[0]) if reduction == "batchmean" else math.prod(_broadcast(values.shape, target.shape))
    if given["weight"] is not None:
        return None
    if target.dtype.is_floating_point:
        return math.prod(target.shape) // int(target.shape[-1 if target.ndim == 1 else 1])
    with torch.no_grad():
        return (target != given["ignore_index"]).sum()


def _broadcast(first: Any, second: Any) -> torch.Size:
    return torch.broadcast_shapes(tuple(first), tuple(second))
