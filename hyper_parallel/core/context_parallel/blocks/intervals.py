"""Stretches of tokens that lie side by side."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

Interval = tuple[int, int]  # indices from, up to but not including


def cut_interval(interval: Interval, points: Sequence[int], largest: int) -> list[Interval]:
    """The interval cut at these points, and at multiples of ``largest`` where it is longer.

    >>> cut_interval((2, 9), [5, 20], 4)
    [(2, 4), (4, 5), (5, 8), (8, 9)]
    """
    start, stop = interval
    inside = {point for point in points if start < point < stop}
    if stop - start > largest:
        inside |= set(range(start - start % largest + largest, stop, largest))
    edges = [start, *sorted(inside), stop]
    return [(low, high) for low, high in itertools.pairwise(edges) if low < high]
