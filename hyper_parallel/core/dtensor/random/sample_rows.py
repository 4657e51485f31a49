"""Which samples of the global batch a tensor holds, and which of its elements belong to which sample.

Note [Which tensors have samples]
A micro-batch holds `count` samples. Of a tensor only its shape is known (of a DTensor its global shape), so a rule says
whether its dim `dim` (0 unless said otherwise) runs over the samples:

* It does if its size is a multiple of `count`. With k times `count` rows each sample has k rows one behind the other:
  tokens that were flattened, patches, heads folded into the batch. (count, k, ...) and (count * k, ...) get equal bits.
* A tensor without dims or of shape (1,) has no samples, also where `count` is 1: one number that decides for all
  samples, as stochastic depth over the batch draws it. One dim of k times `count` elements, k > 1, has none either:
  one number per head or feature. A draw *per sample* of shape (count,) has samples from two on; where micro-batches of
  a single sample occur, draw (count, 1).
* All others have none: they are drawn alike in every micro-batch and on every rank.

What the rule cannot know: a tensor of two or more dims whose dim 0 has another meaning and happens to be a multiple of
`count`, noise of shape (sequence, features) for instance; every dim 0 is a multiple of 1. It is drawn by address as
well, equal on all ranks that hold the same rows, but its numbers depend on `count`: draw it under
:func:`~.sample_address.without_samples`. Where *activations* have their samples in another dim, as in a model that
computes on (sequence, batch, features), say so: `SampleRows(first, count, dim=1)`.

Note [Tokens in another order]
Where tokens do not lie in the order of their sequence, the element of a token has the index that it would have there.
Of a tensor with samples these dims run over the n tokens: dim 0 with n rows for each sample (flattened), the last two
of four if both have n entries (weights of attention), else the first behind the samples that has n. Where another dim
has n entries by chance, it is drawn in that order: other numbers than on one device, but random ones.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

SAMPLE_STRIDE = 2**40
"""Indices that each sample has for its elements."""

_MAX_SAMPLES = 2**23


@dataclass(frozen=True)
class SampleRows:
    """The samples `first` to `first + count - 1` of the global batch, which dim `dim` of a micro-batch holds in order.

    `total`, the number of samples in the global batch, is only looked at to find mistakes. `runs_along` tells of a
    sample that stands in where there is none, and does not count. `tokens[place]` is the index in the sequence of the
    token that lies at `place`, where that is not `place`; see Note [Tokens in another order].
    """

    first: int
    count: int
    total: int | None = None
    dim: int = 0
    runs_along: bool = False
    tokens: np.ndarray | None = field(default=None, compare=False, repr=False)

    def rows_per_sample(self, shape: tuple[int, ...]) -> int | None:
        """How many rows of a tensor of this (global) shape belong to a sample; None if it has no samples."""
        if len(shape) <= self.dim or not self.count or not shape[self.dim] or shape[self.dim] % self.count:
            return None
        if len(shape) == 1 and (shape[0] == 1 or shape[0] != self.count):
            return None
        return shape[self.dim] // self.count

    def places_of_tokens(self, shape: tuple[int, ...]) -> dict[int, np.ndarray]:
        """For each dim of a tensor with samples that runs over tokens, the indices that its entries would have in the
        order of the sequence; none where they have them."""
        if self.tokens is None:
            return {}
        num_tokens = len(self.tokens)
        if shape[0] == self.count * num_tokens:
            samples = np.arange(self.count)[:, None] * num_tokens
            return {0: (samples + self.tokens).reshape(-1)}
        if len(shape) == 4 and shape[2] == shape[3] == num_tokens:
            return {2: self.tokens, 3: self.tokens}
        behind = shape[1:]
        return {1 + behind.index(num_tokens): self.tokens} if num_tokens in behind else {}


def checked_rows(rows: Any) -> SampleRows:
    """`rows`, or a tuple of its numbers, if such a micro-batch can exist."""
    try:
        given = rows if isinstance(rows, SampleRows) else SampleRows(*rows)
        numbers = [operator.index(number) for number in (given.first, given.count, given.dim)]
        total = None if given.total is None else operator.index(given.total)
    except TypeError:
        raise TypeError(
            f"draws_by_sample: rows must be SampleRows(first, count), whole numbers, got {rows!r}"
        ) from None
    end = numbers[0] + numbers[1]
    if min(numbers) < 0 or end > _MAX_SAMPLES or (total is not None and end > total):
        of_total = "" if total is None else f" of a batch of {total}"
        raise ValueError(
            f"draws_by_sample: rows {numbers[0]} to {end - 1}{of_total} in dim {numbers[2]} are none: first, count and "
            f"dim cannot be negative, nor first + count more than the batch or {_MAX_SAMPLES}"
        )
    return replace(given, first=numbers[0], count=numbers[1], total=total, dim=numbers[2])
