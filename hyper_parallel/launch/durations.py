"""Lengths of time as people write them: ``"11h50m"``."""

from __future__ import annotations

import re

__all__ = ["seconds_of"]

_MOST_SECONDS = 3650 * 86400
_SECONDS_OF = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def seconds_of(text: str) -> float:
    """The seconds that a text such as ``"11h50m"``, ``"90s"`` or ``"1d"`` stands for.

    >>> seconds_of("11h50m"), seconds_of("1.5s")
    (42600.0, 1.5)
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)([dhms])", text)
    in_order = [unit for _, unit in parts] == sorted({unit for _, unit in parts}, key="dhms".index)
    if not parts or "".join(number + unit for number, unit in parts) != text.replace(" ", "") or not in_order:
        raise ValueError('a length of time such as "11h50m", "90s" or "1d"')
    seconds = sum(float(number) * _SECONDS_OF[unit] for number, unit in parts)
    if not 0 < seconds <= _MOST_SECONDS:
        raise ValueError(f"a length of time above 0 and of at most {_MOST_SECONDS // 86400} days")
    return seconds
