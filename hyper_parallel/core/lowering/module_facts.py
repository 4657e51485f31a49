"""What a call depends on besides its arguments, read quickly: tensors, attributes, hooks and children of modules, and
the numbers that their code finds by name.

Note [What is read of a module]
Of each module inside: numbers, flags, names and functions among its attributes (``training``, an activation), what
lists, dicts and plain objects among them hold, as far as these are such values too, its hooks, its children. Of the
code of its forward, and of the functions that it reaches by name (``reached_code.py``): the same among the globals, in
closures, in classes and in the program's other modules, as far as the code names it. What is not read: containers of
other things, and what a program computes names for.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any

from hyper_parallel.core.lowering.reached_code import ReachedCode, class_with, is_of_library, is_of_program
from hyper_parallel.platform import get_platform

_platform = get_platform()
SIMPLE = (bool, int, float, str, type(None))
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, functools.partial)
_IN_CLASSES = (property, staticmethod, classmethod)
_CONTAINERS = (list, dict, set, tuple)
_CHILDREN = ("_modules", "_cells")
_TABLES = (*_CHILDREN, "_parameters", "_buffers", "_params", "_non_persistent_buffers_set")
_LARGEST = 64


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
        reader = _Reader(ReachedCode(self.modules.values()))
        self.facts = reader.function()  # raises KeyError where an attribute is gone
        self._owners = [id(one) for one in reader.owners]

    def reads_the_same(self, other: ModuleGuard) -> bool:
        """Whether keys that both have made can be compared."""
        return self._owners == other._owners and self.paths == other.paths


class _Reader:
    """Makes one function of all that is to be read: an expression for each value, on the dicts that have them."""

    def __init__(self, code: ReachedCode) -> None:
        self.owners: list[Any] = []
        self._names = code.names
        self._parts: list[str] = []
        self._space: dict[str, Any] = {"held": _held}
        self._tables: dict[int, str] = {}
        self._seen: set[int] = set()
        for module in code.modules:
            self._read_module(module)
        for function, kind, names in code.functions:
            self._read_function(function, kind, names)

    def function(self) -> Callable[[], tuple[Any, ...]]:
        exec(f"def read(): return ({' '.join(f'{part},' for part in dict.fromkeys(self._parts))})", self._space)
        made: Callable[[], tuple[Any, ...]] = self._space["read"]
        return made

    def _named(self, table: Any) -> str:
        if id(table) not in self._tables:
            name = self._tables[id(table)] = f"d{len(self._space)}"
            self.owners.append(table)  # which keeps it, and so its id
            self._space[name] = table
        return self._tables[id(table)]

    def _is_new(self, table: Any) -> bool:
        if id(table) in self._seen:
            return False
        self._seen.add(id(table))
        return True

    def _read_module(self, module: Any) -> None:
        own = vars(module)
        if not self._is_new(own):
            return
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

    def _read_value(self, place: str, value: Any) -> None:
        if isinstance(value, (*SIMPLE, *_FUNCTIONS)):
            self._parts.append(place)
            if isinstance(value, type) and not is_of_library(value):
                self._read_class(value)
        elif isinstance(value, _CONTAINERS):
            self._parts.append(f"held({place})")
        elif isinstance(value, types.ModuleType):
            if is_of_program(value) and self._is_new(vars(value)):
                self._read_named(vars(value), self._names)
        elif isinstance(value, _platform.Module) or _platform.is_tensor(value):
            return  # those inside of the lowered one are read, others are refused
        elif not is_of_library(type(value)) and isinstance(getattr(value, "__dict__", None), dict):
            self.owners.append(value)
            self._parts.append(f"id({place})")
            self._read_object(value)

    def _read_object(self, value: Any) -> None:
        own = vars(value)
        if not self._is_new(own):
            return
        name = self._named(own)
        self._parts.append(f"len({name})")
        for attribute, inner in own.items():
            # `use_cache` is switched around a model's call, which is over when blocks are computed again
            if attribute != "use_cache" and (isinstance(inner, (*SIMPLE, *_CONTAINERS)) or attribute in self._names):
                self._read_value(f"{name}[{attribute!r}]", inner)
        self._read_class(type(value))

    # ---------------------------------------------------------------- code

    def _read_function(self, function: types.FunctionType, kind: type, names: list[str]) -> None:
        """What the code of a function finds by name, ``kind`` being the class that it is a method of."""
        self._read_named(function.__globals__, names)
        self._read_class(kind)
        for cell in function.__closure__ or ():
            try:
                self._read_value(f"{self._named(cell)}.cell_contents", cell.cell_contents)
            except ValueError:  # an empty one
                continue

    def _read_named(self, table: Mapping[str, Any], names: Any) -> None:
        for name in names:
            if name in table:
                self._read_value(f"{self._named(table)}[{name!r}]", table[name])

    def _read_class(self, kind: type) -> None:
        """Of a class what the code names, where it or the one that it has it from is the program's own."""
        if not self._is_new(kind):
            return
        for name in self._names:
            holder = class_with(kind, name)
            if holder is not None:
                place, value = f"{self._named(holder)}.__dict__[{name!r}]", vars(holder)[name]
                if isinstance(value, _IN_CLASSES):
                    self._parts.append(place)
                else:
                    self._read_value(place, value)


def _held(value: Any) -> Any:
    """What a container holds, where that is few simple values; else that it is something else."""
    kind = type(value)
    if kind not in _CONTAINERS:
        return value if isinstance(value, (*SIMPLE, *_FUNCTIONS)) else kind
    if len(value) > _LARGEST:
        return kind, len(value)
    items = [part for pair in value.items() for part in pair] if kind is dict else value
    return (kind, *(item if isinstance(item, (*SIMPLE, *_FUNCTIONS)) else type(item) for item in items))
