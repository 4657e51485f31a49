"""Where to cut a row of blocks so that the dearest stage is as cheap as can be."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

__all__ = ["balanced_counts"]


def balanced_counts(costs: Sequence[float], num_stages: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """The number of blocks of each stage; ``first`` and ``last`` are what comes before and behind the blocks.

    The largest cost of a stage is the least that there is, and among equals the costs are as even as can be.

    >>> balanced_counts([1, 1, 1, 1, 1, 1], 3)
    (2, 2, 2)
    >>> balanced_counts([1, 1, 1, 1, 1, 1], 3, last=2)  # a head that is worth two blocks
    (3, 2, 1)
    """
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    num_blocks = len(costs)

    @cache
    def best(begin: int, stages: int) -> tuple[float, float, tuple[int, ...]]:
        """The largest cost, the sum of squares and the counts of the blocks from ``begin`` on."""
        ends = [num_blocks] if stages == 1 else range(begin + 1, num_blocks - stages + 2)
        found = []
        for end in ends:
            cost = sums[end] - sums[begin] + (first if begin == 0 else 0.0) + (last if stages == 1 else 0.0)
            rest = best(end, stages - 1) if stages > 1 else (0.0, 0.0, ())
            found.append((max(cost, rest[0]), cost * cost + rest[1], (end - begin, *rest[2])))
        # Of splits that are equally good, the one with more blocks on early stages.
        return min(found, key=lambda one: (one[0], one[1], tuple(-count for count in one[2])))

    return best(0, num_stages)[2]
