"""The tensors in what a module gives: in tuples, lists, dicts, dataclasses, and in the attributes of objects."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from types import MemberDescriptorType
from typing import Any

from hyper_parallel.platform import get_platform

_platform = get_platform()
_MOST_LEVELS = 8


def attributes_with_graph(modules: Sequence[Any]) -> list[tuple[Any, str]]:
    """(module, name) of attributes of the modules, and of those inside, with computed tensors: losses on the side."""
    found = []
    for top in modules:
        for _, module in _platform.get_cells_and_names(top):
            for name, value in vars(module).items():
                if name.startswith("_") or _platform.parameter_at(module, name) is not None:
                    continue
                if any(_platform.requires_grad(one) and not _platform.is_leaf(one) for one in tensors_in(value, 3)):
                    found.append((module, name))
    return found


def tensors_in(value: Any, levels: int = _MOST_LEVELS) -> list[Any]:
    """Every tensor that can be found in ``value``, in order."""
    if _platform.is_tensor(value):
        return [value]
    if value is None or isinstance(value, (str, bytes, int, float, complex)) or not levels:
        return []
    if isinstance(value, Mapping):
        inner: Any = value.values()
    elif isinstance(value, (tuple, list, set, frozenset)):
        inner = value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = _held_by(value)
    elif isinstance(value, _platform.Module) or not hasattr(value, "__dict__") or isinstance(value, type):
        return []
    else:
        inner = vars(value).values()
    return [tensor for item in inner for tensor in tensors_in(item, levels - 1)]


def _held_by(value: Any) -> list[Any]:
    """What a dataclass holds, without asking for it: configs of transformers raise for some of their fields."""
    own = getattr(value, "__dict__", {})
    slots = [
        field.name
        for field in dataclasses.fields(value)
        if isinstance(inspect.getattr_static(type(value), field.name, None), MemberDescriptorType)
    ]
    return [*own.values(), *(getattr(value, name, None) for name in slots)]
