"""Neutral operators that read elements by their positions: indexing, look-ups, and one-hot rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import mint, ops

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.mends.empty_blocks import zeros_of
from hyper_parallel.platform.mindspore.operators.table import neutral


@neutral
def getitem(input: Any, index: Any) -> Any:
    """``input[index]``. Ranges without elements are made of zeros: their gradient has no kernel on a CPU."""
    if takes_nothing(input.shape, index):
        with private_api.no_grad():
            shape = tuple(input[index].shape)
        return zeros_of(shape, input.dtype, input)
    return input[index]


def _dim_of(shape: Sequence[int], entries: tuple[Any, ...], place: int) -> int:
    taken = [entry for entry in entries if entry is not None and entry is not Ellipsis]
    dim = sum(1 for entry in entries[:place] if entry is not None and entry is not Ellipsis)
    if any(entry is Ellipsis for entry in entries[:place]):
        dim += len(shape) - len(taken)
    return dim


def takes_nothing(shape: Sequence[int], index: Any) -> bool:
    """Whether a range of the index has no elements."""
    entries = index if isinstance(index, tuple) else (index,)
    return any(
        isinstance(entry, slice) and not len(range(*entry.indices(shape[_dim_of(shape, entries, place)])))
        for place, entry in enumerate(entries)
    )


@neutral
def index_select(input: Any, dim: int, index: Any) -> Any:
    if 0 in index.shape:
        dim %= input.ndim
        return zeros_of((*input.shape[:dim], 0, *input.shape[dim + 1 :]), input.dtype, input)
    return ops.gather(input, index, dim)


@neutral
def embedding(weight: Any, indices: Any, padding_idx: int | None = None) -> Any:
    if 0 in indices.shape or 0 in weight.shape:
        return zeros_of((*indices.shape, weight.shape[1]), weight.dtype, weight)
    return ops.gather(weight, indices, 0)


@neutral
def gather(input: Any, dim: int, index: Any) -> Any:
    return mint.gather(input, dim, index)


@neutral
def one_hot(input: Any, num_classes: int = -1) -> Any:
    return ops.one_hot(input, num_classes)


@neutral
def take(input: Any, index: Any) -> Any:
    """By position among all elements."""
    return zeros_of(index.shape, input.dtype, input) if 0 in index.shape else input.take(index)
