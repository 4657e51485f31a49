"""``draw``: a picture of a model, or of layouts, as SVG and as text."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any, overload

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.pipeline_parallel.simulate import Timeline, simulate
from hyper_parallel.core.pipeline_parallel.table import Table
from hyper_parallel.drawing.scene import ModuleLine, Piece, Scene
from hyper_parallel.drawing.svg import svg_of
from hyper_parallel.drawing.text import table_of
from hyper_parallel.drawing.timeline import TimelineDrawing
from hyper_parallel.drawing.watch import piece_of, scene_of_parameters, scene_of_run
from hyper_parallel.platform import get_platform

# The sizes that a layout is drawn with when none are given.
_EXAMPLE_SIZE = 8


class Drawing:
    """A finished drawing: ``print`` it in a terminal, :meth:`save` it as SVG; notebooks show it by themselves."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    @property
    def svg(self) -> str:
        """The picture as the text of an SVG file."""
        return svg_of(self.scene)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to ``path``, which should end in ``.svg``."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.svg)

    def __rich__(self) -> Any:
        return table_of(self.scene)

    def __str__(self) -> str:
        from rich.console import Console

        text = io.StringIO()
        Console(file=text, width=160, color_system=None).print(table_of(self.scene))
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def __repr__(self) -> str:
        return f"Drawing({self.scene.title}, {len(self.scene.lines)} lines)"

    def _repr_svg_(self) -> str:
        return self.svg


@overload
def draw(what: Table | Timeline) -> TimelineDrawing: ...


@overload
def draw(what: Any, *args: Any, **kwargs: Any) -> Drawing: ...


def draw(what: Any, *args: Any, **kwargs: Any) -> Drawing | TimelineDrawing:
    """A drawing of a model, a distributed tensor, a layout, or a dict of names to these.

    With inputs behind a model, ``draw(model, ids)``, the model is run once on them without gradients, on every rank,
    and the drawing shows the way through it: what each module got and gave, and every collective between. Without
    inputs it shows where the parameters lie. A ``Layout`` has no sizes; give the tensor's shape behind it. The table
    or the timeline of a pipeline is drawn as time from left to right.

    >>> from hyper_parallel import Layout
    >>> mesh = Layout((2, 2), ("dp", "tp"), init_backend=False)
    >>> draw({"x": mesh("dp", "None"), "weight": mesh("None", "tp")})
    Drawing(layouts, 2 lines)
    """
    if isinstance(what, (Table, Timeline)) and not args and not kwargs:
        return TimelineDrawing(simulate(what) if isinstance(what, Table) else what)
    platform = get_platform()
    if isinstance(what, platform.Module):
        return Drawing(scene_of_run(what, args, kwargs) if args or kwargs else scene_of_parameters(what))
    if isinstance(what, Layout) and len(args) == 1 and not kwargs:
        return Drawing(Scene("layout", [_line("layout", _piece_of_layout(what, tuple(args[0])))]))
    if args or kwargs:
        raise TypeError(
            f"draw: inputs are for a model, but {type(what).__name__} is none; draw(model, *inputs), draw(tensor), "
            "draw(layout, shape) or draw({name: tensor or layout})"
        )
    if isinstance(what, Mapping):
        if not what:
            raise ValueError("draw: the dict is empty; give names with tensors or layouts")
        return Drawing(Scene("layouts", [_line(str(name), _piece(value, str(name))) for name, value in what.items()]))
    return Drawing(Scene("tensor" if isinstance(what, DTensor) else "layout", [_line("", _piece(what, "value"))]))


def _line(name: str, piece: Piece) -> ModuleLine:
    return ModuleLine(name, "tensor", (piece,))


def _piece(value: Any, name: str) -> Piece:
    if isinstance(value, Layout):
        return _piece_of_layout(value, None)
    piece = piece_of(value) if not isinstance(value, (dict, list, tuple)) else None
    if piece is None:
        raise TypeError(
            f"draw: {name!r} is a {type(value).__name__}; give a model, a tensor, a layout, or a dict of names to "
            "tensors or layouts"
        )
    return piece


def _piece_of_layout(layout: Layout, shape: tuple[int, ...] | None) -> Piece:
    if layout.dim_axes is None:
        raise ValueError(f"draw: {layout} describes a mesh and no tensor yet; call it with aliases first")
    if shape is None:
        shape = (_EXAMPLE_SIZE,) * layout.ndim
    if len(shape) != layout.ndim:
        raise ValueError(f"draw: shape {shape} has {len(shape)} dims, but {layout} is for {layout.ndim}")
    return Piece(shape, layout)
