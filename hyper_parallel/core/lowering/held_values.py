"""What a value is to a guard: itself where it cannot change, what it holds where it is a container, else which it is.

Note [Two readings]
A *fact* is read at every call and is part of the key: quick, and without the tensors that a program keeps, which are
others every time. What a call does to these, and to generators of random numbers, shows in the *contents*, read before
and behind a call that is recorded: they keep what they have seen, so that nothing else takes its place in memory.
"""

from __future__ import annotations

import enum
import functools
import random
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from hyper_parallel.core.lowering.tape import Identity
from hyper_parallel.platform import get_platform

_platform = get_platform()
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type, property, staticmethod, classmethod)
_AS_THEY_ARE = (bool, int, str, type(None), bytes, range, types.MethodType, *FUNCTIONS)
_BY_VALUE = (float, complex, enum.Enum, np.ndarray, np.generic)
_CONTAINERS = (list, dict, set, frozenset, tuple, deque)
_LARGEST = 256
_DEEPEST = 4


class Holdings:
    """Facts and contents of values; ``inside``: modules and tensors of the lowered module."""

    def __init__(self, inside: Iterable[Any]) -> None:
        self._known = {id(one) for one in inside if one is not None}

    def know(self, value: Any) -> None:
        """``value`` is kept elsewhere: its id tells which object it is."""
        self._known.add(id(value))

    def fact(self, value: Any, depth: int = 0) -> Any:
        """What is compared at every call."""
        kind = type(value)
        if kind is float:
            return kind, value or repr(value)  # 0.0 is -0.0
        if kind in _AS_THEY_ARE or isinstance(value, enum.Enum):
            return kind, value  # 1 is True
        parts = _parts_of(value)
        if parts is not None:
            return (kind, len(parts), *[self.fact(part, depth + 1) for part in parts if depth < _DEEPEST])
        if isinstance(value, (np.ndarray, np.generic)):
            return value.dtype, value.shape, value.tobytes()
        if kind is complex or _platform.is_framework_constant(value):
            return kind, value
        return id(value) if id(value) in self._known else kind

    def content(self, value: Any, depth: int = 0) -> Any:
        """What is compared with itself behind a call."""
        parts = _parts_of(value)
        if parts is not None:
            return [self.content(part, depth + 1) for part in parts if depth < _DEEPEST]
        if isinstance(value, random.Random):
            return value.getstate()
        if isinstance(value, (np.random.Generator, np.random.RandomState)):
            return repr((value if isinstance(value, np.random.RandomState) else value.bit_generator).__getstate__())
        if isinstance(value, _BY_VALUE):
            return self.fact(value)
        return Identity(value)

    def objects_in(self, value: Any, depth: int = 0) -> Iterator[Any]:
        """The objects that a value is or holds: neither tensors nor what :meth:`fact` tells by itself."""
        if isinstance(value, types.MethodType):
            value = value.__self__
        parts = _parts_of(value)
        for part in parts or () if depth < _DEEPEST else ():
            yield from self.objects_in(part, depth + 1)
        if parts is not None or isinstance(value, (*_AS_THEY_ARE, *_BY_VALUE)):
            return
        if not _platform.is_tensor(value) and not _platform.is_framework_constant(value):
            yield value


def _parts_of(value: Any) -> list[Any] | None:
    """What a container holds, where that is not too much; None for all else."""
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    if not isinstance(value, _CONTAINERS):
        return None
    if len(value) > _LARGEST:
        return [len(value)]
    return [part for pair in value.items() for part in pair] if isinstance(value, dict) else list(value)
