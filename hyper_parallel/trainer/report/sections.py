"""The parts of the page that are tables and bars: everything that a user has written is escaped here."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from hyper_parallel.analysis.byte_sizes import byte_text
from hyper_parallel.trainer.report.run_data import RunData
from hyper_parallel.trainer.report.timeline import MOST_RANKS, legend, timeline

__all__ = ["duration", "sections_of", "table", "tiles", "verdict_of"]

_MOST_RANKS = 16  # of the table of memory
_MOST_ROWS = 40
_MOST_LAYOUT = 80_000  # characters
_FORECAST_KINDS = ("parameters", "gradients", "optimizer_state", "activations")
_ACTIVE = re.compile(r"<script|<foreignobject|<style|\son\w+\s*=|href|url\((?!#)|<image", re.IGNORECASE)
_MEMORY_COLOURS = {"parameters": 0, "gradients": 1, "optimizer state": 2, "activations": 3, "logits": 4}
_PHASES = {
    "data": ("waiting for data", 5),
    "forward_backward": ("forward and backward", 0),
    "optimizer": ("optimizer", 2),
    "eval": ("evaluation", 3),
    "save": ("waiting for saves", 4),
}


def duration(seconds: float) -> str:
    """
    >>> duration(0.25), duration(75), duration(7300)
    ('250 ms', '1 min 15 s', '2 h 1 min')
    """
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.3g} s"
    minutes, left = divmod(round(seconds), 60)
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min {left} s"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str] = ()) -> str:
    """A table of texts."""
    kinds = [' class="number"' if column in numbers else "" for column in columns]
    head = "".join(f"<th{kind}>{escape(column)}</th>" for column, kind in zip(columns, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def verdict_of(run: RunData, label: str = "") -> str:
    """The line that says how it went, with all of the reason below it if that is long."""
    head, _, rest = run.verdict.partition(": ")
    text = f"<b>{escape(label + head)}</b><span>{escape(rest)}</span>"
    reason = str(run.end.get("reason") or "")
    more = f"<pre>{escape(reason[:4000])}</pre>" if run.status == "failed" and "\n" in reason.strip() else ""
    return f'<div class="verdict {run.status}">{text}</div>{more}'


def tiles(run: RunData) -> str:
    """The figures that one looks for first."""
    steps, start = run.of("step"), run.start
    found: list[tuple[str, str, str]] = []
    if steps:
        last = steps[-1]
        found.append(("loss", f"{last['loss']:.4g}", f"of step {last['step']}"))
    evaluations = run.of("eval")
    if evaluations:
        best = min(evaluations, key=lambda one: one["loss"])
        found.append(("best evaluation", f"{best['loss']:.4g}", f"of step {best['step']}"))
    speeds = sorted(run.series("tokens_per_second")[1])
    if speeds:
        padding = sum(one["padding"] for one in steps)
        tokens = sum(one["tokens"] for one in steps)
        share = padding / max(1, padding + tokens)
        found.append(("tokens/s, median", f"{speeds[len(speeds) // 2]:,.0f}", f"valid; {share:.1%} padding"))
    shares = sorted(run.series("mfu")[1])
    if shares:
        found.append(("MFU, median", f"{shares[len(shares) // 2]:.1%}", _peak_words(start)))
    if run.peaks:
        found.append(("peak memory", byte_text(max(run.peaks.values())), "of the fullest rank"))
    if steps:
        found.append(("time", duration(run.seconds), f"{len(steps)} steps"))
    restarts = max((one.get("attempt", 0) for one in run.of("start")), default=0)
    if restarts:
        found.append(("restarts", str(restarts), "see Starts"))
    cells = (
        f'<div class="tile"><span>{escape(title)}</span><b>{escape(figure)}</b><i>{escape(note)}</i></div>'
        for title, figure, note in found
    )
    return f'<div class="tiles">{"".join(cells)}</div>'


def _peak_words(start: Any) -> str:
    peak = start.get("peak_flops")
    origin = "measured CPU" if str(start.get("peak_from", "")).startswith("measured") else "device"
    return "" if peak is None else f"of {_flops_text(peak)}, {origin}"


def _flops_text(number: float) -> str:
    return f"{number / 1e12:.4g} TFLOP/s" if number >= 1e12 else f"{number / 1e9:.4g} GFLOP/s"


def sections_of(run: RunData) -> list[str]:
    """All sections behind the curves, those with nothing to say left out."""
    made = [
        ("Where the time went", _time(run)),
        ("Memory per rank", _memory(run)),
        ("Communication of one step", _communication(run)),
        ("One step", _timeline(run)),
    ]
    left = [("Layout of the parameters", _layout(run))]
    right = [("Starts", _starts(run)), ("Checkpoints", _checkpoints(run)), ("Environment", _environment(run))]
    pair = f'<div class="pair"><div>{_joined(left)}</div><div>{_joined(right)}</div></div>'
    return [_joined(made), pair if run.layout else _joined(right), _joined([("Config", _config(run))])]


def _joined(sections: Sequence[tuple[str, str]]) -> str:
    return "".join(f"<section><h2>{title}</h2>{body}</section>" for title, body in sections if body)


def _bar(pieces: Sequence[tuple[str, float, int]], whole: float) -> str:
    cells = (
        f'<div title="{escape(name)}" style="width:{100 * size / (whole or 1):.2f}%;background:var(--c{colour})"></div>'
        for name, size, colour in pieces
        if size > 0
    )
    return f'<div class="bar">{"".join(cells)}</div>'


def _keys(keys: Iterable[tuple[str, int]]) -> str:
    spans = (
        f'<span><i class="key" style="background:var(--c{colour})"></i>{escape(name)}</span>' for name, colour in keys
    )
    return f'<p class="legend keys">{"".join(spans)}</p>'


def _time(run: RunData) -> str:
    sums = dict.fromkeys(_PHASES, 0.0)
    for one in run.of("step"):
        for name, seconds in one["seconds"].items():
            if name in sums:
                sums[name] += seconds
    whole = run.seconds
    if not whole:
        return ""
    pieces = [(f"{words}: {duration(sums[name])}", sums[name], colour) for name, (words, colour) in _PHASES.items()]
    keys = [(f"{text}, {size / whole:.1%}", colour) for text, size, colour in pieces if size]
    return _bar(pieces, whole) + _keys(keys)


def _memory(run: RunData) -> str:
    """Bars of what is kept, and on devices of all that was taken; a process on a CPU has much besides the run."""
    peaks, is_cpu = run.peaks, run.last("environment").get("device") == "cpu"
    if not peaks:
        return ""
    by_rank = {part["rank"]: part["memory"] for part in run.parts}
    rows = _forecast_row(run)
    for rank, peak in sorted(peaks.items())[:_MOST_RANKS]:
        kinds = {name: size for name, size in by_rank.get(rank, {}).items() if name != "peak"}
        rows.append((f"rank {rank}", kinds, peak, ""))
    whole = max(sum(kinds.values()) if is_cpu else max(peak, sum(kinds.values())) for _, kinds, peak, _ in rows)
    names = list(dict.fromkeys(kind for _, kinds, _, _ in rows for kind in kinds))
    colours = {name: _MEMORY_COLOURS.get(name, 6 + number % 2) for number, name in enumerate(names)}
    body = []
    for label, kinds, peak, style in rows:
        state, rest = sum(kinds.values()), max(0, peak - sum(kinds.values()))
        pieces = [(f"{name}: {byte_text(size)}", size, colours[name]) for name, size in kinds.items()]
        if not is_cpu:
            pieces.append((f"the rest: {byte_text(rest)}", rest, 5))
        sizes = (byte_text(size) if size else "" for size in (state, peak))
        cells = "".join(f'<td class="number">{size}</td>' for size in sizes)
        body.append(f'<tr class="{style}"><td>{label}</td><td class="wide">{_bar(pieces, whole)}</td>{cells}</tr>')
    shown: Mapping[str, int] = next((kinds for _, kinds, _, style in rows if kinds and not style), {})
    keys = [(f"{name} {byte_text(shown[name])}" if name in shown else name, colours[name]) for name in names]
    notes = [_forecast_words(run)]
    if is_cpu:
        notes.append("A peak is that of a whole process: Python, the framework and activations are in it.")
    else:
        keys.append(("the rest: activations, buffers", 5))
    if len(peaks) > _MOST_RANKS:
        notes.append(f"{len(peaks) - _MOST_RANKS} more ranks are in metrics.jsonl.")
    head = '<tr><th></th><th></th><th class="number">by kind</th><th class="number">peak</th></tr>'
    note = f'<p class="faint">{escape(" ".join(filter(None, notes)))}</p>'
    return f'<div class="scroll"><table>{head}{"".join(body)}</table></div>{_keys(keys)}{note}'


def _forecast_row(run: RunData) -> list[tuple[str, dict[str, int], int, str]]:
    said = run.last("forecast")
    kinds = {name.replace("_", " "): said.get(name) for name in _FORECAST_KINDS}
    known = {name: size for name, size in kinds.items() if size is not None}
    return [("forecast", known, said.get("peak") or 0, "forecast")] if known else []


def _forecast_words(run: RunData) -> str:
    state = run.last("forecast_measured").get("state")
    if state is None:
        return ""
    return (
        f"Parameters and optimizer state of rank 0: {byte_text(state['measured'])} measured, "
        f"{byte_text(state['forecast'])} forecast ({state['error']:+.1%})."
    )


def _communication(run: RunData) -> str:
    if not run.parts:
        return ""
    rows: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for part in run.parts:
        for one in part["communication"]:
            rows.setdefault((one["kind"], one["axes"]), []).append(one)
    if not rows:
        return '<p class="faint">None: every rank works by itself.</p>'
    ordered = sorted(rows.items(), key=lambda one: -max(row["sent"] for row in one[1]))
    cells = [
        [
            kind,
            axes,
            str(max(row["calls"] for row in found)),
            byte_text(max(row["sent"] for row in found)),
            duration(sum(row["seconds"] for row in found) / len(found)),
        ]
        for (kind, axes), found in ordered
    ]
    columns = ["collective", "mesh axes", "calls", "sent by a rank", "time, mean of ranks"]
    note = (
        f'<p class="faint">Step {run.parts[0]["step"]}, {len(run.parts)} ranks. Time is from the call to its end, '
        "waiting for slower ranks among it; of collectives in flight, to the end of the wait.</p>"
    )
    return table(columns, cells, columns[2:]) + note


def _timeline(run: RunData) -> str:
    if not run.parts:
        return ""
    shown = f", the first {MOST_RANKS} of {len(run.parts)} ranks" if len(run.parts) > MOST_RANKS else ""
    return (
        f'<p class="faint">Step {run.parts[0]["step"]}{shown}: phases, the model\'s forward, collectives.</p>'
        f'<div class="scroll timeline">{timeline(run.parts)}</div>{_keys(legend(run.parts))}'
    )


def _layout(run: RunData) -> str:
    if not run.layout:
        return ""
    if _ACTIVE.search(run.layout):
        return '<p class="faint">layout.svg is not the one that was drawn: it is left out.</p>'
    if len(run.layout) > _MOST_LAYOUT:
        return '<p class="faint">The picture is large: it is in layout.svg of the run\'s folder.</p>'
    picture = run.layout.replace(' xmlns="http://www.w3.org/2000/svg"', "")
    return f'<div class="scroll layout">{picture}</div>'


def _starts(run: RunData) -> str:
    rows = []
    for one in run.of("start")[-_MOST_ROWS:]:
        resumed = one.get("resumed_from")
        rows.append(
            [
                _moment(one["time"]),
                f"restart {one['attempt']}" if one.get("attempt") else "started",
                f"step {one['step']}" if resumed else "the beginning",
                f"{one['ranks']} rank{'s' * (one['ranks'] > 1)}, {one['degrees']}",
                str(one.get("repeated") or ""),
            ]
        )
    return table(["when", "how", "from", "on", "steps done again"], rows) if rows else ""


def _checkpoints(run: RunData) -> str:
    saves = run.of("save")
    rows = [[f"step {one['step']}", _moment(one["time"]), duration(one["seconds"])] for one in saves[-_MOST_ROWS:]]
    left = len(saves) - len(rows)
    note = f'<p class="faint">{left} earlier ones are in metrics.jsonl.</p>' if left > 0 else ""
    return table(["checkpoint", "when", "training waited"], rows, ["training waited"]) + note if rows else ""


def _config(run: RunData) -> str:
    by_section: dict[str, list[str]] = {}
    for one in run.config:
        style = "" if one.origin == "default" else ' class="given"'
        by_section.setdefault(one.section, []).append(
            f"<tr{style}><td>{escape(one.key)}</td><td>{escape(one.value)}</td><td>{escape(one.origin)}</td></tr>"
        )
    tables = (
        f"<div><h3>{escape(section)}</h3><table>{''.join(rows)}</table></div>" for section, rows in by_section.items()
    )
    return f'<div class="config">{"".join(tables)}</div>' if by_section else ""


def _environment(run: RunData) -> str:
    facts, start = run.last("environment"), run.start
    if not facts:
        return ""
    rows = [
        ["framework", facts["framework"]],
        ["versions", ", ".join(f"{name} {version}" for name, version in facts["versions"].items())],
        ["hosts", ", ".join(run.hosts)],
        ["device", f"{facts['device']}, {facts['cores']} cores for each process of rank 0's host"],
        ["system", facts["system"]],
    ]
    if start.get("flops_per_token"):
        peak = start.get("peak_flops")
        rows.append(["operations of a token", f"{start['flops_per_token']:.4g}"])
        words = "unknown" if peak is None else f"{_flops_text(peak)} a rank"
        rows.append(["peak for MFU", f"{words}, {start.get('peak_from', '')}"])
    return table(["", ""], rows)


def _moment(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")
