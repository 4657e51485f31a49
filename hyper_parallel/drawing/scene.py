"""What a drawing shows, before it has a form: lines in the order of the run, modules and the collectives between them.

Note [Blocks that look alike]
A model's blocks are mostly cut in the same way. Those whose lines are equal but for the block's number are shown once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hyper_parallel.core.dtensor.layout import Layout, chunk_interval


@dataclass(frozen=True)
class Piece:
    """A tensor in a picture: its global shape and how it lies; a plain tensor has no layout."""

    shape: tuple[int, ...]
    layout: Layout | None = None
    name: str = ""

    def __str__(self) -> str:
        """``4 x 64/tp x 128``: a slash and the mesh axes behind each sharded dim, the reduction of a partial value."""
        dims = [str(size) for size in self.shape]
        if self.layout is not None:
            for dim, axes in enumerate(self.layout.shard_axes):
                dims[dim] += "".join(f"/{self.layout.mesh.axis_label(axis)}" for axis in axes)
        text = " x ".join(dims) or "scalar"
        return f"{text}, {self.partial}" if self.partial else text

    @property
    def partial(self) -> str:
        """Which reductions have not been made yet, in words."""
        if self.layout is None:
            return ""
        by_op: dict[str, list[str]] = {}
        for axis, op in enumerate(self.layout.partials):
            if op is not None:
                by_op.setdefault(op, []).append(self.layout.mesh.axis_label(axis))
        return ", ".join(f"partial {op} over {' and '.join(axes)}" for op, axes in by_op.items())

    def intervals(self, dim: int) -> list[tuple[int, int, int]]:
        """(start, length, owner) of the parts of a dim; the owner numbers the ranks along the axes that shard it."""
        axes = () if self.layout is None else self.layout.shard_axes[dim]
        parts = [(0, self.shape[dim])]
        for axis in axes:
            count = self.layout.mesh.shape[axis]  # type: ignore[union-attr]
            parts = [
                (start + offset, length)
                for start, size in parts
                for offset, length in (chunk_interval(size, count, index) for index in range(count))
            ]
        return [(start, length, owner) for owner, (start, length) in enumerate(parts)]


@dataclass(frozen=True)
class ModuleLine:
    """A module with parameters: how they lie, what came in and what came out."""

    path: str
    kind: str
    parameters: tuple[Piece, ...]
    entered: Piece | None = None
    left: Piece | None = None


@dataclass(frozen=True)
class CommLine:
    """A collective of the forward pass: which, how much this rank sent, for what, and the result where it is known."""

    path: str
    op: str
    sent_bytes: int
    reason: str
    result: Piece | None = None


Line = ModuleLine | CommLine


@dataclass
class Scene:
    """The lines of a drawing, and what to write above them."""

    title: str
    lines: list[Line] = field(default_factory=list)

    @property
    def meshes(self) -> list[Any]:
        """Every mesh that occurs, in the order of the lines."""
        pieces = [piece for line in self.lines for piece in pieces_of(line)]
        return list(dict.fromkeys(piece.layout.mesh for piece in pieces if piece.layout is not None))


def pieces_of(line: Line) -> list[Piece]:
    """All tensors of a line."""
    if isinstance(line, CommLine):
        return [line.result] if line.result is not None else []
    return [*line.parameters, *(piece for piece in (line.entered, line.left) if piece is not None)]


@dataclass(frozen=True)
class Group:
    """Lines that are shown together: those of blocks ``first`` to ``last`` under ``path``, or lines outside blocks."""

    path: str
    first: int
    last: int
    lines: tuple[Line, ...]

    @property
    def title(self) -> str:
        """What to write above the lines; nothing for lines outside of blocks."""
        if self.first == self.last:
            return f"{self.path}.{self.first}" if self.path else ""
        return f"{self.path}.{self.first} to {self.path}.{self.last}, all alike"


def grouped(lines: Sequence[Line]) -> list[Group]:
    """The lines by block, neighbours that look alike made one; see Note [Blocks that look alike]."""
    groups: list[Group] = []
    for line in lines:
        path, number, inner = _block_of(line.path)
        line = replace(line, path=inner)
        if groups and groups[-1].path == path and groups[-1].last == number:
            groups[-1] = replace(groups[-1], lines=(*groups[-1].lines, line))
        else:
            groups.append(Group(path, number, number, (line,)))
    merged: list[Group] = []
    for group in groups:
        if merged and group.path and merged[-1].path == group.path and merged[-1].lines == group.lines:
            merged[-1] = replace(merged[-1], last=group.last)
        else:
            merged.append(group)
    return merged


def _block_of(path: str) -> tuple[str, int, str]:
    """(path of the list, number in it, path inside) of a line in a block; ("", -1, path) outside."""
    names = path.split(".")
    for place, name in enumerate(names):
        if name.isdigit() and place:
            return ".".join(names[:place]), int(name), ".".join(names[place + 1 :])
    return "", -1, path


def bytes_in_words(count: int) -> str:
    """
    >>> bytes_in_words(96), bytes_in_words(98304), bytes_in_words(5 << 20)
    ('96 B', '96 KiB', '5 MiB')
    """
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"


def op_in_words(op: str) -> str:
    """
    >>> op_in_words("all_gather_into_tensor"), op_in_words("all_reduce")
    ('all-gather', 'all-reduce')
    """
    return op.replace("_into_tensor", "").replace("_tensor", "").replace("_single", "").replace("_", "-")
