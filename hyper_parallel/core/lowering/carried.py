"""What tensors carry besides their values: edges of the graph that operators before and behind a module share.

A tensor remembers the edges by which it entered operators, what it was gathered from, and, where it is plain, the
distributed tensor it was (``docs/architecture.md``). Code inside of a module finds them on its inputs, code behind it
on its outputs. So on a tape they are inputs and outputs like others.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.modules.boundary import MEMORY, remember_wrapped, remembered_by
from hyper_parallel.platform import get_platform

_platform = get_platform()


class Carried(NamedTuple):
    """A tensor that another one carries."""

    kind: str  # "edge", "gathered_from", "wrapped"
    key: Any  # of an edge: (layout, axes); of a wrapped tensor: its layout
    tensor: Any


def carried_by(tensor: Any) -> list[Carried]:
    """What ``tensor`` carries and would still be used."""
    if not isinstance(tensor, DTensor):
        return [Carried("wrapped", layout, wrapped) for layout, wrapped in remembered_by(tensor).items()]
    own = tensor.__dict__
    found = []
    origin = own.get("_gathered_from")
    if origin is not None and origin[1] == tensor._version:
        found.append(Carried("gathered_from", None, origin[0]))
    for key, (entered, version) in (own.get("_edges") or {}).items():
        if version == tensor._version:
            found.append(Carried("edge", key, entered))
    return found


@contextmanager
def carrying_nothing(tensors: Iterable[Any]) -> Iterator[None]:
    """Inside, tensors have forgotten what they carry."""
    kept = []
    for tensor in tensors:
        own = tensor.__dict__
        kept.append((own, {name: own.pop(name) for name in (MEMORY, "_gathered_from", "_edges") if name in own}))
    try:
        yield
    finally:
        for own, names in kept:
            own.update(names)


def carry(tensor: Any, kind: str, key: Any, other: Any) -> None:
    """Let ``tensor`` carry ``other``, as :func:`carried_by` has found it."""
    if kind == "wrapped":
        remember_wrapped(tensor, key, other)
    elif kind == "gathered_from":
        tensor._gathered_from = (other, tensor._version)
    else:
        edges = tensor.__dict__.get("_edges")
        if edges is None:
            edges = tensor._edges = {}
        edges[key] = (other, tensor._version)
