"""How many ranks share what: the degrees of a job, and the mesh they make."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

# Outermost first. Data parallelism is what a program of today does by itself: each line along `dp` has other rows, and
# gradients are summed over it after backward. Features to come add their axes here.
AXES = ("dp", "tp")


def read_degrees(degrees: str | Mapping[str, int], world_size: int | None) -> dict[str, int]:
    """Each axis with its number of ranks, outermost first; ranks that no axis names are data parallel.

    >>> read_degrees("tp=8", 32), read_degrees({"tp": 2}, None)
    ({'dp': 4, 'tp': 8}, {'tp': 2})
    """
    given = _parse(degrees) if isinstance(degrees, str) else dict(degrees)
    for axis, degree in given.items():
        if axis not in AXES:
            raise ValueError(f"degrees: {axis!r} is no axis of a dry run; the axes are {' and '.join(AXES)}")
        if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
            raise ValueError(f"degrees: {axis}={degree!r} must be a whole number of ranks, at least 1")
    product = math.prod(given.values())
    if world_size is not None:
        if world_size < 1:
            raise ValueError(f"a world has one rank or more, got {world_size}")
        if "dp" not in given and world_size % product == 0:
            given["dp"] = world_size // product
        elif product != world_size:
            named = " x ".join(f"{axis}={degree}" for axis, degree in given.items()) or "1"
            raise ValueError(f"degrees: {named} makes {product} ranks, and the world has {world_size}")
    sizes = {axis: given[axis] for axis in AXES if given.get(axis, 1) > 1 or axis in given}
    if sizes.get("dp") == 1 and len(sizes) > 1:
        del sizes["dp"]
    return sizes or {"tp": 1}


def _parse(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for part in filter(None, (piece.strip() for piece in re.split(r"[,\s]+", text))):
        name, separator, number = part.partition("=")
        if not separator or not number.isdecimal():
            raise ValueError(f"degrees: {part!r} is not understood; write them as 'dp=4, tp=8'")
        if name in found:
            raise ValueError(f"degrees: {name!r} is given twice")
        found[name] = int(number)
    return found
