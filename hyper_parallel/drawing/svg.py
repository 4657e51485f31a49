"""A scene as SVG: modules from top to bottom, tensors as tiles whose colours are the ranks that hold the parts.

A tile shows the last two dims of a tensor, rows and columns. Grey is whole on every rank, stripes are parts, hatching
is a partial value, a reduction still to do, a dashed outline is a plain tensor.
"""

from __future__ import annotations

from collections.abc import Iterable
from xml.sax.saxutils import escape

from hyper_parallel.drawing.ink import COLOURS, FAINT, INK, LINE, REPLICATED, opening, text
from hyper_parallel.drawing.scene import (
    CommLine,
    Group,
    ModuleLine,
    Piece,
    Scene,
    bytes_in_words,
    grouped,
    op_in_words,
)

_COMM_FILL, _COMM_INK = "#fff1d6", "#8a4b00"
_WIDTH, _MARGIN = 940, 24
_NAME_X, _PARAMETER_X, _IN_X, _OUT_X = 40, 236, 496, 712
_TILE_WIDTH, _TILE_HEIGHT = 42, 30
_ROW_HEIGHT, _TITLE_HEIGHT = 46, 34


def svg_of(scene: Scene) -> str:
    """The text of an SVG file."""
    ran = any(isinstance(line, CommLine) or line.left is not None for line in scene.lines)
    width = _WIDTH if ran else _IN_X
    body: list[str] = []
    y = 76.0
    for group in grouped(scene.lines):
        y = _draw_group(body, group, y, width)
    y = _draw_legend(body, scene, y + 10)
    head = [
        opening(width, y),
        f"<title>{escape(scene.title)}: the layouts of its tensors</title>",
        '<defs><pattern id="partial" width="6" height="6" patternTransform="rotate(45)" patternUnits="userSpaceOnUse">'
        f'<rect width="6" height="6" fill="{REPLICATED}"/><line x1="0" y1="0" x2="0" y2="6" stroke="{INK}" '
        'stroke-opacity="0.55" stroke-width="2"/></pattern></defs>',
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{y - 1:g}" rx="10" fill="#ffffff" stroke="{LINE}"/>',
        text(_MARGIN, 34, scene.title, size=18, weight=600),
        text(_MARGIN, 54, _subtitle(scene, ran), size=12, fill=FAINT),
    ]
    return "\n".join([*head, *body, "</svg>", ""])


def _subtitle(scene: Scene, ran: bool) -> str:
    meshes = [
        " x ".join(f"{mesh.axis_label(axis)} = {size}" for axis, size in enumerate(mesh.shape)) for mesh in scene.meshes
    ]
    where = f"mesh {', '.join(meshes)}; " if meshes else ""
    return where + ("one forward pass, from top to bottom" if ran else "parameters")


def _draw_group(body: list[str], group: Group, y: float, width: int) -> float:
    """Draw a group of lines from ``y`` downwards; where it ends."""
    if group.title:
        y += 8
        height = _TITLE_HEIGHT + sum(_height(line) for line in group.lines) + 6
        body.append(
            f'<rect x="{_MARGIN - 8}" y="{y:g}" width="{width - 2 * _MARGIN + 16}" height="{height:g}" rx="8" '
            f'fill="#f6f8fa" stroke="{LINE}"/>'
        )
        body.append(text(_MARGIN + 4, y + 22, group.title, size=13, weight=600))
        y += _TITLE_HEIGHT
    for line in group.lines:
        if isinstance(line, CommLine):
            _draw_collective(body, line, y)
        else:
            _draw_module(body, line, y)
        y += _height(line)
    return y + (16 if group.title else 0)


def _height(line: ModuleLine | CommLine) -> float:
    return _ROW_HEIGHT * (1 if isinstance(line, CommLine) else max(1, len(line.parameters)))


def _draw_module(body: list[str], line: ModuleLine, y: float) -> None:
    body.append(text(_NAME_X, y + 20, _shortened(line.path or line.kind, 24), size=13, mono=True))
    body.append(text(_NAME_X, y + 36, line.kind if line.path else "", size=10.5, fill=FAINT))
    for number, parameter in enumerate(line.parameters):
        _draw_piece(body, parameter, _PARAMETER_X, y + number * _ROW_HEIGHT, parameter.name)
    if line.entered is not None:
        _draw_piece(body, line.entered, _IN_X, y, "in")
    if line.left is not None:
        _draw_arrow(body, y)
        _draw_piece(body, line.left, _OUT_X, y, "out")


