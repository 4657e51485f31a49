"""What a parameter without memory knows about its initial values; it goes with the parameter when that is cut."""

from __future__ import annotations

from typing import Any

# Set by the platform, see ``without_memory``: the one number that a constructor filled it with, or what else makes the
# values of the whole, where the framework gives a parameter such a thing.
_CONSTANT = "hyper_parallel_constant"
_INITIALIZER = "hyper_parallel_initializer"


def constant_of(parameter: Any) -> Any:
    """The value that all elements of a parameter without memory had; None if they differed, or none was given."""
    return getattr(parameter, _CONSTANT, None)


def carry_initial_values(source: Any, target: Any) -> None:
    """Let ``target``, cut out of ``source``, remember what ``source`` knows about its initial values."""
    for note in (_CONSTANT, _INITIALIZER):
        if getattr(source, note, None) is not None:
            setattr(target, note, getattr(source, note))
