"""Telling of uses of one parameter: a gradient that it gets, an optimizer that steps with it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from mindspore import nn
from mindspore.experimental import optim

__all__ = ["watch_uses"]

_NAME = "hyper_parallel_on_step"
_watches_optimizers = False


def watch_uses(parameter: Any, on_gradient: Callable[[], None], on_step: Callable[[str], None]) -> None:
    """Call ``on_gradient`` when backward brings the parameter a gradient, and ``on_step`` with its kind before an
    optimizer that holds the parameter steps.
    """
    global _watches_optimizers
    setattr(parameter, _NAME, on_step)
    parameter.register_hook(lambda _: on_gradient())
    if not _watches_optimizers:
        for kind in (nn.Optimizer, optim.Optimizer):
            kind.__call__ = _telling(kind.__call__)
        _watches_optimizers = True


def _telling(plain: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        for parameter in self.parameters:
            on_step = getattr(parameter, _NAME, None)
            if on_step is not None:
                on_step(type(self).__name__)
        return plain(self, *args, **kwargs)

    return call
