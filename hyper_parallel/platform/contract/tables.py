"""Filling a platform's table of methods by name from the files that define them, its *rooms*."""

from __future__ import annotations

from abc import update_abstractmethods
from collections.abc import Callable
from types import MethodType, ModuleType
from typing import Any, TypeVar

Table = TypeVar("Table", bound=type)


def takes_from(*rooms: ModuleType) -> Callable[[Table], Table]:
    """A class decorator: each method of the contract is the function of that name which one of ``rooms`` defines.

    What the class itself defines stays. A name that two rooms define is an error, and a method that none defines stays
    abstract, so that the class cannot be instantiated.
    """

    def fill(table: Table) -> Table:
        for name in _contract_of(table):
            homes = [room for room in rooms if _defines(room, name)]
            if len(homes) > 1:
                raise TypeError(f"{table.__name__}.{name} is defined by {' and by '.join(r.__name__ for r in homes)}")
            if homes:
                setattr(table, name, staticmethod(getattr(homes[0], name)))
        update_abstractmethods(table)
        return table

    return fill


def _contract_of(table: type) -> list[str]:
    """The methods that the classes behind ``table`` name and that it does not define itself."""
    names: dict[str, Any] = {}
    for base in table.__mro__[1:]:
        names |= {name: value for name, value in vars(base).items() if not name.startswith("__")}
    return [name for name, value in names.items() if name not in vars(table) and _is_method(value)]


def _is_method(value: Any) -> bool:
    return isinstance(value, (staticmethod, classmethod)) or callable(value)


def _defines(room: ModuleType, name: str) -> bool:
    """Whether a module makes what it has under this name, a function or an object's method, and does not import it."""
    value = vars(room).get(name)
    if not callable(value):
        return False
    is_own = getattr(value, "__module__", None) == room.__name__ or isinstance(value, MethodType)
    return is_own or name in getattr(room, "__all__", ())
