"""Packing: a partition of the rows, no bin too full, exactly what first-fit-decreasing says, the same every time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.data import first_fit_decreasing

only_on = "torch"  # imports no framework: once is enough


def _by_the_book(lengths, capacity):
    """First-fit-decreasing, row by row."""
    bins: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        for members in bins:
            if sum(lengths[member] for member in members) + lengths[row] <= capacity:
                members.append(row)
                break
        else:
            bins.append([row])
    return [sorted(members) for members in bins]


@given(st.lists(st.integers(1, 30), max_size=80), st.integers(30, 64))
@settings(deadline=None, max_examples=150)
def test_bins_are_those_of_the_book(lengths, capacity):
    rows, ends = first_fit_decreasing(lengths, capacity)
    got = [members.tolist() for members in np.split(rows, ends[:-1])] if lengths else []
    assert got == _by_the_book(lengths, capacity)
    assert sorted(rows.tolist()) == list(range(len(lengths)))


def test_many_rows_are_packed_tightly():
    lengths = np.minimum(np.random.default_rng(0).lognormal(5.5, 1, 50_000).astype(int) + 1, 4096)
    _, ends = first_fit_decreasing(lengths, 4096)
    assert lengths.sum() / (4096 * len(ends)) > 0.995


def test_a_row_that_fits_nowhere_is_an_error():
    with pytest.raises(ValueError, match="lengths are 2 to 9, but must be from 1 to 8"):
        first_fit_decreasing([2, 9], 8)
    with pytest.raises(ValueError, match="lengths are 0 to 2"):
        first_fit_decreasing([2, 0], 8)
