"""Values as TOML."""

from __future__ import annotations

import datetime
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["key_text", "value_text"]


def value_text(value: Any) -> str:
    """A value as TOML writes it on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        inner = ", ".join(f"{key_text(name)} = {value_text(one)}" for name, one in value.items())
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, Sequence):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    return repr(value)


def key_text(name: str) -> str:
    """A key as TOML writes it: in quotes where it must be."""
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else value_text(name)