def _draw_collective(body: list[str], line: CommLine, y: float) -> None:
    left, right = _IN_X - 6, _OUT_X - 32
    words = f"{op_in_words(line.op)}, {bytes_in_words(line.sent_bytes)}"
    body.append(
        f'<rect x="{left}" y="{y + 8:g}" width="{right - left}" height="26" rx="13" fill="{_COMM_FILL}" '
        'stroke="#e8b45a"/>'
    )
    body.append(text((left + right) / 2, y + 25, words, size=12, weight=600, fill=_COMM_INK, anchor="middle"))
    if line.result is None:
        body.append(text(_OUT_X, y + 25, _shortened(line.reason, 34), size=11, fill=FAINT))
    else:
        _draw_arrow(body, y)
        _draw_piece(body, line.result, _OUT_X, y, "out")


def _draw_arrow(body: list[str], y: float) -> None:
    middle = y + 6 + _TILE_HEIGHT / 2
    path = f"M{_OUT_X - 28} {middle:g}H{_OUT_X - 8}m-6 -4l6 4l-6 4"
    body.append(f'<path d="{path}" fill="none" stroke="{FAINT}" stroke-width="1.4"/>')


def _draw_piece(body: list[str], piece: Piece, x: float, y: float, label: str) -> None:
    body += _tile(piece, x, y + 6)
    text_x = x + _TILE_WIDTH + 10
    body.append(text(text_x, y + 18, label, size=10.5, fill=FAINT))
    shape, _, partial = str(piece).partition(", ")
    body.append(text(text_x, y + 33, shape, size=12, mono=True))
    if partial:
        body.append(text(text_x + 24, y + 18, partial, size=10.5, fill="#aa3377"))


def _tile(piece: Piece, x: float, y: float) -> Iterable[str]:
    """The last two dims as a rectangle, in the colours of the ranks that hold its parts."""
    size = f'width="{_TILE_WIDTH}" height="{_TILE_HEIGHT}"'
    if piece.layout is None:
        yield f'<rect x="{x:g}" y="{y:g}" {size} rx="3" fill="none" stroke="{FAINT}" stroke-dasharray="3 3"/>'
        return
    ndim = len(piece.shape)
    rows = piece.intervals(ndim - 2) if ndim > 1 else [(0, 1, 0)]
    columns = piece.intervals(ndim - 1) if ndim else [(0, 1, 0)]
    is_sharded = len(rows) * len(columns) > 1
    backdrop = "url(#partial)" if piece.partial and not is_sharded else REPLICATED
    yield f'<rect x="{x:g}" y="{y:g}" {size} rx="3" fill="{backdrop}" stroke="{INK}" stroke-opacity="0.35"/>'
    if not is_sharded:
        return
    height = max(1, sum(length for _, length, _ in rows))
    width = max(1, sum(length for _, length, _ in columns))
    for top, tall, row in rows:
        for left, wide, column in columns:
            if tall and wide:
                yield (
                    f'<rect x="{x + _TILE_WIDTH * left / width:.4g}" y="{y + _TILE_HEIGHT * top / height:.4g}" '
                    f'width="{_TILE_WIDTH * wide / width:.4g}" height="{_TILE_HEIGHT * tall / height:.4g}" '
                    f'fill="{COLOURS[(row * len(columns) + column) % len(COLOURS)]}" stroke="#ffffff" '
                    'stroke-width="0.6"/>'
                )
    if piece.partial:
        yield f'<rect x="{x:g}" y="{y:g}" {size} rx="3" fill="url(#partial)" fill-opacity="0.4"/>'


def _draw_legend(body: list[str], scene: Scene, y: float) -> float:
    parts = max((mesh.size() for mesh in scene.meshes), default=1)
    x = float(_MARGIN)
    entries = [(COLOURS[part], f"part {part}") for part in range(min(parts, len(COLOURS)))] if parts > 1 else []
    for colour, words in [*entries, (REPLICATED, "replicated"), ("url(#partial)", "partial sum")]:
        body.append(f'<rect x="{x:g}" y="{y:g}" width="14" height="12" rx="2" fill="{colour}"/>')
        body.append(text(x + 20, y + 10, words, size=11, fill=FAINT))
        x += 38 + 6.2 * len(words)
    return y + 32


def _shortened(text: str, length: int) -> str:
    return text if len(text) <= length else "..." + text[-(length - 3) :]
