"""The layers that a config is made of, each with where its values were written: files, the lowest first, and --set.

Note [Lines of keys]
tomllib gives values without lines. A file that it has read is therefore cut into statements, where a line ends outside
of strings and brackets; each is read alone, and the keys of that little document are on that line. So quoted keys and
the kinds of values need no grammar of ours.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyper_parallel.trainer.config.reading import read_text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["EXTENDS", "Key", "Layer", "TomlProblem", "file_layers", "given_layer", "option_layer"]

EXTENDS = "extends"
Key = tuple[str | int, ...]
_DEEPEST = 32
_TOO_DEEP = f"has tables or lists in each other, more than {_DEEPEST} deep, which no config has"
# Strings, comments, and what opens, closes and ends a statement, in a file that is TOML.
_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}|' r"'''.*?'{3,5}|" r'"(?:\\.|[^"\\])*"|' r"'[^']*'|" r"#[^\n]*|[\[\]{}\n]", re.DOTALL
)


class TomlProblem(ValueError):
    """A layer that cannot be read: where, which key (or ""), what is wrong."""

    def __init__(self, where: str, key: str, what: str) -> None:
        super().__init__(f"{where}: {key + ': ' if key else ''}{what}")
        self.where, self.key, self.what = where, key, what


@dataclass
class Layer:
    """Values, and where each of them was written."""

    where: str  # of what is nowhere in `places`
    values: dict[str, Any]
    places: dict[Key, str] = field(default_factory=dict)


def file_layers(path: Path, below: Sequence[Path] = ()) -> list[Layer]:
    """The layers of a file: those of the file that it extends, and its own."""
    try:
        text = read_text(path)
    except FileNotFoundError:
        raise TomlProblem(str(path), "", "there is no such file") from None
    except ValueError as error:
        raise TomlProblem(str(path), "", f"cannot be read: {error}") from None
    try:
        values = tomllib.loads(text)
    except RecursionError:
        raise TomlProblem(str(path), "", _TOO_DEEP) from None
    except ValueError as error:  # TOMLDecodeError is one, and so is a number of thousands of digits
        found = re.search(r"^(.*) \(at (?:line (\d+), column \d+|end of document)\)$", str(error), re.DOTALL)
        line = (found[2] if found else None) or len(text.splitlines())
        what = f"is not TOML: {found[1] if found else error}"
        if "Invalid value" in str(error):
            what += '; texts are in quotes, as in name = "llama-8b"'
        raise TomlProblem(f"{path}:{line}", "", what) from None
    if _is_too_deep(values):
        raise TomlProblem(str(path), "", _TOO_DEEP)
    places = {key: f"{path}:{line}" for key, line in _lines(text).items()}
    parent = values.pop(EXTENDS, None)
    own = Layer(str(path), values, places)
    if parent is None:
        return [own]
    where = places.get((EXTENDS,), str(path))
    if not isinstance(parent, str):
        raise TomlProblem(where, EXTENDS, f"must be the path of one file, got {parent!r}")
    target = path.parent / parent
    line = [*below, path]
    if not os.path.isfile(target):
        raise TomlProblem(where, EXTENDS, f"there is no file {str(target)!r}; the path is relative to {path.name}")
    if target.resolve() in [file.resolve() for file in line]:
        round_trip = " extends ".join(str(file) for file in [*line, target])
        raise TomlProblem(where, EXTENDS, f"goes in a circle: {round_trip}")
    if len(line) > _DEEPEST:
        raise TomlProblem(where, EXTENDS, f"is the end of a line of more than {_DEEPEST} files that extend each other")
    return [*file_layers(target, line), own]


def given_layer(text: str, where: str = "--set") -> Layer:
    """The layer of ``a.b=c``; ``c`` is a value of TOML, or a text without quotes."""
    name, equals, value_text = text.partition("=")
    parts = name.strip().split(".")
    if not equals or not all(re.fullmatch(r"[\w-]+", part) for part in parts):
        raise TomlProblem(where, "", f"must be of the form section.key=value, got {text!r}")
    if not text.isascii() and text.encode(errors="replace").decode() != text:
        raise TomlProblem(where, "", f"must be UTF-8, got {text!r}")
    if len(parts) > _DEEPEST:
        raise TomlProblem(where, "", _TOO_DEEP)
    try:
        read = tomllib.loads(f"value = {value_text}")
        value = read["value"] if set(read) == {"value"} else value_text
    except (ValueError, RecursionError):
        value = value_text
    layer = _nested(parts, value, where)
    if _is_too_deep(layer.values):
        raise TomlProblem(where, "", _TOO_DEEP)
    return layer


def option_layer(key: str, value: Any, where: str) -> Layer:
    """The layer of a command line option that stands for one key."""
    return _nested(key.split("."), value, where)


def _nested(parts: Sequence[str], value: Any, where: str) -> Layer:
    values = value
    for part in reversed(parts):
        values = {part: values}
    return Layer(where, values, {key: where for key, _ in _keys(values) if len(key) >= len(parts)})


def _keys(values: Mapping[str, Any]) -> Iterator[tuple[Key, Any]]:
    """Every key at every depth, arrays of tables by number."""
    for name, value in values.items():
        yield (name,), value
        if isinstance(value, Mapping):
            yield from (((name, *key), inner) for key, inner in _keys(value))
        elif isinstance(value, list):
            for number, item in enumerate(value):
                if isinstance(item, Mapping):
                    yield (name, number), item
                    yield from (((name, number, *key), inner) for key, inner in _keys(item))


def _is_too_deep(values: Any) -> bool:
    level = [values]
    for _ in range(_DEEPEST):
        level = [inner for one in level for inner in (one.values() if isinstance(one, dict) else one)]
        level = [inner for inner in level if isinstance(inner, (dict, list))]
    return bool(level)


def _lines(text: str) -> dict[Key, int]:
    """The line of each key. See Note [Lines of keys]."""
    found: dict[Key, int] = {}
    num_items: dict[Key, int] = {}
    table: Key = ()
    for line, statement in _statements(text):
        is_header = statement.lstrip().startswith("[")
        if is_header:
            table = ()
        for key, value in _keys(tomllib.loads(statement)):
            if is_header and isinstance(key[-1], int):
                continue
            if is_header:
                table = (*table, key[-1])
                if isinstance(value, list):  # [[table]]: one more of them
                    num_items[table] = num_items.get(table, -1) + 1
                    found.setdefault(table, line)
                if table in num_items:
                    table = (*table, num_items[table])
                found.setdefault(table, line)
            else:
                found.setdefault((*table, *key), line)
        if is_header:
            found[table] = line
    return found


def _statements(text: str) -> Iterator[tuple[int, str]]:
    """Each statement of a text that is TOML, with the number of its first line."""
    start, line, depth = 0, 1, 0
    for token in _TOKEN.finditer(f"{text}\n"):
        if token[0] in "[{":
            depth += 1
        elif token[0] in "]}":
            depth -= 1
        elif token[0] == "\n" and not depth:
            yield line, text[start : token.start()]
            line += text.count("\n", start, token.end())
            start = token.end()
