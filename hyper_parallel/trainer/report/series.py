"""Curves as a page carries them: few points, of which none that stands out is missing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

__all__ = ["MOST_POINTS", "curve", "downsampled"]

MOST_POINTS = 2000


def downsampled(
    steps: Sequence[int], values: Sequence[float], most: int = MOST_POINTS
) -> tuple[list[int], list[float]]:
    """At most ``most`` of the points: the least and the greatest of each stretch, the first and the last.

    >>> downsampled(range(10), [0, 1, 9, 1, 1, 1, -5, 1, 1, 2], most=6)
    ([0, 2, 6, 9], [0, 9, -5, 2])
    """
    count = len(steps)
    if count <= most:
        return list(steps), list(values)
    num_stretches = (most - 2) // 2
    kept = {0, count - 1}
    for number in range(num_stretches):
        places = range(number * count // num_stretches, (number + 1) * count // num_stretches)
        finite = [place for place in places if math.isfinite(values[place])] or list(places)
        kept |= {min(finite, key=lambda place: values[place]), max(finite, key=lambda place: values[place])}
    return [steps[place] for place in sorted(kept)], [values[place] for place in sorted(kept)]


def curve(
    name: str, steps: Sequence[int], values: Sequence[float], colour: int, *, dots: bool = False, dashed: bool = False
) -> dict[str, Any]:
    """A curve as data: how far each step is from the one before, and values of six digits."""
    steps, values = downsampled(steps, values)
    moves = [step - before for before, step in zip([0, *steps], steps, strict=False)]
    rounded = [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
    return {"name": name, "colour": colour, "dots": dots, "dashed": dashed, "dx": moves, "y": rounded}
