"""Tokens of many documents in one memory-mapped file, read in stretches of one length."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from hyper_parallel.data.dataset import Dataset, fingerprint_of
from hyper_parallel.data.sample import IGNORED, Sample

__all__ = ["TokenFile", "dtype_for", "file_digest", "map_tokens"]

_BLOCKS, _BLOCK_BYTES = 64, 1 << 16


class TokenFile(Dataset):
    """Sample i is the tokens ``i * length`` to ``(i + 1) * length``, of which the last is only predicted.

    With ``isolate`` the documents of a sample do not see each other: positions restart, and nothing is predicted across
    an end. Without, a sample is one stretch of text. ``ends`` are the places behind each document's last token.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        length: int,
        ends: str | os.PathLike[str] | None = None,
        dtype: str = "uint16",
        vocab_size: int | None = None,
        isolate: bool = True,
        fingerprint: str | None = None,
        decode: Callable[[np.ndarray], str] | None = None,
        name: str | None = None,
    ) -> None:
        self.path = Path(path)
        self.tokens = map_tokens(self.path, dtype)
        self.length = length
        self.is_packed = isolate
        self.num_samples = max(0, (len(self.tokens) - 1) // length)
        if not self.num_samples:
            raise ValueError(
                f"{self.path}: {len(self.tokens)} tokens are less than one sample of length {length}, which takes "
                f"{length + 1}; give more data or a shorter length"
            )
        if isolate and ends is None:
            raise ValueError(
                f"{self.path}: to keep documents apart their ends must be known; give the .npy file with the place "
                "behind each document's last token, or isolate=False"
            )
        self.ends = _load_ends(Path(ends), len(self.tokens)) if ends is not None else np.array([len(self.tokens)])
        self.vocab_size = _largest(self.tokens) + 1 if vocab_size is None else vocab_size
        self._decode = decode
        self._name = name or str(self.path)
        if fingerprint is None:
            fingerprint = fingerprint_of(
                file_digest(self.path), None if ends is None else file_digest(Path(ends)), dtype
            )
        self.fingerprint = fingerprint_of(fingerprint, length, isolate)

    def sample(self, number: int) -> Sample:
        start = self._checked(number) * self.length
        tokens = np.asarray(self.tokens[start : start + self.length + 1], np.int64)
        self._check_vocabulary(tokens, f"{self._name}: sample {number}, from token {start} on")
        if not self.is_packed:
            return Sample.of_tokens(tokens)
        first, last = np.searchsorted(self.ends, (start, start + self.length), side="right")
        inside = np.asarray(self.ends[first:last], np.int64) - start  # the places in the sample where documents begin
        begins = np.zeros(self.length + 1, np.int64)
        begins[inside] = inside
        positions = np.arange(self.length + 1) - np.maximum.accumulate(begins)
        labels = tokens[1:].copy()
        labels[inside - 1] = IGNORED
        return Sample(tokens[:-1], labels, positions[:-1])

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        return self._decode(np.asarray(ids)) if self._decode else " ".join(map(str, np.asarray(ids).tolist()))

    def describe(self) -> str:
        apart = "kept apart" if self.is_packed else "joined"
        return (
            f"{self._name}: {len(self.tokens):,} tokens of {len(self.ends):,} documents, {apart}; {self.num_samples:,} "
            f"samples of {self.length}, vocabulary {self.vocab_size:,}"
        )


def map_tokens(path: Path, dtype: str) -> np.ndarray:
    """The tokens of a file, memory-mapped."""
    width = np.dtype(dtype).itemsize
    try:
        size = path.stat().st_size
        if size % width:
            raise ValueError(
                f"{path}: {size} bytes are no whole number of {dtype} tokens; it is cut short, or has another dtype"
            )
        return np.memmap(path, dtype, "r") if size else np.zeros(0, dtype)
    except OSError as error:
        raise type(error)(f"cannot read the tokens in '{path}': {error.strerror or error}") from error


def _load_ends(path: Path, num_tokens: int) -> np.ndarray:
    try:
        ends = np.load(path, mmap_mode="r")
    except Exception as error:  # numpy reads the header as Python and raises what a parser of Python does
        raise ValueError(f"cannot read the ends of documents in '{path}': {error}") from error
    if not isinstance(ends, np.ndarray):
        raise ValueError(f"{path}: the ends of documents must be one array, as numpy.save writes it, not several")
    if ends.ndim != 1 or ends.dtype.kind not in "iu" or not len(ends):
        raise ValueError(f"{path}: the ends of documents must be a list of whole numbers, not {ends.dtype}{ends.shape}")
    if int(ends[-1]) != num_tokens or int(ends[0]) < 1 or (np.diff(ends.astype(np.int64)) <= 0).any():
        raise ValueError(
            f"{path}: the ends of documents must rise and end at the number of tokens, {num_tokens}; the last is "
            f"{int(ends[-1])}"
        )
    return ends


def _largest(tokens: np.ndarray, step: int = 1 << 24) -> int:
    return max(int(tokens[start : start + step].max()) for start in range(0, len(tokens), step))


def dtype_for(vocab_size: int) -> str:
    """The smaller of the two kinds of token file that holds these ids."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def file_digest(path: Path) -> str:
    """Size and content of a file: all of a small one, 64 blocks spread over a large one."""
    size = path.stat().st_size
    state = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as stream:
        if size <= _BLOCKS * _BLOCK_BYTES:
            state.update(stream.read())
        else:
            for number in range(_BLOCKS):
                stream.seek(number * (size - _BLOCK_BYTES) // (_BLOCKS - 1))
                state.update(stream.read(_BLOCK_BYTES))
    return state.hexdigest()
