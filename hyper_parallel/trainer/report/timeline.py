"""The recorded step as a picture: a band a rank, phases above modules above collectives, on one clock."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

__all__ = ["timeline"]

MOST_RANKS = 8
_MOST_BOXES = 600
_WIDTH, _LEFT, _TOP = 1060, 92, 22
_LANES = {"phases": (0, 13), "model": (15, 8), "modules": (15, 8), "collectives": (25, 13), "in flight": (40, 5)}
_BAND = 60
_COLOURS = {"data": 5, "forward and backward": 0, "optimizer": 2, "forward": 7}
_KINDS = {"all-reduce": 1, "all-gather": 3, "reduce-scatter": 4, "all-to-all": 6}

Box = tuple[str, str, float, float, int]  # row, name, begin, end, how many


def timeline(parts: Sequence[dict[str, Any]]) -> str:
    """SVG of the parts that ranks have written, the first few of them."""
    shown = parts[:MOST_RANKS]
    first = min(part["begin"] for part in shown)
    bands = [(part, (part["begin"] - first) * 1e6) for part in shown]
    length = max((end + shift for part, shift in bands for *_, end in part["spans"]), default=1.0)
    scale = (_WIDTH - _LEFT - 8) / length
    height = _TOP + _BAND * len(bands) + 4
    out = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="timeline of a step">']
    for at in _ticks(length / 1e3):
        x = _LEFT + at * 1e3 * scale
        out.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 6}" y2="{height}"/>')
        out.append(f'<text x="{x:.1f}" y="11" text-anchor="middle">{at:g} ms</text>')
    gap = length / 2000
    boxes = [_merged(part["spans"], gap) for part in shown]
    while sum(map(len, boxes)) > _MOST_BOXES:
        gap *= 1.6
        boxes = [_merged(part["spans"], gap) for part in shown]
    for number, (part, shift) in enumerate(bands):
        y = _TOP + number * _BAND
        where = " ".join(f"{axis} {place}" for axis, place in part["place"].items() if _varies(parts, axis))
        out.append(f'<text class="rank" x="0" y="{y + 11}">rank {part["rank"]}</text>')
        out.append(f'<text x="0" y="{y + 25}">{escape(where)}</text>')
        for row, name, begin, end, count in boxes[number]:
            lane, size = _LANES[row]
            width = max(0.8, (end - begin) * scale - (row == "modules"))
            several = f"{count} operations, the first " if count > 1 else ""
            title = f"{several}{name}: {(end - begin) / 1e3:.3g} ms"
            out.append(
                f'<rect x="{_LEFT + (begin + shift) * scale:.1f}" y="{y + lane}" height="{size}" '
                f'width="{width:.1f}" fill="var(--c{_colour(row, name)})"'
                f"{_opacity(row)}><title>{escape(title)}</title></rect>"
            )
    return "".join([*out, "</svg>"])


def legend(parts: Sequence[dict[str, Any]]) -> list[tuple[str, int]]:
    """What the colours mean, as far as they occur."""
    found: dict[str, int] = {}
    for part in parts[:MOST_RANKS]:
        for row, name, *_ in part["spans"]:
            words = {"modules": "forward of blocks"}.get(row, name.split(" over ")[0])
            found.setdefault(words, _colour(row, name))
    return list(found.items())


def _varies(parts: Sequence[dict[str, Any]], axis: str) -> bool:
    return len({part["place"].get(axis) for part in parts}) > 1


def _colour(row: str, name: str) -> int:
    if row in ("collectives", "in flight"):
        return _KINDS.get(name.split(" over ")[0], 6)
    return 7 if row == "modules" else _COLOURS.get(name, 5)


def _opacity(row: str) -> str:
    return {"model": ' opacity=".35"', "in flight": ' opacity=".6"'}.get(row, "")


def _merged(spans: Sequence[Sequence[Any]], gap: float) -> list[Box]:
    """Neighbours of a row that are alike and closer than ``gap`` as one box; modules keep their borders."""
    found: list[Box] = []
    last: dict[tuple[str, str], int] = {}
    for row, name, begin, end in sorted(spans, key=lambda span: span[2]):
        kind = name.split(" over ")[0] if row in ("collectives", "in flight") else ""
        place = last.get((row, kind))
        if place is not None and begin - found[place][3] < gap and row not in ("phases", "model"):
            box = found[place]
            if row != "modules" or end - begin < gap:
                found[place] = (row, box[1], box[2], max(end, box[3]), box[4] + 1)
                continue
        last[row, kind] = len(found)
        found.append((row, name, begin, end, 1))
    return found


def _ticks(length: float) -> list[float]:
    size = 1e-3
    while length / size > 10:
        size *= 2.5 if f"{size:e}".startswith("2") else 2
    return [number * size for number in range(int(length / size) + 1)]
