"""Samples as the arrays of one batch, and what in them is padding.

Note [Padding of packed rows]
A 2-D attention mask makes Hugging Face models forget that positions restart, and documents see each other. So a packed
batch has none: its padding is one more document at the end of the row, which nothing before it sees and which is not
trained. Rows that are not packed get the 2-D mask, and only where there is padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hyper_parallel.data.sample import IGNORED, Sample

__all__ = ["IGNORED", "Batch", "collate"]


class Batch(dict[str, np.ndarray]):
    """Arrays by name, to be given to a model as keywords, and how many of its tokens count.

    ``input_ids`` and ``labels`` are (rows, tokens) in int64. ``labels[i, j]`` is the token that follows
    ``input_ids[i, j]``, or -100 where nothing is trained: they are shifted already, as ``hp.models.Llama`` takes them.
    Hugging Face models shift by themselves unless they get them as ``shift_labels`` too. ``position_ids`` is there
    where rows hold several documents, ``attention_mask`` where a row that holds one has padding.
    """

    def __init__(self, arrays: dict[str, np.ndarray], *, num_padding: int) -> None:
        super().__init__(arrays)
        self.num_padding = num_padding

    @property
    def num_tokens(self) -> int:
        """Tokens without padding."""
        return self["input_ids"].size - self.num_padding

    @property
    def num_trained(self) -> int:
        """Tokens that the loss is taken over."""
        return int((self["labels"] != IGNORED).sum())


def collate(
    samples: Sequence[Sample], *, length: int | None = None, packed: bool | None = None, pad_id: int = 0
) -> Batch:
    """One batch of samples, filled up to ``length``, or to the longest of them.

    ``packed`` says whether it has ``position_ids``; by default it has where a sample has.

    >>> two = [Sample.of_tokens([5, 6, 7]), Sample.of_tokens([8, 9])]
    >>> batch = collate(two)
    >>> batch["input_ids"].tolist(), batch["labels"].tolist(), batch["attention_mask"].tolist(), batch.num_padding
    ([[5, 6], [8, 0]], [[6, 7], [9, -100]], [[1, 1], [1, 0]], 1)
    """
    sizes = [len(sample.input_ids) for sample in samples]
    longest = max(sizes, default=0)
    width = longest if length is None else length
    if longest > width:
        raise ValueError(f"collate: a sample has {longest} tokens, more than length={width}")
    shape = (len(samples), width)
    arrays: dict[str, Any] = {
        "input_ids": np.full(shape, pad_id, np.int64),
        "labels": np.full(shape, IGNORED, np.int64),
    }
    is_packed = any(sample.position_ids is not None for sample in samples) if packed is None else packed
    if is_packed:
        arrays["position_ids"] = np.zeros(shape, np.int64)
    for row, (sample, size) in enumerate(zip(samples, sizes, strict=True)):
        arrays["input_ids"][row, :size] = sample.input_ids
        arrays["labels"][row, :size] = sample.labels
        if is_packed:
            inside = np.arange(size) if sample.position_ids is None else sample.position_ids
            arrays["position_ids"][row, :size] = inside
            arrays["position_ids"][row, size:] = np.arange(width - size)
    num_padding = len(samples) * width - sum(sizes)
    if num_padding and not is_packed:
        arrays["attention_mask"] = (np.arange(width) < np.array(sizes)[:, None]).astype(np.int64)
    return Batch(arrays, num_padding=num_padding)
