"""A config as a file that says where each value is from; the file is a config again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from hyper_parallel.trainer.config.loading import LoadedConfig
from hyper_parallel.trainer.config.toml_layers import Key
from hyper_parallel.trainer.config.toml_text import key_text, value_text

__all__ = ["resolved_toml"]

_WIDTH = 44  # of a value, before the comment about it


def resolved_toml(loaded: LoadedConfig) -> str:
    """Every value of a config with its origin as a comment: the line of a file, an option, or "default"."""
    return "\n".join(_tables(loaded.config, (), loaded.places)).lstrip("\n") + "\n"


def _tables(section: Any, at: Key, places: Any) -> Iterator[str]:
    lines, tables = [], []
    for field in fields(section):
        key, value = (*at, field.name), getattr(section, field.name)
        origin = places.get(key, "default")
        if is_dataclass(value):
            tables.append(_tables(value, key, places))
        elif isinstance(value, dict):
            inner = [_line((*key, name), one, places.get((*key, name), origin)) for name, one in value.items()]
            if inner:
                tables.append(iter(["", f"[{_name(key)}]", *inner]))
        elif value is None:
            lines.append(f"# {field.name} is not set")
        else:
            lines.append(_line(key, value, origin))
    if at:
        yield from ("", f"[{_name(at)}]")
    yield from lines
    for table in tables:
        yield from table


def _line(key: Key, value: Any, origin: str) -> str:
    return f"{key_text(str(key[-1]))} = {value_text(_plain(value))}".ljust(_WIDTH) + f"  # {origin}"


def _plain(value: Any) -> Any:
    """Sections in lists become tables on one line."""
    if is_dataclass(value) and not isinstance(value, type):
        found = {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
        return {name: one for name, one in found.items() if one is not None}
    return [_plain(one) for one in value] if isinstance(value, tuple | list) else value


def _name(key: Key) -> str:
    return ".".join(key_text(str(part)) for part in key)
