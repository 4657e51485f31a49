"""Parameters without memory that a constructor had filled with one number, which goes with them when they are cut."""

from __future__ import annotations

from typing import Any

_CONSTANT = "hyper_parallel_constant"  # set by the platform, see ``without_memory``


def constant_of(parameter: Any) -> Any:
    """The value that all elements of a parameter without memory had; None if they differed, or none was given."""
    return getattr(parameter, _CONSTANT, None)


def carry_constant(source: Any, target: Any) -> None:
    """Let ``target``, cut out of ``source``, remember the one number that ``source`` is full of, if it is."""
    constant = constant_of(source)
    if constant is not None:
        setattr(target, _CONSTANT, constant)
