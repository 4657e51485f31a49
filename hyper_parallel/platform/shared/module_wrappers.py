"""Modules around modules that look like what they wrap, the same on every framework: for checkpoint and swap."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["CHILD", "Checkpointed", "Lookalike", "check_wrapper_arguments", "innermost"]

CHILD = "_wrapped_module"


class Lookalike:
    """To be derived from before the framework's module: attributes are those of the module inside.

    ``_CHILDREN`` is the attribute in which the framework keeps the modules of a module.
    """

    _CHILDREN: str

    @property
    def wrapped_module(self) -> Any:
        return self.__dict__[self._CHILDREN][CHILD]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)  # type: ignore[misc]
        except AttributeError:
            wrapped = self.__dict__.get(self._CHILDREN, {}).get(CHILD)
            if wrapped is None:
                raise
        return getattr(wrapped, name)

    def __setattr__(self, name: str, value: Any) -> None:
        wrapped = self.__dict__.get(self._CHILDREN, {}).get(CHILD)
        if wrapped is None or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(wrapped, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self.wrapped_module, name)

    def __getitem__(self, index: Any) -> Any:
        return self.wrapped_module[index]

    def __len__(self) -> int:
        return len(self.wrapped_module)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.wrapped_module)

    def __bool__(self) -> bool:
        return True  # also around a list of no modules

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.wrapped_module.state_dict(*args, **kwargs)


def innermost(module: Any) -> Any:
    """The module itself, or what wrappers are around."""
    while isinstance(module, Lookalike):
        module = module.wrapped_module
    return module


class Checkpointed:
    """What a wrapper computes under a checkpoint function."""

    wrapped_module: Any
    _checkpoint_fn: Callable[..., Any]
    _checkpoint_fn_kwargs: dict[str, Any]

    def __init__(self, module: Any, checkpoint_fn: Callable[..., Any], checkpoint_fn_kwargs: dict[str, Any]) -> None:
        self.__dict__["_checkpoint_fn"] = checkpoint_fn
        self.__dict__["_checkpoint_fn_kwargs"] = checkpoint_fn_kwargs
        super().__init__(module)  # type: ignore[call-arg]

    def _run_checkpointed(self, *args: Any, **kwargs: Any) -> Any:
        """All inputs go in by position: no clash with the checkpoint function's own keywords, and one that takes no
        keywords (the reentrant kind) works too.
        """
        run = functools.partial(_call_by_position, self.wrapped_module, len(args), tuple(kwargs))
        return self._checkpoint_fn(run, *args, *kwargs.values(), **self._checkpoint_fn_kwargs)


def _call_by_position(module: Any, num_args: int, names: tuple[str, ...], *values: Any) -> Any:
    return module(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))


def check_wrapper_arguments(kind: type, kind_name: str, caller: str, module: Any, role: str, function: Any) -> None:
    if not isinstance(module, kind):
        raise TypeError(f"{caller}: module must be a {kind_name}, got {type(module).__name__}")
    if function is not None and not callable(function):
        raise TypeError(f"{caller}: {role} must be a function or None, got {type(function).__name__}")
