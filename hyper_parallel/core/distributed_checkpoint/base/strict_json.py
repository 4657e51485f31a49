"""JSON from files that a stranger may have written: one meaning only, and errors of one kind.

A name that an object has twice, ``NaN`` and the infinities are refused, since readers differ in what they make of them;
so is what is nested too deeply. Digits are limited by Python itself.

A text takes up to ``_GROWTH`` times its bytes of memory as plain data (lists in lists do). A large one is not parsed
where the host has less left: an error, instead of a process that the kernel ends.
"""

from __future__ import annotations

import json
from typing import Any

from hyper_parallel.platform.host.shared_segment import available_memory

_LARGE = 16 << 20  # bytes of a text from which on the memory is looked at first
_GROWTH = 40


def parse_json(text: bytes | str) -> Any:
    """The value of a JSON text; a ValueError if it is none."""
    if len(text) > _LARGE:
        available = available_memory()
        if available is not None and len(text) * _GROWTH > available:
            raise MemoryError(
                f"a JSON text of {len(text)} bytes may take {len(text) * _GROWTH} bytes of memory, and this host has "
                f"{available} left; it is not read"
            )
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
