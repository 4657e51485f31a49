"""The code that the forwards of modules reach by name: methods, functions of the program, what closures hold."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from hyper_parallel.platform import get_platform

_platform = get_platform()
_LIBRARIES = ("torch", "mindspore", "hyper_parallel", "numpy", "builtins", "typing", "functools", "math")
_DEEPEST = 3


class ReachedCode:
    """Functions of the program, each with the class that it is a method of and the names in its code; all names."""

    def __init__(self, modules: Iterable[Any]) -> None:
        self.modules = list(modules)
        self.functions: list[tuple[types.FunctionType, type, list[str]]] = []
        self.names: dict[str, None] = {}  # in order
        self._seen: set[tuple[int, type]] = set()
        for module in self.modules:
            kind = type(module)
            for value in (_platform.get_cell_construct(module), *vars(module).values()):
                self._reach(value, kind, 0)

    def _reach(self, value: Any, kind: type, depth: int) -> None:
        function = _function_of(value)
        if function is None or depth > _DEEPEST or (id(function), kind) in self._seen or not is_of_program(function):
            return
        self._seen.add((id(function), kind))
        names = list(dict.fromkeys((function.__name__, *_names_in(function.__code__))))
        self.functions.append((function, kind, names))
        self.names.update(dict.fromkeys(names))
        for name in names:
            found = function.__globals__.get(name)
            self._reach(found, kind, depth + 1)
            holder = class_with(kind, name)
            if holder is not None:
                self._reach(vars(holder)[name], kind, depth + 1)
            if isinstance(found, types.ModuleType) and is_of_program(found):
                for inner in names:
                    self._reach(vars(found).get(inner), kind, depth + 1)
        for cell in function.__closure__ or ():
            try:
                self._reach(cell.cell_contents, kind, depth + 1)
            except ValueError:  # an empty one
                continue


def class_with(kind: type, name: str) -> type | None:
    """The class that an attribute of ``kind`` comes from; None where there is none, or one of a library."""
    holder = next((one for one in kind.__mro__ if name in vars(one)), None)
    return holder if holder is not None and is_of_program(holder) else None


def is_of_library(value: Any) -> bool:
    """Whether a function or a class is of a library whose globals are not a program's business."""
    return _home(value) in _LIBRARIES


def is_of_program(value: Any) -> bool:
    """Whether a function or a Python module belongs to neither such a library nor to Python's own."""
    home = _home(value)
    return home not in _LIBRARIES and home not in sys.stdlib_module_names


def _home(value: Any) -> str:
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return (name or "builtins").partition(".")[0]


def _function_of(value: Any) -> types.FunctionType | None:
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, functools.partial):
        value = value.func
    elif isinstance(value, (staticmethod, classmethod, types.MethodType)):
        value = value.__func__
    return value if isinstance(value, types.FunctionType) else None


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
