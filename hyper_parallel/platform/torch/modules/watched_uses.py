"""Telling of uses of one parameter: a gradient that it gets, an optimizer that steps with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

__all__ = ["watch_uses"]

_NAME = "hyper_parallel_on_step"
_watches_optimizers = False


def watch_uses(parameter: torch.Tensor, on_gradient: Callable[[], None], on_step: Callable[[str], None]) -> None:
    """Call ``on_gradient`` when backward brings the parameter a gradient, and ``on_step`` with its kind before an
    optimizer that holds the parameter steps.
    """
    global _watches_optimizers
    setattr(parameter, _NAME, on_step)
    parameter.register_post_accumulate_grad_hook(lambda _: on_gradient())
    if not _watches_optimizers:
        register_optimizer_step_pre_hook(_tell_steps)
        _watches_optimizers = True


def _tell_steps(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            on_step = getattr(parameter, _NAME, None)
            if on_step is not None:
                on_step(type(optimizer).__name__)
