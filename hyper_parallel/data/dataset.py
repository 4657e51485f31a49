"""What all data has: samples by number, batches of them, and a fingerprint that tells whether it is the same data."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from hyper_parallel.data.batch import Batch, collate
from hyper_parallel.data.order import Order
from hyper_parallel.data.sample import Sample
from hyper_parallel.data.shuffle import shuffled

__all__ = ["Dataset", "Subset", "fingerprint_of"]


class Dataset(ABC):
    """Samples by number, the same on every rank and in every process.

    ``length`` is the most tokens of a sample, ``is_packed`` whether a sample can hold several documents that must not
    see each other (their ``position_ids`` restart), ``pad_to`` the length that batches are filled up to (None: their
    longest sample), ``fingerprint`` a text that differs when the samples do.
    """

    num_samples: int
    vocab_size: int
    length: int
    is_packed: bool
    fingerprint: str
    pad_to: int | None = None

    @abstractmethod
    def sample(self, number: int) -> Sample:
        """A sample by its number."""

    @abstractmethod
    def describe(self) -> str:
        """What this is, for a person."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of token ids."""

    def samples(self, numbers: Sequence[int] | np.ndarray) -> list[Sample]:
        """Several samples by their numbers."""
        return [self.sample(int(number)) for number in numbers]

    def collate(self, numbers: Sequence[int] | np.ndarray) -> Batch:
        """The batch of these samples; of no samples, arrays with no rows."""
        samples = self.samples(numbers)
        length = self.pad_to or (None if samples else self.length)
        return collate(samples, length=length, packed=self.is_packed)

    def order(self, *, batch: int, seed: int, position: int = 0, epochs: int | None = None) -> Order:
        """The order in which a run goes through these samples."""
        return Order(
            self.num_samples, batch=batch, seed=seed, position=position, epochs=epochs, fingerprint=self.fingerprint
        )

    def require_vocabulary(self, num: int) -> None:
        """Check that a model with ``num`` token ids knows all of the data's."""
        if self.vocab_size > num:
            raise ValueError(
                f"the data has {self.vocab_size} token ids, but the model only {num}; give the tokenizer that belongs "
                f"to the model, or a model with vocab_size={self.vocab_size}"
            )

    def __len__(self) -> int:
        return self.num_samples

    def _checked(self, number: int) -> int:
        if not 0 <= number < self.num_samples:
            raise IndexError(f"sample {number} of data that has {self.num_samples}: 0 to {self.num_samples - 1}")
        return number

    def _check_vocabulary(self, tokens: np.ndarray, where: str) -> np.ndarray:
        if tokens.size and int(tokens.max()) >= self.vocab_size:
            place = int(np.argmax(tokens >= self.vocab_size))
            raise ValueError(
                f"{where}: token {place} has the id {int(tokens[place])}, but the vocabulary has {self.vocab_size}; "
                "the data was made with another tokenizer, or vocab_size is too small"
            )
        return tokens


class Subset(Dataset):
    """Samples ``start`` to ``stop`` of a fixed shuffle of others: a split that no seed of a run changes."""

    def __init__(self, data: Dataset, start: int, stop: int, name: str) -> None:
        if stop <= start:
            raise ValueError(
                f"the {name} part of {data.num_samples} samples is empty; change the share for validation, or give "
                "more data"
            )
        self.data = data
        self.num_samples = stop - start
        self.vocab_size, self.length = data.vocab_size, data.length
        self.is_packed, self.pad_to = data.is_packed, data.pad_to
        self.fingerprint = fingerprint_of(data.fingerprint, start, stop)
        self._start = start
        self._name = name

    def sample(self, number: int) -> Sample:
        return self.samples([number])[0]

    def samples(self, numbers: Sequence[int] | np.ndarray) -> list[Sample]:
        places = np.array([self._start + self._checked(int(number)) for number in numbers], np.int64)
        return self.data.samples(shuffled(places, self.data.num_samples, seed=0))

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self.data.decode(ids)

    def describe(self) -> str:
        return f"{self.data.describe()}; of these {self.num_samples} for {self._name}"


def fingerprint_of(*facts: Any) -> str:
    """A short text that is equal when the facts are."""
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=8).hexdigest()
