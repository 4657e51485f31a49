"""What a call depends on besides its arguments, read quickly: tensors, attributes, hooks and children of modules, and
the numbers that their code finds by name.

Note [What is read of a module]
Of each module inside: numbers, flags, names and functions among its attributes (``training``, an activation), what
lists, dicts and plain objects among them hold, as far as these are such values too, its hooks, its children. Of the
code of its forward, and of the functions that this calls by name: numbers, flags, names and functions among the globals
and in closures. What is not read: objects inside of objects, and containers of other things.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator
from typing import Any

from hyper_parallel.platform import get_platform

_platform = get_platform()
SIMPLE = (bool, int, float, str, type(None))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type)
_CONTAINERS = (list, dict, set, tuple)
_CHILDREN = ("_modules", "_cells")
_TABLES = (*_CHILDREN, "_parameters", "_buffers", "_params", "_non_persistent_buffers_set")
_LIBRARIES = ("torch", "mindspore", "hyper_parallel", "numpy", "builtins", "typing", "functools", "math")
_LARGEST, _DEEPEST = 64, 3


class ModuleGuard:
    """What a module and those inside depend on."""

    def __init__(self, module: Any) -> None:
        self.modules = dict(_platform.get_cells_and_names(module))
        self.places: list[tuple[Any, str, str]] = []  # of parameters and buffers, where modules look for them
        self.paths: list[str] = []
        for path, inner in self.modules.items():
            for table, name in _platform.tensor_names(inner):
                self.places.append((inner, table, name))
                self.paths.append(f"{path}.{name}" if path else name)
        reader = _Reader()
        for inner in self.modules.values():
            reader.read_module(inner)
        self.facts = reader.function()  # raises KeyError where an attribute is gone
        self._owners = [id(one) for one in reader.owners]

    def reads_the_same(self, other: ModuleGuard) -> bool:
        """Whether keys that both have made can be compared."""
        return self._owners == other._owners and self.paths == other.paths


class _Reader:
    """Makes one function of all that is to be read: an expression for each value, on the dicts that have them."""

    def __init__(self) -> None:
        self.owners: list[Any] = []
        self._parts: list[str] = []
        self._space: dict[str, Any] = {"held": _held}
        self._seen: set[int] = set()

    def function(self) -> Callable[[], tuple[Any, ...]]:
        exec(f"def read(): return ({' '.join(f'{part},' for part in self._parts)})", self._space)
        made: Callable[[], tuple[Any, ...]] = self._space["read"]
        return made

    def _named(self, table: Any) -> str:
        name = f"d{len(self._space)}"
        self.owners.append(table)  # which keeps it, and so its id
        self._space[name] = table
        return name

    def read_module(self, module: Any) -> None:
        own = vars(module)
        if id(own) in self._seen:
            return
        self._seen.add(id(own))
        name = self._named(own)
        self._parts.append(f"len({name})")
        accounts = _platform.own_attributes()
        for attribute, value in own.items():
            place = f"{name}[{attribute!r}]"
            if "hook" in attribute and (value is None or isinstance(value, dict)):
                if "state_dict" not in attribute and not attribute.endswith(("_kwargs", "_called")):
                    self._parts.append(f"(*{place}.values(),) if {place} else 0")
            elif attribute in _CHILDREN:
                self._parts.append(f"(*{place}.values(),) if {place} else 0")
            elif attribute not in accounts and attribute not in _TABLES:
                self._read_value(place, value)
                if isinstance(value, types.FunctionType) and not _is_of_library(value):
                    self._read_code(value, type(module), 0)
        code = getattr(_platform.get_cell_construct(module), "__func__", None)
        if isinstance(code, types.FunctionType):
            self._read_code(code, type(module), 0)

    def _read_value(self, place: str, value: Any) -> None:
        if isinstance(value, (*SIMPLE, *_FUNCTIONS)):
            self._parts.append(place)
        elif isinstance(value, _CONTAINERS):
            self._parts.append(f"held({place})")
        elif not _is_of_library(type(value)) and isinstance(getattr(value, "__dict__", None), dict):
            self.owners.append(value)  # which keeps it, and so its id
            self._parts.append(f"id({place})")
            self._read_object(value)

    def _read_object(self, value: Any) -> None:
        own = vars(value)
        if id(own) in self._seen or isinstance(value, _platform.Module) or _platform.is_tensor(value):
            return
        self._seen.add(id(own))
        name = self._named(own)
        self._parts.append(f"len({name})")
        for attribute, inner in own.items():
            # `use_cache` is switched around a model's call, which is over when blocks are computed again
            if isinstance(inner, (*SIMPLE, *_CONTAINERS)) and attribute != "use_cache":
                self._read_value(f"{name}[{attribute!r}]", inner)

    # ---------------------------------------------------------------- code

    def _read_code(self, function: types.FunctionType, kind: type, depth: int) -> None:
        """What the code of a function finds by name."""
        if id(function) in self._seen or depth > _DEEPEST:
            return
        self._seen.add(id(function))
        self._read_closure(function)
        space, table = function.__globals__, ""
        for name in dict.fromkeys(_names_in(function.__code__)):
            value = space.get(name)
            method = getattr(kind, name, None)
            if isinstance(method, types.FunctionType) and not _is_of_library(method):
                self._read_code(method, kind, depth + 1)
            if name not in space or not isinstance(value, (*SIMPLE, types.FunctionType)):
                continue
            table = table or self._named(space)
            self._parts.append(f"{table}[{name!r}]")
            if isinstance(value, types.FunctionType) and not _is_of_library(value):
                self._read_code(value, kind, depth + 1)

    def _read_closure(self, function: types.FunctionType) -> None:
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:
                continue
            if isinstance(value, (*SIMPLE, types.FunctionType)):
                self._parts.append(f"{self._named(cell)}.cell_contents")


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names_in(constant)


def _is_of_library(value: Any) -> bool:
    return (getattr(value, "__module__", None) or "builtins").partition(".")[0] in _LIBRARIES


def _held(value: Any) -> Any:
    """What a container holds, where that is few simple values; else that it is something else."""
    kind = type(value)
    if kind not in _CONTAINERS:
        return value if isinstance(value, (*SIMPLE, *_FUNCTIONS)) else kind
    if len(value) > _LARGEST:
        return kind, len(value)
    items = [part for pair in value.items() for part in pair] if kind is dict else value
    return (kind, *(item if isinstance(item, (*SIMPLE, *_FUNCTIONS)) else type(item) for item in items))
