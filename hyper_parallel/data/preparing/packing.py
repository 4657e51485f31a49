"""Which rows lie together in one row of a batch: decided once, for all ranks and for every number of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["first_fit_decreasing"]


def first_fit_decreasing(lengths: Sequence[int] | np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows packed into bins: the longest first, each into the first bin that has room. (rows, ends of the bins in it)

    Rows of one length are placed together: how many of them a bin takes is a division, so the work is one pass over
    the bins for each length that occurs. The same lengths give the same bins, always.

    >>> rows, ends = first_fit_decreasing([2, 5, 3, 1], capacity=5)
    >>> [bin.tolist() for bin in np.split(rows, ends[:-1])]
    [[1], [0, 2], [3]]
    """
    sizes = np.asarray(lengths, np.int64)
    if sizes.size and (sizes.min() < 1 or sizes.max() > capacity):
        raise ValueError(f"packing: lengths are {sizes.min()} to {sizes.max()}, but must be from 1 to {capacity}")
    rows = np.argsort(-sizes, kind="stable")
    bin_of = np.empty(len(sizes), np.int64)
    open_bins, room = np.zeros(0, np.int64), np.zeros(0, np.int64)
    smallest = int(sizes.min()) if sizes.size else 1
    num_bins = done = 0
    for size, count in zip(*(part[::-1].tolist() for part in np.unique(sizes, return_counts=True)), strict=True):
        fits = room // size
        taken = np.minimum(fits, np.maximum(0, count - (np.cumsum(fits) - fits)))
        left = count - int(taken.sum())
        num_new = -(-left // (capacity // size))
        new = np.full(num_new, capacity // size, np.int64)
        if num_new:
            new[-1] = left - (num_new - 1) * (capacity // size)
        open_bins = np.concatenate([open_bins, np.arange(num_bins, num_bins + num_new)])
        room = np.concatenate([room, np.full(num_new, capacity)])
        taken = np.concatenate([taken, new])
        room -= taken * size
        bin_of[rows[done : done + count]] = np.repeat(open_bins, taken)
        num_bins, done = num_bins + num_new, done + count
        still_open = room >= smallest
        open_bins, room = open_bins[still_open], room[still_open]
    rows = np.argsort(bin_of, kind="stable")
    return rows, np.cumsum(np.bincount(bin_of, minlength=num_bins))
