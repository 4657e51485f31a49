"""Along which dim each argument of a step is cut into microbatches, and how outputs are put together again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hyper_parallel.platform import get_platform

__all__ = ["BatchDimSpec", "merge_outputs", "split_arguments"]

_platform = get_platform()


@dataclass(frozen=True)
class BatchDimSpec:
    """The dim of an argument that counts samples; None: every microbatch gets the whole argument.

    >>> BatchDimSpec.from_tuple((0, None)), BatchDimSpec.from_dict({"mask": 1})
    ((BatchDimSpec(batch_dim=0), BatchDimSpec(batch_dim=None)), {'mask': BatchDimSpec(batch_dim=1)})
    """

    batch_dim: int | None

    def __post_init__(self) -> None:
        if self.batch_dim is not None and (isinstance(self.batch_dim, bool) or not isinstance(self.batch_dim, int)):
            raise TypeError(f"BatchDimSpec: the dim that counts samples is a number or None, got {self.batch_dim!r}")

    @staticmethod
    def from_tuple(dims: Sequence[int | None]) -> tuple[BatchDimSpec, ...]:
        """One for each positional argument."""
        return tuple(map(BatchDimSpec, dims))

    @staticmethod
    def from_dict(dims: Mapping[str, int | None]) -> dict[str, BatchDimSpec]:
        """One for each named argument."""
        return {name: BatchDimSpec(dim) for name, dim in dims.items()}


def split_arguments(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    num_parts: int,
    args_dims: Sequence[Any] | None = None,
    kwargs_dims: Mapping[str, Any] | None = None,
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """The arguments of each microbatch: parts of tensors, sizes as even as can be, and other values as they are.

    Without dims tensors are cut along dim 0, and those without dims are whole.
    """
    if args_dims is not None and args and len(args_dims) != len(args):
        raise ValueError(
            f"args_batch_dim has {len(args_dims)} entries and run() {len(args)} arguments; give one for each"
        )
    unknown = sorted(set(kwargs_dims or ()) - set(kwargs)) if kwargs else []
    if unknown:
        raise ValueError(f"kwargs_batch_dim names {', '.join(unknown)}, and run() has {', '.join(kwargs)}")
    dims = [None] * len(args) if args_dims is None else list(args_dims)
    places = [
        _parts_of(f"argument {place}", value, dim, args_dims is not None, num_parts)
        for place, (value, dim) in enumerate(zip(args, dims, strict=False))
    ]
    named = {
        name: _parts_of(
            f"argument {name}", value, (kwargs_dims or {}).get(name), name in (kwargs_dims or {}), num_parts
        )
        for name, value in kwargs.items()
    }
    return [
        (tuple(parts[number] for parts in places), {name: parts[number] for name, parts in named.items()})
        for number in range(num_parts)
    ]


def _parts_of(where: str, value: Any, dim: Any, is_given: bool, num_parts: int) -> list[Any]:
    dim = dim.batch_dim if isinstance(dim, BatchDimSpec) else dim
    if not is_given:
        dim = 0 if _platform.is_tensor(value) and value.ndim else None
    if dim is None:
        return [value] * num_parts
    if not _platform.is_tensor(value):
        raise TypeError(f"{where} is a {type(value).__name__}, which has no dim {dim} to cut; give None for it")
    if not -value.ndim <= dim < value.ndim:
        raise ValueError(f"{where} has the shape {tuple(value.shape)}, and no dim {dim} to cut into microbatches")
    size, dim = value.shape[dim], dim % value.ndim
    if size < num_parts:
        raise ValueError(f"{where} has {size} samples along dim {dim}, too few for {num_parts} microbatches")
    ends = [size * (number + 1) // num_parts for number in range(num_parts)]
    before = (slice(None),) * dim
    return [value[before + (slice(begin, end),)] for begin, end in zip([0, *ends], ends, strict=False)]


def merge_outputs(outputs: Sequence[tuple[Any, ...]], dims: Any = None) -> Any:
    """The outputs of all microbatches as one: tensors behind each other along their dim, by default 0; numbers stacked.

    ``dims`` is one for all outputs, or a tuple with one for each.
    """
    several = len(outputs[0])
    given = tuple(dims) if isinstance(dims, (tuple, list)) else (dims,) * several
    if len(given) != several:
        raise ValueError(f"output_concat_dim has {len(given)} entries, and the last stage gives {several} outputs")
    merged = []
    for place, dim in enumerate(given):
        parts = [found[place] for found in outputs]
        if not _platform.is_tensor(parts[0]):
            merged.append(parts)
        elif not parts[0].ndim:
            merged.append(_platform.cat([part.reshape((1,)) for part in parts], 0))
        else:
            merged.append(_platform.cat(parts, 0 if dim is None else dim))
    return merged[0] if several == 1 else tuple(merged)
