"""A scene in a terminal: one row per module, a coloured row per collective."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from hyper_parallel.drawing.scene import CommLine, Line, ModuleLine, Piece, Scene, bytes_in_words, grouped, op_in_words

SHARDED_STYLE, PARTIAL_STYLE, COMM_STYLE = "bold cyan", "bold magenta", "yellow"


def table_of(scene: Scene) -> Table:
    """The scene as a table of rich."""
    ran = any(isinstance(line, CommLine) or line.left is not None for line in scene.lines)
    caption = "128/tp: this dim is sharded over the mesh axis tp; replicated otherwise"
    table = Table(title=_title(scene), caption=caption, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("module", no_wrap=True)
    table.add_column("parameters", no_wrap=True)
    if ran:
        table.add_column("in", no_wrap=True)
        table.add_column("out", no_wrap=True)
    for group in grouped(scene.lines):
        if group.title:
            table.add_row(Text(group.title, style="bold"))
        for line in group.lines:
            for row in _rows(line, "  " if group.title else "", ran):
                table.add_row(*row)
    return table


def _title(scene: Scene) -> str:
    meshes = ", ".join(
        " x ".join(f"{mesh.axis_label(axis)}={size}" for axis, size in enumerate(mesh.shape)) for mesh in scene.meshes
    )
    return f"{scene.title} on {meshes}" if meshes else scene.title


def _rows(line: Line, indent: str, ran: bool) -> Iterator[tuple[Any, ...]]:
    if isinstance(line, CommLine):
        what = f"{indent}~ {op_in_words(line.op)}, {bytes_in_words(line.sent_bytes)} sent"
        result = text_of(line.result) if line.result is not None else Text(line.reason, style="dim")
        yield Text(what, style=COMM_STYLE), "", "", result
        return
    yield from _module_rows(line, indent, ran)


def _module_rows(line: ModuleLine, indent: str, ran: bool) -> Iterator[tuple[Any, ...]]:
    for number, parameter in enumerate(line.parameters):
        name = f"{indent}{line.path or line.kind}" if number == 0 else ""
        cells: list[Any] = [name, Text(f"{parameter.name} ").append_text(text_of(parameter))]
        if ran and number == 0:
            cells += [text_of(line.entered), text_of(line.left)]
        yield tuple(cells)


def text_of(piece: Piece | None) -> Text:
    """``4 x 64/tp x 128`` with the sharded dims in colour."""
    if piece is None:
        return Text("")
    made = Text()
    shape, _, partial = str(piece).partition(", ")
    for number, dim in enumerate(shape.split(" x ")):
        made.append(" x " if number else "").append(dim, SHARDED_STYLE if "/" in dim else "")
    return made.append(f", {partial}", PARTIAL_STYLE) if partial else made
