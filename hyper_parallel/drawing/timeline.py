"""A step of a pipeline as a picture: a row for each rank, time from left to right, what is alive below it.

In a terminal a row is cut into bands that fit; ``.`` is idle time, ``3F2`` microbatch 2 in the forward of stage 3, and
``F2`` where a rank has one stage only.
"""

from __future__ import annotations

import os
from xml.sax.saxutils import escape

from hyper_parallel.core.pipeline_parallel.action import Action, Kind
from hyper_parallel.core.pipeline_parallel.memory import alive, peaks
from hyper_parallel.core.pipeline_parallel.simulate import Span, Timeline
from hyper_parallel.drawing.ink import COLOURS, FAINT, INK, LINE, opening, text

_FILL = {Kind.F: COLOURS[0], Kind.B: COLOURS[1], Kind.I: COLOURS[6], Kind.W: COLOURS[2]}
_WORDS = {Kind.F: "F forward", Kind.B: "B backward", Kind.I: "I input gradient", Kind.W: "W weight gradient"}
_WIDTH, _LEFT, _MARGIN, _ROW, _ALIVE = 940, 84, 24, 26, 20
_LETTER = 6.2  # Width of a small letter.


class TimelineDrawing:
    """A finished picture of a timeline: ``print`` it in a terminal, :meth:`save` it as SVG; notebooks show it."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline

    @property
    def svg(self) -> str:
        """The picture as the text of an SVG file."""
        return svg_of_timeline(self.timeline)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the picture to ``path``, which should end in ``.svg``."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.svg)

    def __str__(self) -> str:
        return text_of_timeline(self.timeline)

    def __repr__(self) -> str:
        return f"TimelineDrawing({title_of(self.timeline)})"

    def _repr_svg_(self) -> str:
        return self.svg


def title_of(timeline: Timeline) -> str:
    """``zbv: 4 ranks, 8 stages, 8 microbatches``."""
    table = timeline.table
    counts = ((table.num_ranks, "rank"), (table.stages.num_stages, "stage"), (table.microbatches, "microbatch"))
    words = (f"{count} {word}{'' if count == 1 else 'es' if word.endswith('h') else 's'}" for count, word in counts)
    return f"{table.name}: {', '.join(words)}"


def summary_of(timeline: Timeline) -> list[str]:
    """The figures of a timeline, a line each: bubble, idle times, what is alive."""
    chunks = [f"{peak.size:g}" for peak in peaks(timeline.table)]
    return [
        f"step {timeline.makespan:.4g}, bubble {100 * timeline.bubble:.1f} % ({timeline.extra:.4g} of it)",
        f"idle inside each rank: {' '.join(f'{abs(idle):.3g}' for idle in timeline.idle_inside)}",
        f"peak of activations on each rank, in chunks (one stage, one microbatch): {' '.join(chunks)}",
    ]


def text_of_timeline(timeline: Timeline, width: int = 120) -> str:
    """The picture as plain text, in bands of at most ``width`` letters."""
    head = f"rank {timeline.table.num_ranks - 1} "
    room = max(20, width - len(head))
    scale = _letters_per_time(timeline)
    rows = [_letters(timeline, spans, scale) for spans in timeline.spans]
    longest = max(map(len, rows))
    rows = [row.ljust(longest, ".") for row in rows]
    bands = [
        "\n".join(
            (f"rank {rank} ".ljust(len(head)) + row[start : start + room]).rstrip() for rank, row in enumerate(rows)
        )
        for start in range(0, longest, room)
    ]
    return "\n\n".join([title_of(timeline), *bands, "\n".join(summary_of(timeline))])


def _label(timeline: Timeline, action: Action) -> str:
    if timeline.table.stages.stages_per_rank > 1:
        return str(action)
    return "+".join(f"{step.kind.value}{step.microbatch}" for step in action.steps)


def _letters_per_time(timeline: Timeline) -> float:
    """So much room that the labels fit, but for actions that are far shorter than others."""
    spans = [span for row in timeline.spans for span in row if span.end > span.start]
    if not spans:
        return 1.0
    longest = max(span.end - span.start for span in spans)
    shown = [span for span in spans if span.end - span.start >= longest / 8]
    return max((len(_label(timeline, span.action)) + 1) / (span.end - span.start) for span in shown)


def _letters(timeline: Timeline, spans: tuple[Span, ...], scale: float) -> str:
    row = ""
    for span in spans:
        start, end = (round(time * scale) for time in (span.start, span.end))
        row = row.ljust(start, ".")
        row += _label(timeline, span.action)[: max(0, end - start)].ljust(end - start)
    return row


def svg_of_timeline(timeline: Timeline) -> str:
    """The text of an SVG file."""
    scale = (_WIDTH - _LEFT - _MARGIN) / (timeline.makespan or 1.0)
    body: list[str] = []
    y = 96.0
    most = max(peak.size for peak in peaks(timeline.table)) or 1.0
    for rank, spans in enumerate(timeline.spans):
        body.append(text(_MARGIN, y + 17, f"rank {rank}", size=12, mono=True))
        width = _WIDTH - _LEFT - _MARGIN
        body.append(f'<rect x="{_LEFT}" y="{y:g}" width="{width}" height="{_ROW}" fill="#f6f8fa" stroke="{LINE}"/>')
        for span in spans:
            body += _boxes(timeline, span, y, scale)
        body += _alive_below(timeline, rank, y + _ROW + 2, scale, most)
        y += _ROW + _ALIVE + 14
    y = _legend(body, timeline, y + 6)
    figures = summary_of(timeline)
    head = [
        opening(_WIDTH, y),
        f"<title>{escape(title_of(timeline))}</title>",
        f'<rect x="0.5" y="0.5" width="{_WIDTH - 1}" height="{y - 1:g}" rx="10" fill="#ffffff" stroke="{LINE}"/>',
        text(_MARGIN, 34, title_of(timeline), size=18, weight=600),
        text(_MARGIN, 54, f"{figures[0]}; {figures[1]}", size=12, fill=FAINT),
        text(_MARGIN, 72, figures[2], size=12, fill=FAINT),
    ]
    return "\n".join([*head, *body, "</svg>", ""])


def _boxes(timeline: Timeline, span: Span, y: float, scale: float) -> list[str]:
    x, width = _LEFT + span.start * scale, (span.end - span.start) * scale
    steps = span.action.steps
    height = _ROW / len(steps)
    drawn = []
    for number, step in enumerate(steps):
        turn = timeline.table.stages.stages_of(span.place.rank).index(step.stage)
        top = y + number * height
        drawn.append(
            f'<rect x="{x:.6g}" y="{top:g}" width="{width:.6g}" height="{height:g}" fill="{_FILL[step.kind]}" '
            f'fill-opacity="{max(0.35, 1 - 0.4 * turn):g}" stroke="#ffffff" stroke-width="0.6">'
            f"<title>{step}, {span.start:.4g} to {span.end:.4g}</title></rect>"
        )
        words = str(step.microbatch)
        if width > _LETTER * len(words) + 2:
            size = 11 if len(steps) == 1 else 9.5
            drawn.append(text(x + width / 2, top + height / 2 + 4, words, size=size, anchor="middle", fill=INK))
    return drawn


def _alive_below(timeline: Timeline, rank: int, y: float, scale: float, most: float) -> list[str]:
    """What is alive over time, as an area as high as the peak of all ranks."""
    row = alive(timeline.table)[rank]
    points = [(float(_LEFT), 0.0)]
    for span in timeline.spans[rank]:
        during, behind = row[span.place.line]
        for time, size in ((span.start, points[-1][1]), (span.start, during), (span.end, during), (span.end, behind)):
            points.append((_LEFT + time * scale, size))
    points.append((points[-1][0], 0.0))
    path = " ".join(f"{x:.6g},{y + _ALIVE * (1 - size / most):.5g}" for x, size in points)
    return [f'<polygon points="{path}" fill="{COLOURS[7]}" fill-opacity="0.55"/>']


def _legend(body: list[str], timeline: Timeline, y: float) -> float:
    x = float(_MARGIN)
    kinds = {step.kind for row in timeline.spans for span in row for step in span.action.steps}
    entries = [(_FILL[kind], words) for kind, words in _WORDS.items() if kind in kinds]
    if timeline.table.stages.stages_per_rank > 1:
        entries.append(("#ffffff", "paler: a rank's later stages"))
    for colour, words in [*entries, (COLOURS[7], "activations alive"), ("#f6f8fa", "idle")]:
        stroke = f' stroke="{LINE}"' if colour in ("#f6f8fa", "#ffffff") else ""
        body.append(f'<rect x="{x:g}" y="{y:g}" width="14" height="12" rx="2" fill="{colour}"{stroke}/>')
        body.append(text(x + 20, y + 10, words, size=11, fill=FAINT))
        x += 38 + _LETTER * len(words)
    return y + 32
