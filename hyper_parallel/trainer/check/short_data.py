"""The data of a run with fewer token ids and shorter samples: the same samples in the same order."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hyper_parallel.data.dataset import Dataset
from hyper_parallel.data.sample import IGNORED, Sample

__all__ = ["ShortData"]


class ShortData(Dataset):
    """Each sample's first ``length`` tokens, their ids folded into ``vocab_size``; what is not trained stays so."""

    def __init__(self, data: Dataset, length: int, vocab_size: int | None) -> None:
        self._data = data
        self.num_samples, self.is_packed = data.num_samples, data.is_packed
        self.vocab_size = min(data.vocab_size, vocab_size or data.vocab_size)
        self.length = min(data.length, length)
        self.fingerprint = data.fingerprint
        self.pad_to = None if data.pad_to is None else min(data.pad_to, length)

    def sample(self, number: int) -> Sample:
        given, end = self._data.sample(number), self.length
        labels = given.labels[:end]
        return Sample(
            given.input_ids[:end] % self.vocab_size,
            np.where(labels == IGNORED, IGNORED, labels % self.vocab_size),
            None if given.position_ids is None else given.position_ids[:end],
        )

    def describe(self) -> str:
        return f"{self._data.describe()}, the first {self.length} tokens of each sample"

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return " ".join(map(str, np.asarray(ids).tolist()))
