"""Arguments of the functions that make and cut tensors, read and checked the same way on every framework."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet

from hyper_parallel.platform.shared.framework_of import kind_of

__all__ = [
    "chunk_bounds",
    "find_dtype",
    "listed_tensors",
    "note_stage",
    "refuse_stages",
    "require_tensor",
    "upward_slices",
]

_stages: WeakSet[Any] = WeakSet()


def require_tensor(kind: type, function: str, obj: object) -> None:
    if not isinstance(obj, kind):
        raise TypeError(f"{function} takes a tensor, got {kind_of(obj)}")


def listed_tensors(kind: type, function: str, tensors: Any, what_to_give: str) -> list[Any]:
    """One tensor or an iterable of them as a list; ``what_to_give`` instead of pairs of names and tensors."""
    if isinstance(tensors, kind):
        return [tensors]
    tensors = list(tensors)
    for position, tensor in enumerate(tensors):
        if not isinstance(tensor, kind):
            hint = f"; give {what_to_give}" if isinstance(tensor, (tuple, str)) else ""
            raise TypeError(f"{function} takes tensors, got {type(tensor).__name__} at position {position}{hint}")
    return tensors


def note_stage(stage: Any) -> None:
    """The parameters of ``stage.named_parameters()`` are a part of a model's: their norm alone is not the model's."""
    _stages.add(stage)


def refuse_stages(function: str, tensors: Sequence[Any]) -> None:
    """An error where parameters of a pipeline's stage are given to what needs those of all stages."""
    given = {id(tensor) for tensor in tensors} if _stages else set()
    names = [name for stage in _stages for name, one in stage.named_parameters().items() if id(one) in given]
    if names:
        raise ValueError(
            f"{function}: {names[0]!r} is a parameter of a pipeline's stage, and the norm is that of the parameters of "
            "all stages: write run.clip_grad_norm_(...) of what hp.parallelize gave, or clip_grad_norm_of_stages"
        )


def find_dtype(given: Any, dtypes: Mapping[str, Any], abbreviations: Mapping[str, Any]) -> Any:
    """The dtype that a string names: "float32", "torch.float32", "Float32" (as MindSpore prints it) or "fp32"."""
    if not isinstance(given, str):
        raise TypeError(f"str_to_dtype takes a name such as 'float32', got {given!r} of type {type(given).__name__}")
    name = given.strip().lower()
    for framework in ("torch.", "mindspore."):
        name = name.removeprefix(framework)
    dtype = dtypes.get(name) or abbreviations.get(name)
    if dtype is None:
        near = difflib.get_close_matches(name, [*dtypes, *abbreviations], n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"the known names are {', '.join(sorted(dtypes))}"
        raise ValueError(f"'{given}' is not the name of a dtype; {hint}")
    return dtype


def chunk_bounds(shape: Sequence[int], dim: int, num_parts: int, index: int) -> tuple[int, int]:
    """(begin, length) of part ``index`` along ``dim``: parts have ceil(size / num_parts) rows, the later ones may be
    short or empty.
    """
    if not -len(shape) <= dim < len(shape):
        raise ValueError(
            f"chunk: dim {dim} of a tensor of shape {tuple(shape)} does not exist; it has {len(shape)} dimension(s)"
        )
    if num_parts < 1:
        raise ValueError(f"chunk: the number of parts must be at least 1, got {num_parts}")
    if not 0 <= index < num_parts:
        raise ValueError(f"chunk: part {index} of {num_parts} parts does not exist; give 0 to {num_parts - 1}")
    size = shape[dim]
    length = -(-size // num_parts)
    begin = min(index * length, size)
    return begin, min(length, size - begin)


def upward_slices(
    shape: Sequence[int], begin: Sequence[int], end: Sequence[int], stride: Sequence[int]
) -> tuple[tuple[slice, ...], list[int]]:
    """Slices with positive steps that take the elements of ``x[begin:end:stride, ...]``, and the dims to turn round.

    Tensors have no negative strides: the same elements are taken upwards and then reversed.
    """
    if not len(begin) == len(end) == len(stride) <= len(shape):
        raise ValueError(
            f"construct_strided_slice: begin {tuple(begin)}, end {tuple(end)} and stride {tuple(stride)} must be "
            f"equally long, at most one number for each dimension of the tensor of shape {tuple(shape)}"
        )
    if 0 in stride:
        raise ValueError(f"construct_strided_slice: stride {tuple(stride)} contains 0; write 1 to take every element")
    slices, reversed_dims = [], []
    for dim, (first, last, step) in enumerate(zip(begin, end, stride, strict=True)):
        indices = range(*slice(first, last, step).indices(shape[dim]))
        if step < 0:
            indices = indices[::-1]
            reversed_dims.append(dim)
        slices.append(slice(indices.start, indices.stop, indices.step) if indices else slice(0, 0))
    return tuple(slices), reversed_dims
