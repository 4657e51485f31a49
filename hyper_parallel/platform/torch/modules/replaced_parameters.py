"""Parameters that a module has no longer, because distributed ones took their place, and who uses them still.

Note [Who holds a parameter that was replaced]
A list beside the modules, or an optimizer that was made before: the one computes with values that nobody updates, the
other updates values that nobody computes with, and neither says so. Both do here, at their first use. Nothing is asked
where nobody holds such a parameter, and that costs nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hyper_parallel.platform.torch.private_api import has_gradient_hooks

_NAME = "hyper_parallel_replaced"  # of a parameter that was replaced: the name that it had
_watches_optimizers = False


def remember_parameters(module: nn.Module) -> Callable[[], None]:
    """What to call when parameters of ``module`` have been replaced.

    See Note [Who holds a parameter that was replaced]. Hooks on the gradient of one that
    was replaced are an error then: its shards would not have them.
    """
    before = {
        name: (weakref.ref(parameter), has_gradient_hooks(parameter)) for name, parameter in module.named_parameters()
    }

    def compare() -> None:
        now = {id(parameter) for parameter in module.parameters()}
        for name, (reference, has_hooks) in before.items():
            parameter = reference()
            if parameter is not None and id(parameter) in now:
                continue
            if has_hooks:
                raise ValueError(
                    f"parallelize: there are hooks on the gradient of the parameter {name!r} (register_hook), which "
                    "the one that takes its place would not have; register them behind parallelize, on those of "
                    "run.named_parameters()"
                )
            if parameter is not None and parameter.requires_grad:
                _watch(name, parameter)

    return compare


def _watch(name: str, parameter: torch.Tensor) -> None:
    global _watches_optimizers
    setattr(parameter, _NAME, name)
    parameter.register_post_accumulate_grad_hook(_refuse_gradient)
    if not _watches_optimizers:
        register_optimizer_step_pre_hook(_refuse_step)
        _watches_optimizers = True


def _refuse_gradient(parameter: torch.Tensor) -> None:
    raise RuntimeError(
        f"the model computes with what was its parameter {getattr(parameter, _NAME)!r} before parallelize put another "
        "in its place, and which no optimizer updates: something beside the modules holds it still, as a list, a dict "
        "or a function may. Let the forward take it from its module (self.layer.weight)"
    )


def _refuse_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = getattr(parameter, _NAME, None)
            if name is not None:
                raise RuntimeError(
                    f"this {type(optimizer).__name__} was made of parameters that the model has no longer ({name!r}, "
                    "for one), since parallelize or materialize put others in their place: it would update nothing. "
                    "Make it behind them, of run.parameters()"
                )
