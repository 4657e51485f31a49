"""Which argument of a block is the stream: the first one, or the first tensor among those given by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hyper_parallel.platform import get_platform

__all__ = ["beside_stream", "stream_of", "with_stream"]


def stream_of(path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The stream that a block is called with."""
    if args:
        return args[0]
    return kwargs[_name(path, kwargs)]


def beside_stream(path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The other tensors that a block is called with, those in a tuple too, and what to call them."""
    stream = None if args else _name(path, kwargs)
    given = [(f"argument {number}", value) for number, value in enumerate(args) if number]
    given += [(f"{name}=", value) for name, value in kwargs.items() if name != stream]
    flat = [(name, one) for name, value in given for one in (value if isinstance(value, (tuple, list)) else [value])]
    return [(name, one) for name, one in flat if get_platform().is_tensor(one)]


def with_stream(
    path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], stream: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a block with another stream."""
    if args:
        return (stream, *args[1:]), dict(kwargs)
    return args, {**kwargs, _name(path, kwargs): stream}


def _name(path: str, kwargs: Mapping[str, Any]) -> str:
    if "hidden_states" in kwargs:
        return "hidden_states"
    is_tensor = get_platform().is_tensor
    for name, value in kwargs.items():
        if is_tensor(value):
            return name
    raise ValueError(
        f"the block '{path}' was called without a tensor, so there is no stream to hand on: pass it as the block's "
        "first argument"
    )
