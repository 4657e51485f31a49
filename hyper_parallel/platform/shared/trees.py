"""Mapping a function over the leaves of nested containers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any


def map_leaves(fn: Callable[[Any], Any], tree: Any, leaves: tuple[type, ...] = ()) -> Any:
    """A copy of ``tree`` with ``fn`` applied to every leaf.

    Dicts, lists, tuples, named tuples, sets and dataclass instances are containers and keep their class; everything
    else, ``None`` and the types ``leaves`` included, is a leaf.
    """
    if isinstance(tree, dict):
        if type(tree) is dict:
            return {key: map_leaves(fn, value, leaves) for key, value in tree.items()}
        mapped = copy.copy(tree)  # keeps what a subclass carries besides its items, a default factory for instance
        for key, value in tree.items():
            mapped[key] = map_leaves(fn, value, leaves)
        return mapped
    if isinstance(tree, leaves):
        return fn(tree)
    if isinstance(tree, (list, tuple, set, frozenset)):
        values = [map_leaves(fn, value, leaves) for value in tree]
        make = getattr(tree, "_make", type(tree))
        return make(values)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        changed = copy.copy(tree)
        for field in dataclasses.fields(tree):
            # Also right for frozen classes and for fields that __init__ does not take, where `replace` is not.
            object.__setattr__(changed, field.name, map_leaves(fn, getattr(tree, field.name), leaves))
        return changed
    return fn(tree)
