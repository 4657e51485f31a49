"""The shape of a config, read from the annotations of its sections: what lies at a key."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

__all__ = ["Shape"]


class Shape:
    """What a key may hold: a section, a table of any keys, a list, or a plain value."""

    def __init__(self, annotation: Any) -> None:
        self._choices = _choices(annotation)

    @property
    def section(self) -> type[Any] | None:
        """The class of the section that lies here."""
        return next((kind for kind in self._choices if isinstance(kind, type) and is_dataclass(kind)), None)

    @property
    def is_table(self) -> bool:
        """Whether any keys are allowed here."""
        return any(_is_a(kind, Mapping) for kind in self._choices)

    @property
    def names(self) -> list[str]:
        """The keys of the section."""
        return [field.name for field in fields(self.section)] if self.section is not None else []

    def at(self, name: str | int) -> Shape:
        """What lies at a key of this, or at a place of the list; the shape of nothing where there is none."""
        if isinstance(name, int):
            items = [get_args(kind) for kind in self._choices if _is_a(kind, Sequence)]
            return Shape(items[0][0] if items and items[0] else None)
        section: Any = self.section
        return Shape(_hints(section).get(name) if section is not None else None)


def _choices(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Annotated:
        return _choices(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(choice for part in get_args(annotation) for choice in _choices(part))
    return (annotation,)


def _is_a(kind: Any, wanted: type) -> bool:
    origin = get_origin(kind) or kind
    return isinstance(origin, type) and issubclass(origin, wanted) and origin is not str


@cache
def _hints(section: Any) -> dict[str, Any]:
    return get_type_hints(section, include_extras=True)
