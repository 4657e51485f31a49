"""The order in which the tokens of a batch lie on the ranks of a sequence, and the way back.

Under causal attention later tokens see more keys. With the sequence in its own order the last rank works longest;
"zigzag" gives every rank a piece from the front and one from the back, "striped" every n-th token. The batch is
permuted once; attention goes by the coordinates of tokens (:class:`Visibility`), and positions and targets travel with
their tokens, so every other operator may ignore the order, provided that it treats tokens one by one.

Note [What must travel]
Token i's target is token i + 1: labels are shifted before they are permuted. Positions, which models count by
themselves, are given to them. Documents are found in positions by where they start again, which is lost in another
order, so they are found before. What has a dim of tokens and is none of these cannot be permuted by its shape alone
(a mask of all pairs of tokens): that is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.layout import chunk_interval
from hyper_parallel.core.shard.dispatching.order_guard import OrderGuard, guarded_order
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.membership import belongs_to_rank

__all__ = ["ORDERS", "TokenOrder", "current_order", "ordered_batch", "ordered_tokens", "shifted_labels", "token_order"]

_platform = get_platform()

ORDERS = ("contiguous", "zigzag", "striped")
IGNORED = -100
_SEQUENCE_DIM = 1
_IDS = ("input_ids", "inputs_embeds", "ids")


@dataclass(frozen=True)
class TokenOrder:
    """``indices[place]`` is the index in the sequence of the token that lies at ``place``; ``documents`` by place."""

    name: str
    indices: np.ndarray
    documents: np.ndarray | None = None

    def permuted(self, tensor: Any, dim: int = _SEQUENCE_DIM) -> Any:
        """A plain tensor with the tokens of ``dim`` in this order."""
        return tensor.index_select(dim, self._on_device(self.indices, tensor))

    def restored(self, tensor: Any, dim: int = _SEQUENCE_DIM) -> Any:
        """A plain tensor in this order, in that of the sequence again."""
        return tensor.index_select(dim, self._on_device(np.argsort(self.indices), tensor))

    @staticmethod
    def _on_device(indices: np.ndarray, like: Any) -> Any:
        return _platform.index_tensor([indices.tolist()], like.device)[0]


@lru_cache(maxsize=64)
def token_order(name: str, num_tokens: int, num_parts: int) -> np.ndarray:
    """The indices of the tokens by place, for a sequence in ``num_parts`` shards of the sizes that layouts have.

    >>> token_order("zigzag", 8, 2).tolist(), token_order("striped", 7, 2).tolist()
    ([0, 1, 6, 7, 2, 3, 4, 5], [0, 2, 4, 6, 1, 3, 5])
    """
    if name not in ORDERS:
        raise ValueError(f"there is no order {name!r} of tokens: choose one of {', '.join(ORDERS)}")
    sizes = [chunk_interval(num_tokens, num_parts, part)[1] for part in range(num_parts)]
    if name == "contiguous":
        return np.arange(num_tokens)
    if name == "striped":
        parts: list[list[int]] = [[] for _ in sizes]
        token = 0
        while token < num_tokens:
            for part, size in zip(parts, sizes, strict=True):
                if len(part) < size:
                    part.append(token)
                    token += 1
        return np.array([token for part in parts for token in part], dtype=np.int64)
    places, front, back = [], 0, num_tokens
    for size in sizes:
        first = (size + 1) // 2
        places += [*range(front, front + first), *range(back - (size - first), back)]
        front, back = front + first, back - (size - first)
    return np.array(places, dtype=np.int64)


def shifted_labels(labels: Any) -> Any:
    """The token behind each position as its target, and none behind the last."""
    last = _platform.full_like(labels[:, :1], IGNORED)
    return _platform.cat([labels[:, 1:], last], _SEQUENCE_DIM)


def documents_of(positions: Any) -> np.ndarray | None:
    """(rows, tokens) numbers of the documents of packed rows, whose positions start again; None for one in each."""
    array = np.asarray(_platform.tensor_to_numpy(positions))
    jumps = np.diff(array, axis=-1) != 1
    if not jumps.any():
        return None
    return np.concatenate([np.zeros_like(array[:, :1]), np.cumsum(jumps, -1)], -1)


def sequence_shape(batch: Mapping[str, Any]) -> tuple[int, int] | None:
    """(samples, sequence): that of token ids, or of the first tensor with two dims or more."""
    for _, value in sorted(batch.items(), key=lambda item: item[0] not in _IDS):
        if _platform.is_tensor(value) and value.ndim > _SEQUENCE_DIM:
            return int(value.shape[0]), int(value.shape[_SEQUENCE_DIM])
    return None


def is_sequence(value: Any, shape: tuple[int, int]) -> bool:
    """Whether ``value`` is a plain tensor of (samples, sequence, ...)."""
    if not _platform.is_tensor(value) or isinstance(value, DTensor) or value.ndim <= _SEQUENCE_DIM:
        return False
    return tuple(value.shape[:2]) == shape


def ordered_batch(
    batch: Mapping[str, Any], name: str, num_parts: int, *, shifts_labels: bool
) -> tuple[dict[str, Any], TokenOrder | None]:
    """A batch of plain tensors in another order of tokens, and that order; see Note [What must travel].

    ``position_ids`` are added where there are none. With ``shifts_labels`` what the model is to predict at each token
    is the label behind it, and ``labels`` become ``shift_labels``.
    """
    shape = sequence_shape(batch)
    if name == "contiguous" or num_parts == 1 or shape is None:
        return dict(batch), None
    rows, num_tokens = shape
    values = dict(batch)
    positions = values.get("position_ids")
    if positions is None:
        like = next(value for value in values.values() if is_sequence(value, shape))
        positions = _platform.arange(0, num_tokens, device=like.device).unsqueeze(0).expand((rows, num_tokens))
        values["position_ids"] = positions
    elif tuple(positions.shape) == (1, num_tokens):
        positions = values["position_ids"] = positions.expand((rows, num_tokens))
    is_packed = batch.get("position_ids") is not None and batch.get("attention_mask") is None
    documents = documents_of(positions) if is_packed and is_sequence(positions, shape) else None
    if shifts_labels and values.get("labels") is not None:
        labels = values.pop("labels")
        values.setdefault("shift_labels", shifted_labels(labels))
    indices = token_order(name, num_tokens, num_parts)
    order = TokenOrder(name, indices, None if documents is None else documents[:, indices])
    for key, value in values.items():
        if is_sequence(value, shape):
            values[key] = order.permuted(value)
        elif _platform.is_tensor(value) and num_tokens > 1 and num_tokens in tuple(value.shape):
            raise ValueError(
                f"the batch has {key} of shape {tuple(value.shape)}: what has a dim of the {num_tokens} tokens and is "
                f"not ({rows}, {num_tokens}, ...) cannot be put in {name} order; give padding as an attention_mask of "
                f"({rows}, {num_tokens}) and documents by position_ids, or write order='contiguous'"
            )
    return values, order


# ---------------------------------------------------------------------------------------------------------------------
# The order that a model runs in
# ---------------------------------------------------------------------------------------------------------------------

_order: TokenOrder | None = None


def _set_order(order: TokenOrder | None) -> None:
    global _order
    _order = order


belongs_to_rank(lambda: _order, _set_order)


def current_order() -> TokenOrder | None:
    """The order of the tokens of the model that runs; None: that of the sequence."""
    return _order


@contextmanager
def ordered_tokens(order: TokenOrder | None) -> Iterator[None]:
    """Context: the model's tokens are in this order. Operators that go by the order of tokens are refused."""
    before = _order
    _set_order(order)
    try:
        with guarded_order(None if order is None else OrderGuard(order.name, len(order.indices))):
            yield
    finally:
        _set_order(before)
