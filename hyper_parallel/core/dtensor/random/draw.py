"""The name of one random tensor."""

from __future__ import annotations

from typing import NamedTuple

from hyper_parallel.core.dtensor.random.sample_rows import SampleRows


class Draw(NamedTuple):
    """The seed, and which tensor since the seed was set; both in [0, 2**64).

    With `rows` the elements of each sample have indices of their own; see `sample_rows.py`.
    """

    seed: int
    number: int
    rows: SampleRows | None = None
