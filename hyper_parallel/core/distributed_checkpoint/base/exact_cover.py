"""Whether boxes cover a tensor, each element once: in time proportional to their number, however they lie.

Note [A random sum finds every overlap and every hole]
Give each coordinate ``c`` of each dim ``d`` a random number ``f(d, c)``, and a box the product over the dims of
``f(d, end) - f(d, start)``. Cut the tensor at all coordinates into cells: the number of a box is the sum of the numbers
of its cells. So the sum over the boxes less the number of the whole tensor is the sum over the cells of (times covered
- 1) times the cell's number: a polynomial in the random numbers whose degree is the number of dims, and which is zero
only if every cell is covered once. With numbers of 60 random bits, modulo a prime, any other polynomial is zero with a
probability of at most dims / 2^60 (Schwartz, Zippel). Who made the boxes does not know the numbers.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

from hyper_parallel.platform.shared.region import Region, Shape

_PRIME = (1 << 61) - 1
_draw = random.Random()  # not the one that programs seed


def covers_once(boxes: Iterable[Region], shape: Shape) -> bool:
    """Whether every element of a tensor lies in one box, and no box reaches out of it. No box is empty."""
    numbers: list[dict[int, int]] = [{} for _ in shape]

    def product(starts: Iterable[int], ends: Iterable[int]) -> int:
        result = 1
        for drawn, start, end in zip(numbers, starts, ends, strict=True):
            for at in (start, end):
                if at not in drawn:
                    drawn[at] = _draw.getrandbits(60)
            result = result * (drawn[end] - drawn[start]) % _PRIME
        return result

    total = 0
    for offsets, sizes in boxes:
        ends = [at + size for at, size in zip(offsets, sizes, strict=True)]
        if any(at < 0 or end > size for at, end, size in zip(offsets, ends, shape, strict=True)):
            return False
        total += product(offsets, ends)
    return (total - product((0,) * len(shape), shape)) % _PRIME == 0
