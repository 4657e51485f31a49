"""A permutation of range(n) that is asked place by place: no table, no memory, whatever n is.

Note [Walked until inside]
A Feistel network permutes the numbers of 2k bits: it cuts a number into halves and lets each half change the other by a
function that need not be invertible. For a range that is no such power of two, a result outside is put in again until
it falls inside. That walk stays on one cycle of the network's permutation, so no two numbers meet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["mix", "shuffled"]

_ROUNDS = 6
_GOLDEN = 0x9E3779B97F4A7C15  # splitmix64's step, 2**64 over the golden ratio
_WORD = (1 << 64) - 1


def mix(words: Any) -> Any:
    """Each 64-bit word turned into one that looks unrelated (the end of splitmix64, a bijection)."""
    with np.errstate(over="ignore"):
        words = np.asarray(words, np.uint64)
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return words ^ (words >> np.uint64(31))


def shuffled(places: Sequence[int] | np.ndarray, num: int, seed: int) -> np.ndarray:
    """What stands at each of ``places`` in a permutation of ``range(num)`` that depends on ``seed`` only.

    >>> sorted(shuffled(range(5), 5, seed=1).tolist())
    [0, 1, 2, 3, 4]
    """
    found = np.array(places, np.int64)
    if found.size and (found.min() < 0 or found.max() >= num):
        raise ValueError(f"shuffled: places {found.min()} to {found.max()} are not all in range({num})")
    values = found.astype(np.uint64)
    half = max(1, ((num - 1).bit_length() + 1) // 2)
    low, shift = np.uint64((1 << half) - 1), np.uint64(half)
    first = int(mix(np.uint64(seed & _WORD)))
    keys = [mix(np.uint64((first + turn * _GOLDEN) & _WORD)) for turn in range(1, _ROUNDS + 1)]
    outside = np.arange(values.size)
    with np.errstate(over="ignore"):
        while outside.size:
            left, right = values[outside] >> shift, values[outside] & low
            for key in keys:
                left, right = right, left ^ (mix(right + key) & low)
            values[outside] = (left << shift) | right
            outside = outside[values[outside] >= np.uint64(num)]
    return values.astype(np.int64)
