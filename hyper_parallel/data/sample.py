"""One sample: tokens, what is to be predicted after each, and the places of the tokens in their documents."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["IGNORED", "Sample"]

IGNORED = -100  # a label that is not trained: what PyTorch's and Hugging Face's losses leave out


@dataclass(frozen=True)
class Sample:
    """A row of a batch without padding, each array as long as ``input_ids``.

    ``labels[i]`` is the token that follows ``input_ids[i]``, or -100. ``position_ids`` counts from 0 in each document;
    None where the row is one document.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray | None = None

    @classmethod
    def of_tokens(
        cls, tokens: Sequence[int] | np.ndarray, trained: Sequence[bool] | np.ndarray | None = None
    ) -> Sample:
        """A document: all but the last token are put in, all but the first are predicted where ``trained`` says so."""
        ids = np.asarray(tokens, np.int64)
        labels = ids[1:] if trained is None else np.where(np.asarray(trained, bool)[1:], ids[1:], IGNORED)
        return cls(ids[:-1], labels)

    @classmethod
    def of_documents(cls, documents: Sequence[Sample]) -> Sample:
        """Documents behind each other in one row, each with positions from 0."""
        return cls(
            np.concatenate([document.input_ids for document in documents]),
            np.concatenate([document.labels for document in documents]),
            np.concatenate([np.arange(len(document.input_ids)) for document in documents]),
        )

    def documents(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(tokens, which of them are trained) of each document, with the token that is only predicted."""
        starts = np.zeros(1, np.int64) if self.position_ids is None else np.flatnonzero(self.position_ids == 0)
        if not starts.size or starts[0]:
            starts = np.r_[0, starts]
        for start, end in zip(starts, [*starts[1:], len(self.input_ids)], strict=True):
            labels = self.labels[start:end]
            trained = labels != IGNORED
            last = labels[-1:][trained[-1:]]
            yield np.r_[self.input_ids[start:end], last], np.r_[False, trained][: end - start + len(last)]
