"""Layers laid over each other: the topmost value of each key counts, and says where it is from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hyper_parallel.trainer.config.section import Section
from hyper_parallel.trainer.config.shape import Shape
from hyper_parallel.trainer.config.toml_layers import Key, Layer

__all__ = ["merge"]


def merge(layers: Sequence[Layer], kind: type[Section]) -> tuple[dict[str, Any], dict[Key, str]]:
    """All values, and where each was written. Tables are merged; everything else is replaced."""
    values: dict[str, Any] = {}
    places: dict[Key, str] = {}
    for layer in layers:
        _lay_over(values, places, layer.values, (), Shape(kind))
        places |= layer.places
    return values, places


def _lay_over(values: dict[str, Any], places: dict[Key, str], given: Mapping[str, Any], at: Key, shape: Shape) -> None:
    section = shape.section
    if section is not None and issubclass(section, Section):
        chosen = any(name in given for name in section.ALTERNATIVES)
        others = [name for name in section.ALTERNATIVES if chosen and name not in given and name in values]
        for name in [*others, *(section.WITH_ALTERNATIVE if others else ())]:
            values.pop(name, None)
    for name, value in given.items():
        if isinstance(value, Mapping):
            if not isinstance(values.get(name), dict):
                values[name] = {}
                places.pop((*at, name), None)
            _lay_over(values[name], places, value, (*at, name), shape.at(name))
        else:
            values[name] = value
