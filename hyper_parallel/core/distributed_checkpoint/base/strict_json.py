"""JSON from files that a stranger may have written: one meaning only, and errors of one kind.

A name that an object has twice, ``NaN`` and the infinities are refused, since readers differ in what they make of them;
so is what is nested too deeply. Digits are limited by Python itself.
"""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: bytes | str) -> Any:
    """The value of a JSON text; a ValueError if it is none."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twin = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise ValueError(f"{twin[:100]!r} is named twice")
    return found


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")
