"""What describes a mesh, read from what the user wrote and shown again: device type, shape, ranks, names."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ranks = NDArray[np.int64]

_RESERVED_NAME = "None"  # in alias placements "None" says that a dim is not cut
_MAX_RANKS_SHOWN = 64


def check_device_type(device_type: Any) -> None:
    """A device type is a word like 'cpu', without an index, or an error says so."""
    if not isinstance(device_type, str):
        raise TypeError(f"the device type of a mesh is a string like 'cpu' or 'cuda', not {device_type!r}")
    if not device_type or ":" in device_type:
        raise ValueError(f"the device type of a mesh is like 'cpu' or 'cuda', without an index, not {device_type!r}")


def parse_shape(shape: Any, where: str) -> tuple[int, ...]:
    """The sizes of the axes; ``where`` starts the message of an error."""
    try:
        sizes = tuple(operator.index(size) for size in shape)
    except TypeError:
        raise TypeError(f"{where}: the sizes of axes are a sequence of ints like (2, 4), not {shape!r}") from None
    if not sizes or min(sizes) < 1:
        raise ValueError(f"{where}: at least one axis, and at least one rank on each, not {sizes}")
    return sizes


def parse_ranks(device_type: str, mesh: Any) -> Ranks:
    """Distinct ranks as an array, from nested lists, numpy, or anything with ``tolist()``."""
    nested = mesh.tolist() if hasattr(mesh, "tolist") else mesh
    try:
        ranks = np.array(nested)
    except ValueError:
        raise ValueError(f"the rows of a mesh must have equal lengths: {nested}") from None
    if ranks.ndim == 0 or ranks.size == 0:
        raise ValueError(f"a mesh needs at least one axis and one rank, not {nested}")
    if ranks.dtype.kind not in "iu":
        raise TypeError(f"a mesh is made of ranks, which are ints, not {nested}")
    ranks = ranks.astype(np.int64)
    if ranks.min() < 0:
        raise ValueError(f"{describe(device_type, ranks, None)} has negative ranks {sorted(ranks[ranks < 0].tolist())}")
    values, counts = np.unique(ranks, return_counts=True)
    if counts.max() > 1:
        raise ValueError(f"{describe(device_type, ranks, None)} repeats ranks {values[counts > 1].tolist()}")
    return ranks


def parse_names(device_type: str, ranks: Ranks, names: Sequence[str] | None) -> tuple[str, ...] | None:
    """One name per axis, or None."""
    if names is None:
        return None
    mesh = describe(device_type, ranks, None)
    listed = isinstance(names, Iterable) and not isinstance(names, str)
    if not listed or not all(isinstance(name, str) for name in names):
        raise TypeError(f'the axis names of {mesh} are strings like ("dp", "tp"), not {names!r}')
    names = tuple(names)
    if len(names) != ranks.ndim:
        raise ValueError(f"{mesh} has {ranks.ndim} axes, but {len(names)} names: {names}")
    if len(set(names)) < len(names):
        raise ValueError(f"the axis names {names} of {mesh} repeat")
    if _RESERVED_NAME in names or "" in names:
        raise ValueError(f'the axis names {names} of {mesh}: "None" (not sharded) and "" cannot name an axis')
    return names


def names_text(names: Any) -> str:
    """The names as a part of a message."""
    return "" if names is None else f" and names {names}"


def describe(device_type: str, ranks: Ranks, names: tuple[str, ...] | None) -> str:
    """The mesh as its ``repr`` shows it; many ranks are shortened."""
    if names is None:
        shape = str(tuple(ranks.shape))
    else:
        shape = f"({', '.join(f'{name}={size}' for name, size in zip(names, ranks.shape, strict=True))})"
    flat = ranks.ravel()
    if flat.size <= _MAX_RANKS_SHOWN:
        shown = str(ranks.tolist())
    elif (flat == np.arange(flat[0], flat[0] + flat.size)).all():
        shown = f"{flat[0]}..{flat[-1]}"
    else:
        shown = f"[{', '.join(map(str, flat[:8]))}, ... {flat[-1]}]"
    return f"DeviceMesh({device_type!r}, {shape}, ranks={shown})"


def fitting_shapes(shape: tuple[int, ...], world_size: int, num_shown: int = 3) -> list[tuple[int, ...]]:
    """Shapes with as many axes that hold exactly the world, the nearest to ``shape`` first."""

    def factorisations(number: int, num_factors: int) -> Iterable[tuple[int, ...]]:
        if num_factors == 1:
            yield (number,)
            return
        for first in range(1, number + 1):
            if number % first == 0:
                for rest in factorisations(number // first, num_factors - 1):
                    yield (first, *rest)

    def distance(other: tuple[int, ...]) -> tuple[int, float]:
        ratios = [abs(math.log(mine / theirs)) for mine, theirs in zip(shape, other, strict=True)]
        return sum(ratio > 0 for ratio in ratios), sum(ratios)

    return sorted(factorisations(world_size, len(shape)), key=distance)[:num_shown]
