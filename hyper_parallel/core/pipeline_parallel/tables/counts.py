"""How many ranks, stages and microbatches a schedule takes; what to write when it does not take them."""

from __future__ import annotations

from collections.abc import Callable

_FARTHEST = 100_000


def demand_counts(schedule: str, **counts: int) -> None:
    """Refuse numbers below 1."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{schedule}: {name.replace('_', ' ')} is {count}; give at least 1")


def demand_microbatches(schedule: str, microbatches: int, allowed: Callable[[int], bool], why: str) -> None:
    """Refuse a number of microbatches, with the nearest ones that work.

    >>> demand_microbatches("even", 3, lambda count: count % 2 == 0, "they go in pairs")
    Traceback (most recent call last):
    ValueError: even: 3 microbatches do not work, they go in pairs; give 2 or 4
    """
    if allowed(microbatches):
        return
    below = next((count for count in range(microbatches - 1, 0, -1) if allowed(count)), None)
    above = next(count for count in range(microbatches + 1, _FARTHEST) if allowed(count))
    nearest = " or ".join(str(count) for count in (below, above) if count is not None)
    raise ValueError(f"{schedule}: {microbatches} microbatches do not work, {why}; give {nearest}")
