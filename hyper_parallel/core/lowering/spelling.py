"""How functions and constants are written in a recorded program: numbers as they are, all else by a name."""

from __future__ import annotations

import enum
import keyword
import math
import re
from typing import Any

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh
from hyper_parallel.core.dtensor.layout import Layout

_AS_THEY_ARE = (type(None), bool, int, str, bytes, type(Ellipsis))


class Ref:
    """A tensor of the program, by its name."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


class Spelling:
    """The names of everything that a program's text refers to, and what they stand for."""

    def __init__(self) -> None:
        self.constants: dict[str, Any] = {}
        self._name_of: dict[int, str] = {}
        self._stems: dict[str, int] = {}

    def function(self, function: Any) -> str:
        """The name of a function; the same function has the same."""
        return self._named(function, _stem(function))

    def text(self, value: Any) -> str:
        """An argument as Python writes it."""
        if isinstance(value, Ref):
            return value.name
        kind = type(value)
        if kind in _AS_THEY_ARE:
            return repr(value)
        if kind is float:
            return repr(value) if math.isfinite(value) else f'float("{value}")'
        if kind is tuple:
            items = [self.text(item) for item in value]
            return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
        if kind is list:
            return f"[{', '.join(self.text(item) for item in value)}]"
        if kind is dict:
            return f"{{{', '.join(f'{self.text(name)}: {self.text(item)}' for name, item in value.items())}}}"
        if kind is slice:
            return f"slice({self.text(value.start)}, {self.text(value.stop)}, {self.text(value.step)})"
        return self._named(value, _stem(value))

    def legend(self) -> list[str]:
        """What the names of layouts and groups stand for."""
        return [
            f"# {name}: {value}" for name, value in self.constants.items() if isinstance(value, (Layout, DeviceMesh))
        ]

    def fresh(self, stem: str) -> str:
        """A name that nothing else has."""
        stem = re.sub(r"\W", "_", stem) or "value"
        if stem[0].isdigit() or keyword.iskeyword(stem):
            stem = f"_{stem}"
        number = self._stems.get(stem, 0)
        self._stems[stem] = number + 1
        name = stem if not number else f"{stem}_{number}"
        return self.fresh(stem) if number and name in self._stems else name

    def _named(self, value: Any, stem: str) -> str:
        name = self._name_of.get(id(value))
        if name is None:
            name = self._name_of[id(value)] = self.fresh(stem)
            self.constants[name] = value  # which keeps it, and so its id
        return name


def _stem(value: Any) -> str:
    if isinstance(value, Layout):
        return "layout"
    if isinstance(value, enum.Enum):
        return value.name
    owner = getattr(value, "__self__", None)
    name = getattr(value, "__name__", None)
    if name in ("apply", "__get__", "__set__") and owner is not None:
        name = getattr(owner, "__name__", name)  # an autograd function, or an attribute of tensors
    if isinstance(name, str):
        return name.strip("_") or "function"
    text = str(value) if len(str(value)) < 24 else type(value).__name__  # torch.float32, cpu
    return text.rpartition(".")[2]
