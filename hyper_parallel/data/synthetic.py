"""Tokens out of nothing, for benchmarks: each a function of its place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hyper_parallel.data.dataset import Dataset, fingerprint_of
from hyper_parallel.data.sample import Sample
from hyper_parallel.data.shuffle import mix

__all__ = ["Synthetic"]


class Synthetic(Dataset):
    """Samples of uniform tokens, of which nothing can be learned; one document each."""

    is_packed = False

    def __init__(self, *, num_samples: int, length: int, vocab_size: int) -> None:
        if min(num_samples, length, vocab_size) < 1:
            raise ValueError(
                f"synthetic: num_samples={num_samples}, length={length}, vocab_size={vocab_size} must be at least 1"
            )
        self.num_samples, self.length, self.vocab_size = num_samples, length, vocab_size
        self.fingerprint = fingerprint_of("synthetic", num_samples, length, vocab_size)

    def sample(self, number: int) -> Sample:
        start = self._checked(number) * (self.length + 1)
        words = mix(mix(np.arange(start, start + self.length + 1, dtype=np.uint64)))
        return Sample.of_tokens(words % np.uint64(self.vocab_size))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return " ".join(map(str, np.asarray(ids).tolist()))

    def describe(self) -> str:
        return f"synthetic: {self.num_samples:,} samples of {self.length} tokens, vocabulary {self.vocab_size:,}"
