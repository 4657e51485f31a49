"""Paths of modules and parameters in plans: wildcards, what they match, and what was meant when they match nothing."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping
from typing import Any


def match_paths(paths: Iterable[str], plan: Mapping[str, Any], where: str, kind: str) -> dict[str, tuple[str, Any]]:
    """For each path that a pattern of ``plan`` matches, that pattern and its value, in the order of the paths.

    ``*`` stands for any one name, ``**`` for any number of names, ``""`` for the root. A pattern without wildcards goes
    before those with. A pattern that matches nothing, or two of a kind that match the same, are a ValueError; ``where``
    and ``kind`` (``"module"``, ``"parameter"``) are for its text.
    """
    paths = list(paths)
    chosen: dict[str, tuple[str, Any]] = {}
    for pattern, value in plan.items():
        if not isinstance(pattern, str):
            raise TypeError(f"{where}: the plan's keys are paths of {kind}s, got {pattern!r}")
        matched = [path for path in paths if _matches(path, pattern)]
        if not matched:
            raise ValueError(f"{where}: no {kind} matches the path {pattern!r}; {_near_misses(pattern, paths)}")
        for path in matched:
            other = chosen[path][0] if path in chosen else None
            if other is not None and is_wildcard(other) == is_wildcard(pattern):
                raise ValueError(
                    f"{where}: the {kind} {path!r} matches {other!r} and {pattern!r} of the plan; make one of them "
                    "narrower"
                )
            if other is None or not is_wildcard(pattern):
                chosen[path] = (pattern, value)
    return {path: chosen[path] for path in paths if path in chosen}


def is_wildcard(pattern: str) -> bool:
    """Whether a pattern can match several paths."""
    return any(sign in pattern for sign in "*?[")


def _matches(path: str, pattern: str) -> bool:
    return _names_match(path.split(".") if path else [], pattern.split(".") if pattern else [])


def _names_match(names: list[str], patterns: list[str]) -> bool:
    if not patterns:
        return not names
    if patterns[0] == "**":
        return any(_names_match(names[start:], patterns[1:]) for start in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatchcase(names[0], patterns[0]) and _names_match(names[1:], patterns[1:])


def _near_misses(pattern: str, known: Iterable[str]) -> str:
    """What the user may have meant: similar paths, and how far the pattern leads."""
    paths = [path for path in known if path]
    if not paths:
        return "the module has none inside"
    close = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.5)
    last = pattern.rsplit(".", 1)[-1]
    close += [path for path in paths if path not in close and path.rsplit(".", 1)[-1] == last][: 3 - len(close)]
    names = pattern.split(".")
    reached = 0
    while reached < len(names) and any(_matches(path, ".".join(names[: reached + 1])) for path in paths):
        reached += 1
    start = ".".join(names[:reached])
    inside = sorted({path.split(".")[reached] for path in paths if _leads_through(path, names[:reached])})
    text = f"did you mean {' or '.join(map(repr, close))}? " if close else ""
    where = f"{start!r} has" if start else "the module has"
    return f"{text}{where} {', '.join(inside[:12]) or 'nothing'}{', ...' if len(inside) > 12 else ''} inside"


def _leads_through(path: str, patterns: list[str]) -> bool:
    names = path.split(".")
    return len(names) > len(patterns) and _names_match(names[: len(patterns)], patterns)
