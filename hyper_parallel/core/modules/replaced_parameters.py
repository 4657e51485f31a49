"""Parameters that a module has no longer, because distributed ones took their place, and who uses them still.

Note [Who holds a parameter that was replaced]
A list beside the modules, or an optimizer that was made before: the one computes with values that nobody updates, the
other updates values that nobody computes with, and neither says so. Both do here, at their first use. Nothing is asked
where nobody holds such a parameter, and that costs nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from hyper_parallel.platform import get_platform

_platform = get_platform()


def remember_parameters(module: Any) -> Callable[[], None]:
    """What to call when parameters of ``module`` have been replaced.

    See Note [Who holds a parameter that was replaced]. Hooks on the gradient of one that was replaced are an error
    then: its shards would not have them.
    """
    before = {
        name: (weakref.ref(parameter), _platform.has_gradient_hooks(parameter))
        for name, parameter in _platform.parameters_dict(module).items()
    }

    def compare() -> None:
        now = {id(parameter) for parameter in _platform.parameters_dict(module).values()}
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
            if parameter is not None and _platform.requires_grad(parameter):
                _platform.watch_uses(
                    parameter, functools.partial(_refuse_gradient, name), functools.partial(_refuse_step, name)
                )

    return compare


def _refuse_gradient(name: str) -> None:
    raise RuntimeError(
        f"the model computes with what was its parameter {name!r} before parallelize put another in its place, and "
        "which no optimizer updates: something beside the modules holds it still, as a list, a dict or a function may. "
        "Let the forward take it from its module (self.layer.weight)"
    )


def _refuse_step(name: str, optimizer: str) -> None:
    raise RuntimeError(
        f"this {optimizer} was made of parameters that the model has no longer ({name!r}, for one), since parallelize "
        "or materialize put others in their place: it would update nothing. Make it behind them, of run.parameters()"
    )
