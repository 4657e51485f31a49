"""What an interpreter of pickles hands around: records in place of objects, and entries in place of classes.

Neither is reachable by other parts of the process, and no attribute of theirs is a class or function that a pickle gets
hold of; see Note [Why the pickle module does not read] in ``torch_pickle.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from hyper_parallel.core.distributed_checkpoint.base.shown_text import shown

if TYPE_CHECKING:
    from hyper_parallel.core.distributed_checkpoint.foreign.torch_pickles.torch_pickle_cost import PickleCost


class DamagedPickle(ValueError):
    """Bytes that torch does not write."""


class UnsafePickle(ValueError):
    """A pickle holds something that is not plain data."""


class TensorInside(ValueError):
    """A pickle of an object refers to the memory of a tensor."""


class Record:
    """Stands in for an object of one of torch's classes: its name, and what it was made with and given later."""

    __slots__ = ("args", "kind", "state")

    def __init__(self, kind: str, args: tuple[Any, ...]) -> None:
        self.kind, self.args = kind, args
        self.state: Any = None


class Named(NamedTuple):
    """What a name in a pickle stands for: ``make(cost, arguments)`` where it can be called."""

    name: str
    make: Callable[[PickleCost, tuple[Any, ...]], Any] | None = None
    is_record: bool = False


class Dtype(NamedTuple):
    """A dtype, or a type of storage, which stands for the dtype of its elements."""

    name: str


def described(value: Any) -> str:
    """A value in a message: short, and without a walk through what it holds."""
    if type(value) is str:
        return f"'{shown(value)}'"
    if type(value) is Dtype:
        return f"torch.{value.name}"
    if value is None or type(value) in (bool, float) or (type(value) is int and value.bit_length() <= 128):
        return repr(value)
    if type(value) is Named:
        return value.name
    if type(value) is tuple and len(value) <= 32 and all(type(part) is int for part in value):
        return f"[{', '.join(map(described, value))}]"
    return f"a {value.kind if type(value) is Record else type(value).__name__}"
