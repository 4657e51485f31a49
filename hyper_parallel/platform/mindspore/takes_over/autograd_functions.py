"""Autograd functions that are given DTensors, and the names of operators.

MindSpore's autograd functions would hand DTensors to ``forward`` and, in backward, blocks of the gradients as plain
tensors. So ``apply`` of the platform's ``Function`` lets a handler of the library take over where DTensors are given;
see Note [A function of your own sees whole tensors] in ``core/shard/dispatching/autograd_helpers.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.base import tensors
from hyper_parallel.platform.mindspore.dtensor.tensor_type import DTensorBase
from hyper_parallel.platform.mindspore.takes_over import names, translation

_own_apply = private_api.Function.apply.__func__
_plain_apply = _own_apply
_handler: Callable[[type, tuple[Any, ...], dict[str, Any]], Any] | None = None


class Function(private_api.Function):
    """The base of autograd functions: static ``forward(ctx, ...)`` and ``backward(ctx, ...)``; call ``apply``."""

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Run the function; with DTensors its operators are dispatched."""
        if _handler is not None:
            for value in args:
                if isinstance(value, DTensorBase):
                    return _handler(cls, args, kwargs)
        return _plain_apply(cls, *args, **kwargs)


def set_function_handler(handler: Callable[[type, tuple[Any, ...], dict[str, Any]], Any]) -> None:
    """Let ``handler(function, args, kwargs)`` answer ``function.apply`` when it is given DTensors."""
    global _handler
    _handler = handler


def own_apply(function: type, *args: Any, **kwargs: Any) -> Any:
    """``function.apply`` as MindSpore has it, whoever looks at calls."""
    return _own_apply(function, *args, **kwargs)


def set_applying(apply: Callable[..., Any] | None) -> None:
    """Let ``apply(function, *args, **kwargs)`` call autograd functions; None: MindSpore again."""
    global _plain_apply
    _plain_apply = _own_apply if apply is None else apply
    private_api.Function.apply = classmethod(_plain_apply)


def apply_function(function: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``function.apply`` as MindSpore has it, on the blocks."""
    return _plain_apply(function, *args, **kwargs)


def get_op_name(func: Any) -> str:
    """The canonical name of an operator, one for all spellings of the same computation."""
    if isinstance(func, translation.PassedOn):
        return func.__name__
    name = func if isinstance(func, str) else getattr(func, "name", None)
    if isinstance(name, str) and name in names.SAME:
        return names.SAME[name]
    return tensors.get_op_name(func)
