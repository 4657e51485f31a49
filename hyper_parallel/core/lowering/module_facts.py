"""What a call depends on besides its arguments, read quickly: tensors, attributes, hooks and children of modules, and
the numbers that their code finds by name.

Note [What is read of a module]
Of each module inside: numbers, flags, names and functions among its attributes (``training``, an activation), what
lists, dicts and plain objects among them hold (``held_values.py``), its hooks, its children. Of the code of its
forward, and of the functions and classes that it reaches by name (``reached_code.py``): the same among the globals, in
closures, in classes and in the program's other modules, as far as the code names it. What is not read: default
arguments, containers of many values, and what a program computes names for.

Note [What changes when it is used]
An iterator gives another value each time; nothing can be compared that tells which. Where the code names one, the
module is not recorded.
"""

from __future__ import annotations

import contextvars
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hyper_parallel.core.lowering.held_values import FUNCTIONS, Holdings
from hyper_parallel.core.lowering.reached_code import ReachedCode, is_looked_into, is_of_program
from hyper_parallel.platform import get_platform

_platform = get_platform()
SIMPLE = (bool, int, float, str, type(None))
_CHILDREN = ("_modules", "_cells")
_TABLES = (*_CHILDREN, "_parameters", "_buffers", "_params", "_non_persistent_buffers_set")


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
        inside = [*self.modules.values(), *_platform.values_at(self.places)]
        reader = _Reader(ReachedCode(self.modules.values()), inside)
        self.facts = reader.function("fact")  # raises KeyError where an attribute is gone
        self.contents = reader.function("content")
        self.obstacle = reader.obstacle  # to recording
        self._owners = reader.owners  # kept, and so their ids

    def reads_the_same(self, other: ModuleGuard) -> bool:
        """Whether keys that both have made can be compared."""
        return [*map(id, self._owners)] == [*map(id, other._owners)] and self.paths == other.paths


class _Reader:
    """Makes one function of all that is to be read: an expression for each value, on the dicts that have them."""

    def __init__(self, code: ReachedCode, inside: Iterable[Any]) -> None:
        self.owners: list[Any] = []
        self.obstacle: str | None = None
        self._names = code.names
        self._facts: dict[str, None] = {}  # in order
        self._contents: dict[str, None] = {}
        self._holdings = Holdings(inside)
        self._space: dict[str, Any] = {"fact": self._holdings.fact, "content": self._holdings.content}
        self._tables: dict[int, str] = {}
        self._seen: set[int] = set()
        for module in code.modules:
            self._read_module(module)
        for function, names in code.functions.values():
            self._read_named(function.__globals__, names)
            for cell in function.__closure__ or ():
                try:
                    self._read_value(f"{self._named(cell)}.cell_contents", cell.cell_contents, "of a closure")
                except ValueError:  # an empty one
                    continue
        for kind in code.kinds:
            place = f"{self._named(kind)}.__dict__"
            self._facts[f"len({place})"] = None
            for name in vars(kind):
                if name in self._names:
                    self._read_value(f"{place}[{name!r}]", vars(kind)[name], name)

    def function(self, what: str) -> Callable[[], tuple[Any, ...]]:
        parts = self._facts if what == "fact" else self._contents
        exec(f"def read(): return ({' '.join(f'{part},' for part in parts)})", self._space)
        made: Callable[[], tuple[Any, ...]] = self._space["read"]
        return made

    def _named(self, table: Any) -> str:
        if id(table) not in self._tables:
            name = self._tables[id(table)] = f"d{len(self._space)}"
            self.owners.append(table)
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
        self._facts[f"len({name})"] = None
        read_elsewhere = {*_platform.own_attributes(), *_TABLES, *(one for _, one in _platform.tensor_names(module))}
        for attribute, value in own.items():
            place = f"{name}[{attribute!r}]"
            if "hook" in attribute and (value is None or isinstance(value, dict)):
                if "state_dict" not in attribute and not attribute.endswith(("_kwargs", "_called")):
                    self._facts[f"(*{place}.values(),) if {place} else 0"] = None
            elif attribute in _CHILDREN:
                self._facts[f"(*{place}.values(),) if {place} else 0"] = None
            elif attribute not in read_elsewhere:
                self._read_value(place, value, attribute)

    def _read_value(self, place: str, value: Any, name: str) -> None:
        kind = type(value)
        if kind in (bool, int, type(None)):
            self._facts |= {f"{place}.__class__": None, place: None}  # the class first: 1 is True, and some tensors
        elif kind is str or isinstance(value, FUNCTIONS):
            self._facts[place] = None
        elif isinstance(value, types.ModuleType):
            if is_of_program(value) and self._is_new(vars(value)):
                self._read_named(vars(value), self._names)
        elif isinstance(value, contextvars.ContextVar):
            self._read_value(f"{place}.get(None)", value.get(None), name)
        elif isinstance(value, Iterator) and name in self._names:
            self.obstacle = (
                f"forward may use {name}, a {kind.__name__}, which gives another value each time: pass the value"
            )
        else:
            self._contents[f"content({place})"] = None
            for inner in self._holdings.objects_in(value):
                if name in self._names or isinstance(inner, _platform.Module) or is_looked_into(inner):
                    self._read_object(inner)
            is_kept = any(one is value for one in self.owners)
            self._facts[f"id({place})" if is_kept else f"fact({place})"] = None

    def _read_object(self, value: Any) -> None:
        if not self._is_new(value):
            return
        self.owners.append(value)
        self._holdings.know(value)
        if isinstance(value, _platform.Module) or not is_looked_into(value):
            return  # those inside of the lowered one are read, others have parameters that are refused
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            name = self._named(own)
            self._facts[f"len({name})"] = None
            for attribute, inner in own.items():
                # `use_cache` is switched around a model's call, which is over when blocks are computed again
                if attribute != "use_cache" and (
                    isinstance(inner, (*SIMPLE, list, dict, set, tuple)) or attribute in self._names
                ):
                    self._read_value(f"{name}[{attribute!r}]", inner, attribute)
        for attribute in _slots_of(type(value)):
            place = f"getattr({self._named(value)}, {attribute!r}, None)"
            self._read_value(place, getattr(value, attribute, None), attribute)

    def _read_named(self, table: dict[str, Any], names: Iterable[str]) -> None:
        for name in names:
            if name in table:
                self._read_value(f"{self._named(table)}[{name!r}]", table[name], name)


def _slots_of(kind: type) -> Iterator[str]:
    for one in kind.__mro__:
        for name, value in vars(one).items():
            if isinstance(value, types.MemberDescriptorType):
                yield name
