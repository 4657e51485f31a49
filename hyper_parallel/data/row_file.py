"""Rows of tokens, of which some are trained, and the table of which rows lie together in a sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from hyper_parallel.data.dataset import Dataset, fingerprint_of
from hyper_parallel.data.sample import Sample
from hyper_parallel.data.token_file import map_tokens

__all__ = ["RowFile", "write_table"]

TOKENS, ENDS, TRAINED, ROWS, SAMPLES = "tokens.bin", "ends.npy", "trained.npy", "rows.npy", "samples.npy"


class RowFile(Dataset):
    """A folder of rows: sample i is the rows ``rows[samples[i - 1]:samples[i]]``, behind each other.

    ``ends`` are the places behind each row's last token in the token file, ``trained`` has a bit for each token.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        length: int,
        dtype: str,
        vocab_size: int,
        packing: bool,
        fingerprint: str,
        pad_to: int | None = None,
        decode: Callable[[np.ndarray], str] | None = None,
        name: str | None = None,
        notes: str = "",
    ) -> None:
        folder = Path(folder)
        self.tokens = map_tokens(folder / TOKENS, dtype)
        self.ends, self.trained, self.rows, self.sample_ends = (
            np.load(folder / file, mmap_mode="r") for file in (ENDS, TRAINED, ROWS, SAMPLES)
        )
        self.num_samples = len(self.sample_ends)
        self.length, self.vocab_size, self.pad_to = length, vocab_size, pad_to
        self.is_packed = packing
        self.fingerprint = fingerprint_of(fingerprint, length, packing)
        self._decode = decode
        self._name = name or str(folder)
        self._notes = notes

    def row(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, which of them are trained) of a row."""
        start, end = int(self.ends[number - 1]) if number else 0, int(self.ends[number])
        bits = np.unpackbits(np.asarray(self.trained[start // 8 : -(-end // 8)]))
        tokens = np.asarray(self.tokens[start:end], np.int64)
        self._check_vocabulary(tokens, f"{self._name}: row {number}")
        return tokens, bits[start % 8 : start % 8 + end - start].astype(bool)

    def sample(self, number: int) -> Sample:
        start = int(self.sample_ends[number - 1]) if self._checked(number) else 0
        documents = [
            Sample.of_tokens(*self.row(row)) for row in self.rows[start : int(self.sample_ends[number])].tolist()
        ]
        return Sample.of_documents(documents) if self.is_packed else documents[0]

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._decode(np.asarray(ids)) if self._decode else " ".join(map(str, np.asarray(ids).tolist()))

    def describe(self) -> str:
        places = len(self.tokens) - len(self.ends)
        share = places / (self.num_samples * self.length)
        packed = (
            f"packed into {self.num_samples:,} samples of {self.length}, {share:.1%} full"
            if self.is_packed
            else f"one a sample, at most {self.length} long"
        )
        rows = f"{len(self.tokens):,} tokens of {len(self.ends):,} rows"
        return f"{self._name}: {rows}, {packed}; vocabulary {self.vocab_size:,}{self._notes}"


def write_table(folder: Path, rows: np.ndarray, ends: np.ndarray) -> None:
    """Store which rows lie together in which sample."""
    np.save(folder / ROWS, rows.astype(np.int64))
    np.save(folder / SAMPLES, ends.astype(np.int64))
