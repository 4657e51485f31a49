"""A batch of this rank in parts that run one after the other.

Note [A part without rows]
All ranks run as many parts, for they communicate in each. A rank with fewer rows than parts runs one of its rows once
more (or a row of zeros, if it has none at all) with weight 0: its loss counts nothing, and its gradients are zeros.
Masks of such a row are ones: a mean over tokens of which none counts is no number, and neither is 0 times it.
"""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.context_parallel.batch import TokenOrder
from hyper_parallel.platform import get_platform

__all__ = [
    "MicroBatch",
    "input_names",
    "micro_batches",
    "named_batch",
    "num_rows",
    "parts_of",
    "warn_of_batch_statistics",
]

_platform = get_platform()


@dataclass(frozen=True)
class MicroBatch:
    """Some rows of this rank's part of the batch, by the names of the model's arguments."""

    values: dict[str, Any]
    first: int  # row of this rank's part
    rows: int  # 0: see Note [A part without rows]
    order: TokenOrder | None = None  # of the tokens of each row; None: that of the sequence


def parts_of(count: int, num_parts: int) -> list[tuple[int, int]]:
    """Where each of ``num_parts`` parts of ``count`` things begins and ends: the first ones have one more.

    >>> parts_of(7, 3)
    [(0, 3), (3, 5), (5, 7)]
    """
    small, more = divmod(count, num_parts)
    ends = [part * small + min(part, more) for part in range(num_parts + 1)]
    return list(itertools.pairwise(ends))


def input_names(model: Any) -> list[str]:
    """The names of the model's inputs that may be given by position."""
    return [
        name
        for name, parameter in inspect.signature(_platform.get_cell_construct(model)).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD) and name != "self"
    ]


def named_batch(model: Any, args: tuple[Any, ...], batch: Mapping[str, Any]) -> dict[str, Any]:
    """The batch by the names of the model's arguments, also what was given by position."""
    if not args:
        return dict(batch)
    if isinstance(args[0], Mapping):
        raise TypeError("a batch is given by name, forward_backward(**batch), not as a dict")
    names = input_names(model)
    if len(args) > len(names):
        raise TypeError(f"the model takes {len(names)} inputs ({', '.join(names)}), got {len(args)}")
    named = dict(zip(names, args, strict=False))
    twice = sorted(named.keys() & batch.keys())
    if twice:
        raise TypeError(f"{', '.join(twice)} is given by position and by name")
    return {**named, **batch}


def num_rows(batch: Mapping[str, Any]) -> int:
    """How many samples a batch has: the size of the first dim of its first tensor that has dims."""
    for value in batch.values():
        if _platform.is_tensor(value) and value.ndim:
            return int(value.shape[0])
    raise ValueError(f"the batch has no tensor with a dim of samples; it has {', '.join(batch) or 'nothing'}")


def micro_batches(batch: Mapping[str, Any], num_parts: int) -> Iterator[MicroBatch]:
    """The batch in ``num_parts`` parts; what has no dim of samples is the same in each."""
    rows = num_rows(batch)
    for name, value in batch.items() if num_parts > 1 else ():
        if _has_samples_inside(value, rows):
            raise ValueError(
                f"the batch's {name} is a {type(value).__name__} with tensors of samples inside, which are not cut "
                "into micro-batches: give each tensor by a name of its own, or microbatches=1"
            )
    for begin, end in parts_of(rows, num_parts):
        if num_parts == 1 and rows:
            yield MicroBatch(dict(batch), 0, rows)
        else:
            yield MicroBatch(
                {name: _part(name, value, rows, begin, end) for name, value in batch.items()}, begin, end - begin
            )


def _has_samples_inside(value: Any, rows: int) -> bool:
    if not isinstance(value, (Mapping, list, tuple)):
        return False
    inside = list(value.values() if isinstance(value, Mapping) else value)
    tensors = [one for one in inside if _platform.is_tensor(one)]
    return (
        (bool(tensors) and len(inside) == rows)
        or any(one.ndim and one.shape[0] == rows for one in tensors)
        or any(_has_samples_inside(one, rows) for one in inside)
    )


def warn_of_batch_statistics(model: Any) -> None:
    """Warn of a model that looks at all samples of a batch together, which is computed in parts."""
    for path, module in _platform.get_cells_and_names(model):
        if any(kind.__name__ == "_BatchNorm" for kind in type(module).__mro__):
            warnings.warn(
                f"parallelize: '{path}' ({type(module).__name__}) takes its averages over the samples of one "
                "micro-batch of one rank, and not of the whole batch as on one device; LayerNorm and GroupNorm look at "
                "one sample",
                RuntimeWarning,
                stacklevel=3,
            )
            return


def _part(name: str, value: Any, rows: int, begin: int, end: int) -> Any:
    if not _platform.is_tensor(value) or not value.ndim or value.shape[0] != rows:
        return value
    if begin < end:
        return value[begin:end]
    if rows:
        return value[:1]
    nothing = _platform.zeros((1, *value.shape[1:]), value.dtype, value.device)
    return _platform.full_like(nothing, 1) if name.endswith("mask") and value.ndim == 2 else nothing
