"""Autograd functions of users that are given DTensors.

Note [Functions see whole tensors]
``torch.autograd.Function.apply`` has no hook: it would hand DTensors to ``forward`` and, in backward, the blocks of
the gradients as plain tensors. Code that is written for one device would then sum the gradient of a whole parameter
over this rank's rows only, without any error. So ``apply`` is wrapped: when it is given DTensors (and interception is
on), a handler of the library takes over. For everything else it costs one look at the arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch

from hyper_parallel.platform.torch.base.dtensor_base import DTensorBase
from hyper_parallel.platform.torch.private_api import is_intercepting

# Whether operators are intercepted now; the switch has no public name.

_plain_apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

_own_apply = _plain_apply

Handler = Callable[[type, tuple[Any, ...], dict[str, Any]], Any]


def set_function_handler(handler: Handler) -> None:
    """Let ``handler(function, args, kwargs)`` answer ``function.apply`` when it is given DTensors."""

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        for value in args:
            if isinstance(value, DTensorBase) and is_intercepting():
                return handler(cls, args, kwargs)
        return _plain_apply(cls, *args, **kwargs)

    apply.__doc__ = _plain_apply.__doc__
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]


def set_applying(apply: Callable[..., Any] | None) -> None:
    """Let ``apply(function, *args, **kwargs)`` call autograd functions; None: PyTorch again."""
    global _plain_apply
    _plain_apply = _own_apply if apply is None else apply


@functools.cache
def own_apply(function: type) -> Callable[..., Any]:
    """``function.apply`` as PyTorch has it, the same object each time."""
    return MethodType(_own_apply, function)


def apply_function(function: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``function.apply`` as PyTorch has it."""
    return _plain_apply(function, *args, **kwargs)
