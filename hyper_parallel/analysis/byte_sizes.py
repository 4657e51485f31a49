"""Numbers of bytes as people write them."""

from __future__ import annotations

import math
import re

_MOST = 2.0**63
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def parse_bytes(text: str | int | float) -> int:
    """The number that is meant.

    >>> parse_bytes("80GB"), parse_bytes("1.5 GiB"), parse_bytes(1000)
    (80000000000, 1610612736, 1000)
    """
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        return int(text)
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    size = float(found[1]) * _UNITS.get(found[2].upper(), math.inf) if found is not None else math.inf
    if not size < _MOST:
        raise ValueError(f"{text!r} is not an amount of memory; write it as 80GB (10^9 bytes each) or 80GiB (2^30)")
    return int(size)


def byte_text(num_bytes: float) -> str:
    """In units of a thousand, as device memory is sold.

    >>> byte_text(80_979_166_028), byte_text(512)
    ('80.98 GB', '512 B')
    """
    for unit, name in ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if abs(num_bytes) >= unit:
            return f"{num_bytes / unit:.2f} {name}"
    return f"{num_bytes:.0f} B"
