"""Mistakes of a config as people can use them: ``file:line: key: what is allowed, got what, did you mean``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import ValidationError

from hyper_parallel.trainer.config.section import Problem, Section
from hyper_parallel.trainer.config.shape import Shape
from hyper_parallel.trainer.config.toml_layers import Key
from hyper_parallel.trainer.config.toml_text import key_text, value_text

__all__ = ["ConfigError", "Mistake", "dotted", "finding_of", "mistakes_of"]

_MOST_SHOWN = 60  # characters of a wrong value
# What pydantic finds, and what is allowed instead; its context fills in the numbers.
_ALLOWED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text in quotes",
    "string_too_short": "a text that is not empty",
    "greater_than": "above {gt:g}",
    "greater_than_equal": "at least {ge:g}",
    "less_than": "below {lt:g}",
    "less_than_equal": "at most {le:g}",
    "literal_error": "{expected}",
    "tuple_type": "a list",
    "list_type": "a list",
    "too_long": "a list of at most {max_length}",
    "too_short": "a list of at least {min_length}",
    "dict_type": "a table",
    "none_required": "",
    "allowed": "{allowed}",
}


@dataclass(frozen=True)
class Mistake:
    """One thing that is wrong: where it was written, at which key, and what."""

    where: str
    key: str
    what: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.where, self.key, self.what)))


class ConfigError(ValueError):
    """A config with mistakes: all of them, in the order of where they are."""

    def __init__(self, mistakes: Sequence[Mistake]) -> None:
        super().__init__("\n".join(map(str, mistakes)))
        self.mistakes = list(mistakes)


@dataclass(frozen=True)
class Finding:
    """A mistake before it has a place: its key, what, and the keys that make it one."""

    key: Key
    what: str
    concerns: frozenset[Key]
    meant: Key | None = None  # the key that was probably meant


def dotted(key: Key) -> str:
    """("data", "sources", 1, "path") as people write it: data.sources[1].path."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{key_text(part)}" for part in key)
    return text.removeprefix(".")


def mistakes_of(error: ValidationError, kind: type[Section]) -> list[Finding]:
    """What pydantic found, one finding for each key; the choices of a union are one."""
    by_key: dict[Key, list[Any]] = {}
    found: list[Finding] = []
    for one in error.errors(include_url=False):
        key = _key_of(one["loc"], Shape(kind))
        if one["type"] == "problems":
            for problem in one["ctx"]["problems"]:
                found.append(finding_of(problem, key))
        else:
            by_key.setdefault(key, []).append(one)
    for key, errors in by_key.items():
        found.append(_unknown(key, kind) or _finding(key, errors, kind))
    return found


def finding_of(problem: Problem, at: Key = ()) -> Finding:
    """A problem of the section at a key."""
    keys: list[Key] = [(*at, *name.split(".")) for name in problem.keys]
    return Finding(keys[0], problem.what, frozenset(keys))


def _finding(key: Key, errors: Sequence[Mapping[str, Any]], kind: type[Section]) -> Finding:
    first = errors[0]
    if first["type"] == "missing":
        section = _at(kind, key)
        what = f"is missing: {_describe(section)}" if section is not None else "is missing"
        return Finding(key, what, frozenset([key]))
    given = first["input"]
    if any(error["type"] in ("dataclass_type", "dataclass_exact_type", "dict_type") for error in errors):
        what = f"must be a table, [{dotted(key)}], got {_shown(given)}"
        return Finding(key, what, frozenset([key]))
    if first["type"] == "value_error":
        return Finding(key, str(first["ctx"]["error"]), frozenset([key]))
    allowed = list(dict.fromkeys(filter(None, (_allowed(error) for error in errors))))
    near = _near_literal(given, errors)
    return Finding(key, f"must be {' or '.join(allowed)}, got {_shown(given)}{near}", frozenset([key]))


def _allowed(error: Mapping[str, Any]) -> str:
    template = _ALLOWED.get(error["type"])
    if template is None:
        return str(error["msg"]).removeprefix("Input should be ")
    return template.format(**error.get("ctx", {}))


def _near_literal(given: Any, errors: Sequence[Mapping[str, Any]]) -> str:
    expected = [error["ctx"]["expected"] for error in errors if error["type"] == "literal_error"]
    names = [part for text in expected for part in text.split("'")[1::2]]
    near = difflib.get_close_matches(given.lower(), names, 1) if isinstance(given, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""


def _unknown(key: Key, kind: type[Section]) -> Finding | None:
    """The finding for a key that does not exist; None if it does."""
    shape = Shape(kind)
    for part in key[:-1]:
        shape = shape.at(part)
    if shape.section is None or key[-1] in shape.names:
        return None
    name = str(key[-1])
    near = difflib.get_close_matches(name, shape.names, 1, cutoff=0.7)
    meant = (*key[:-1], near[0]) if near else _meant_elsewhere(name, kind)
    if meant is not None:
        hint = f"did you mean {(meant[-1] if near else dotted(meant))!r}?"
    else:
        here = f"of [{dotted(key[:-1])}]" if len(key) > 1 else "of a config"
        hint = f"the keys {here} are {', '.join(shape.names)}"
    return Finding(key, f"no such key; {hint}", frozenset([key]), meant)


def _meant_elsewhere(name: str, kind: Any) -> Key | None:
    """The first key of another section that is called so, or nearly so."""
    names = list(dict.fromkeys(str(key[-1]) for key in _all_keys(kind)))
    found = [name] if name in names else difflib.get_close_matches(name, names, 1, cutoff=0.8)
    return next((key for key in _all_keys(kind) if key[-1] in found), None)


@cache
def _all_keys(kind: Any, at: Key = ()) -> tuple[Key, ...]:
    found: list[Key] = []
    for name in Shape(kind).names:
        found.append((*at, name))
        inner: Any = Shape(kind).at(name).section
        if inner is not None and len(at) < 2:
            found += _all_keys(inner, (*at, name))
    return tuple(found)


def _key_of(location: Sequence[str | int], shape: Shape) -> Key:
    """The key in the config; pydantic adds the names of a union's choices."""
    key: list[str | int] = []
    for part in location:
        if shape.section is not None or isinstance(part, int) or shape.is_table:
            key.append(part)
            shape = shape.at(part)
    return tuple(key)


def _at(kind: type[Section], key: Key) -> type[Section] | None:
    shape = Shape(kind)
    for part in key:
        shape = shape.at(part)
    return shape.section


def _describe(section: type[Section]) -> str:
    return (section.__doc__ or "").strip().splitlines()[0]


def _shown(value: Any) -> str:
    text = value_text(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[: _MOST_SHOWN - 3]}..."
