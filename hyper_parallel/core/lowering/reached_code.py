"""The code that the forwards of modules reach by name: methods, functions of the program, what closures hold.

Note [What is reached]
From the forward of each module, and from functions among the attributes: the functions, classes, objects and Python
modules of the program that the code names among its globals, what closures and partial functions hold, and of each
class that was met (of a module, of an object) the methods that any of this code names, or that syntax calls
(``__call__``, ``__getitem__``). Names are followed until no new ones come; those of installed packages for a few calls
only, without the objects that they find there: all of a library can be reached from a logger.
"""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from hyper_parallel.platform import get_platform

_platform = get_platform()
_LIBRARIES = ("torch", "mindspore", "hyper_parallel", "numpy", "builtins", "typing", "functools", "math")
_HOLDERS = ("types", "argparse", "_thread", "collections")  # Python's own kinds of objects that programs fill
_BY_SYNTAX = (
    *("forward", "construct", "__call__", "__getitem__", "__getattr__", "__len__", "__iter__", "__contains__"),
    *("__bool__", "__enter__", "__exit__", "__next__", "backward", "setup_context"),
)
_FEW = 8  # items of a container that are looked at
_DEEPEST = 3  # calls in installed packages


class ReachedCode:
    """Functions of the program, with the names in each; all names; classes, with the attributes that they define."""

    def __init__(self, modules: Iterable[Any]) -> None:
        self.modules = list(modules)
        self.functions: dict[int, tuple[types.FunctionType, list[str]]] = {}
        self.names: dict[str, None] = dict.fromkeys(_BY_SYNTAX)  # in order
        self.kinds: dict[type, dict[str, Any]] = {}
        self._spaces: dict[int, tuple[int, dict[str, Any]]] = {}  # of objects and Python modules; how deep they are
        self._seen: dict[int, Any] = {}
        self._coming: deque[tuple[int, Any]] = deque()
        for module in self.modules:
            self._reach_kind(type(module))
            self._coming += [(0, _platform.get_cell_construct(module)), *[(0, one) for one in vars(module).values()]]
        known = -1
        while known != len(self.names) + len(self.kinds) + len(self._spaces):
            known = len(self.names) + len(self.kinds) + len(self._spaces)
            while self._coming:
                self._reach(*self._coming.popleft())
            for depth, space in (*self._spaces.values(), *((0, one) for one in self.kinds.values())):
                self._coming += [(depth, space[name]) for name in space if name in self.names]

    def _reach(self, depth: int, value: Any) -> None:
        if id(value) in self._seen or isinstance(value, (int, float, str, type(None), _platform.Module)):
            return
        self._seen[id(value)] = value  # which keeps it, and so its id
        depth = depth + 1 if is_installed(value) else 0
        if depth > _DEEPEST:
            return
        if isinstance(value, type):
            if not depth:
                self._reach_kind(value)
        elif isinstance(value, types.ModuleType):
            if is_of_program(value):
                self._spaces[id(value)] = depth, vars(value)
        elif isinstance(value, types.FunctionType):
            if is_of_program(value):
                self._reach_function(depth, value)
        else:
            self._coming += [(depth, one) for one in _inside_of(value)]
            if is_looked_into(value) and not depth:
                self._reach_kind(type(value))
                self._spaces[id(value)] = depth, getattr(value, "__dict__", {})

    def _reach_function(self, depth: int, function: types.FunctionType) -> None:
        names = list(dict.fromkeys((function.__name__, *_names_in(function.__code__))))
        self.functions[id(function)] = (function, names)
        self.names.update(dict.fromkeys(names))
        self._coming += [(depth, function.__globals__[name]) for name in names if name in function.__globals__]
        for cell in function.__closure__ or ():
            try:
                self._coming.append((depth, cell.cell_contents))
            except ValueError:  # an empty one
                continue

    def _reach_kind(self, kind: type) -> None:
        for one in kind.__mro__:
            if one not in self.kinds and is_of_program(one):
                self.kinds[one] = dict(vars(one))


def is_of_program(value: Any) -> bool:
    """Whether a function or a Python module belongs to neither such a library nor to Python's own."""
    home = _home(value)
    return home not in _LIBRARIES and home not in sys.stdlib_module_names


def is_looked_into(value: Any) -> bool:
    """Whether a value is an object whose attributes a program sets."""
    kind = type(value)
    return is_of_program(kind) or _home(kind) in _HOLDERS


def is_installed(value: Any) -> bool:
    """Whether a function, a class, a Python module, or the class of an object is of an installed package."""
    is_code = isinstance(value, (type, types.FunctionType, types.ModuleType))
    return _is_installed(_home(value if is_code else type(value)))


@functools.cache
def _is_installed(home: str) -> bool:
    file = getattr(sys.modules.get(home), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def _home(value: Any) -> str:
    name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    return (name if isinstance(name, str) else "builtins").partition(".")[0]


def _inside_of(value: Any) -> tuple[Any, ...]:
    """The functions and values that a callable is made of."""
    if isinstance(value, property):
        return value.fget, value.fset
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, (staticmethod, classmethod)):
        return (value.__func__,)
    if isinstance(value, (list, tuple, dict)) and len(value) <= _FEW:
        return tuple(value.values() if isinstance(value, dict) else value)
    return ()


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)
