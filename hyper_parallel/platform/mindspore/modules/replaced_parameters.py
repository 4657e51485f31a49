"""Parameters that a cell has no longer, because distributed ones took their place, and who uses them still.

Note [Who holds a parameter that was replaced]
A list beside the cells, or an optimizer that was made before: the one computes with values that nobody updates, the
other updates values that nobody computes with, and neither says so. Both do here, at their first use.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from mindspore import nn
from mindspore.experimental import optim

from hyper_parallel.platform.mindspore.modules.modules import parameters_dict

__all__ = ["remember_parameters"]

_NAME = "hyper_parallel_replaced"  # of a parameter that was replaced: the name that it had
_watches_optimizers = False


def remember_parameters(module: nn.Cell) -> Callable[[], None]:
    """What to call when parameters of ``module`` have been replaced.

    See Note [Who holds a parameter that was replaced]. Hooks on the gradient of one that was replaced are an error
    then: its shards would not have them.
    """
    before = {
        name: (weakref.ref(parameter), bool(parameter.hooks())) for name, parameter in parameters_dict(module).items()
    }

    def compare() -> None:
        now = {id(parameter) for parameter in parameters_dict(module).values()}
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


def _watch(name: str, parameter: Any) -> None:
    global _watches_optimizers
    setattr(parameter, _NAME, name)
    parameter.register_hook(functools.partial(_refuse_gradient, name))
    if not _watches_optimizers:
        for kind in (nn.Optimizer, optim.Optimizer):
            kind.__call__ = _refusing_steps(kind.__call__)
        _watches_optimizers = True


def _refuse_gradient(name: str, gradient: Any) -> None:
    del gradient
    raise RuntimeError(
        f"the model computes with what was its parameter {name!r} before parallelize put another in its place, and "
        "which no optimizer updates: something beside the cells holds it still, as a list, a dict or a function may. "
        "Let construct take it from its cell (self.layer.weight)"
    )


def _refusing_steps(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        for parameter in self.parameters:
            name = getattr(parameter, _NAME, None)
            if name is not None:
                raise RuntimeError(
                    f"this {type(self).__name__} was made of parameters that the model has no longer ({name!r}, for "
                    "one), since parallelize or materialize put others in their place: it would update nothing. Make "
                    "it behind them, of run.parameters()"
                )
        return plain(self, *args, **kwargs)

    return call
