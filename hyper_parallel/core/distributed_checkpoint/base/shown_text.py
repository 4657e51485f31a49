"""Names and values of a checkpoint in messages: on one line, of bounded length, and without power over a terminal."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from typing import Any

_MOST = 200  # characters of a name

_REPR = reprlib.Repr()
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = 10
_REPR.maxstring = _REPR.maxother = 60


def shown(text: str) -> str:
    """A text from a file as it can be printed: what is not printable (line breaks, escapes, marks that turn the
    direction of writing) is spelled out, and a long one is cut.

    >>> shown("layer\\n.weight")
    'layer\\\\n.weight'
    """
    if len(text) > _MOST:
        text = f"{text[:_MOST]}..."
    return text if text.isprintable() else "".join(map(_spelled, text))


def spelled_out(text: str) -> str:
    """The same at any length."""
    return text if text.isprintable() else "".join(map(_spelled, text))


def shown_value(value: Any) -> str:
    """A value of plain data, cut to a few items of each list."""
    return _REPR.repr(value)


def listed(names: Iterable[str], most: int = 20) -> str:
    """Names in a row, and how many more there are."""
    names = list(names)
    text = ", ".join(f"'{shown(name)}'" for name in names[:most])
    return f"{text} and {len(names) - most} more" if len(names) > most else text


def _spelled(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()
