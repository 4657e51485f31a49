"""How a model is told where the documents of a packed row begin: the spellings that there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

__all__ = ["SPELLINGS", "may_see", "spell"]

SPELLINGS = ("position_ids", "attention_mask", "cu_seqlens")


def spell(batch: Mapping[str, Any], spelling: str) -> dict[str, Any]:
    """A packed batch as a model understands it; what is not packed is left as it is.

    ``"position_ids"``: positions that restart, and no mask. ``"attention_mask"``: these, and a mask (rows, 1, tokens,
    tokens) that is True where a token may see another. ``"cu_seqlens"``: all rows as one, and where each document
    begins and ends in it, in the words of Hugging Face's models for FlashAttention.
    """
    if spelling not in SPELLINGS:
        raise ValueError(f"there is no spelling {spelling!r} of packed rows; known are {', '.join(SPELLINGS)}")
    spelled = dict(batch)
    if "position_ids" not in batch or spelling == "position_ids":
        return spelled
    positions = np.asarray(batch["position_ids"])
    if spelling == "attention_mask":
        return {**spelled, "attention_mask": may_see(positions)[:, None]}
    spelled = {name: np.asarray(array).reshape(1, -1) for name, array in spelled.items()}
    starts = np.flatnonzero(spelled["position_ids"][0] == 0)
    ends = np.append(starts, positions.size).astype(np.int32)
    longest = int(np.diff(ends).max(initial=0))
    return {
        **spelled,
        "cu_seq_lens_q": ends,
        "cu_seq_lens_k": ends,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def may_see(positions: np.ndarray) -> np.ndarray:
    """(rows, tokens, tokens): whether the second token is of the first one's document, and not behind it."""
    documents = np.cumsum(positions == 0, axis=1)
    same = documents[:, :, None] == documents[:, None, :]
    return same & np.tri(positions.shape[1], dtype=bool)
