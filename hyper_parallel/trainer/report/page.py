"""``report.html``: one file about a run, or about two beside each other, that needs no other file and no network."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from pathlib import Path
from typing import Any

from hyper_parallel.trainer.metrics import METRICS_FILE, append_event
from hyper_parallel.trainer.report.comparison import comparison_of
from hyper_parallel.trainer.report.run_data import RunData
from hyper_parallel.trainer.report.sections import sections_of, tiles, verdict_of
from hyper_parallel.trainer.report.series import curve

__all__ = ["COMPARISON_FILE", "REPORT_FILE", "page", "write_failure", "write_report"]

REPORT_FILE = "report.html"
COMPARISON_FILE = "comparison.html"
_WIDTH, _WIDE = 560, 1160
_HERE = Path(__file__).parent
# id, title, name in metrics.jsonl, and how to draw it
_CHARTS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("loss", "Loss", "loss", {"width": _WIDE}),
    ("grad_norm", "Gradient norm", "grad_norm", {}),
    ("lr", "Learning rate", "lr", {"zero": True}),
    ("tokens_per_second", "Valid tokens/s", "tokens_per_second", {"zero": True}),
    ("mfu", "MFU", "mfu", {"zero": True, "unit": "%", "scale": 100}),
    ("padding", "Padding, tokens a step", "padding", {"zero": True}),
]
_COLOURS = (0, 6, 2, 3, 7, 5)


def write_report(folders: Sequence[Path], path: Path | None = None) -> Path:
    """Write the page of a run into its folder, or of two runs into that of the second; where it is."""
    runs = [RunData.read(Path(folder)) for folder in folders]
    if path is None:
        path = runs[-1].folder / (REPORT_FILE if len(runs) == 1 else COMPARISON_FILE)
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(page(runs), encoding="utf-8")
    os.replace(temporary, path)
    return path


def write_failure(folder: Path, reason: str) -> None:
    """Note down why the ranks of a run died, as who started them knows it, and write the page."""
    with suppress(OSError, ValueError, KeyError):  # The failure is more than a page about it.
        step = RunData.read(folder).step if (folder / METRICS_FILE).is_file() else 0
        append_event(folder, "end", step=step, status="failed", reason=reason)
        write_report([folder])


def page(runs: Sequence[RunData]) -> str:
    """The text of the page about one run, or two."""
    try:
        return _page(runs)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        folders = " or ".join(f"'{run.folder}'" for run in runs)
        raise ValueError(
            f"the files of the run in {folders} have values that no run writes ({type(error).__name__}: {error}); the "
            "lines of metrics.jsonl or the files in recorded/ were changed or damaged"
        ) from error


def _page(runs: Sequence[RunData]) -> str:
    charts = _charts(runs)
    if len(runs) == 1:
        (run,) = runs
        title, body = run.name, [_head(run), verdict_of(run), tiles(run), _drawn(charts), *sections_of(run)]
    else:
        title = " and ".join(run.name for run in runs)
        names = _labels(runs)
        verdicts = [verdict_of(run, f"{name}: ") for run, name in zip(runs, names, strict=True)]
        body = [f"<h1>{escape(' against '.join(names))}</h1>", *verdicts, _drawn(charts), *comparison_of(runs, names)]
    data = json.dumps({"charts": charts}, separators=(",", ":")).replace("<", "\\u003c")
    style, script = ((_HERE / name).read_text(encoding="utf-8") for name in ("style.css", "script.js"))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n<footer>HyperParallel. The numbers are those of metrics.jsonl; curves of more than 2,000 points keep the "
        f'least and the greatest of each stretch.</footer>\n<script type="application/json" id="data">{data}</script>'
        f"\n<script>{script}</script></body></html>\n"
    )


def _head(run: RunData) -> str:
    start = run.start
    words = []
    if start:
        words = [
            f"{start['model']}, {start['parameters']:,} parameters",
            f"{start['ranks']} rank{'s' * (start['ranks'] > 1)} ({start['degrees'] or 'one process'})",
            f"{start['batch']} samples a step",
            start["data"],
        ]
    damaged = f'<p class="faint">Left out, as damaged: {escape(", ".join(run.damaged))}</p>' if run.damaged else ""
    return f'<h1>{escape(run.name)}</h1><p class="faint">{escape(" · ".join(words))}</p>{damaged}'


def _labels(runs: Sequence[RunData]) -> list[str]:
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def _charts(runs: Sequence[RunData]) -> list[dict[str, Any]]:
    names = _labels(runs) if len(runs) > 1 else []
    charts = []
    for place, (key, title, name, options) in enumerate(_CHARTS):
        series = []
        for number, run in enumerate(runs):
            steps, values = run.series(name)
            is_empty = not steps or (key == "padding" and not any(values))
            label = "training" if key == "loss" else title.lower()
            if names:
                label = f"{names[number]}, training" if key == "loss" else names[number]
            if not is_empty:
                series.append(curve(label, steps, values, number if names else _COLOURS[place], dashed=number > 0))
            if key == "loss" and run.of("eval"):
                label = f"{names[number]}, evaluation" if names else "evaluation"
                series.append(curve(label, *run.series("loss", "eval"), 2 + number if names else 1, dots=True))
        if series:
            charts.append({"id": key, "title": title, "width": _WIDTH, **options, "series": series})
    return charts


def _drawn(charts: Sequence[dict[str, Any]]) -> str:
    """Empty charts, which the script draws from the data."""
    boxes = []
    for chart in charts:
        keys = "".join(
            f'<span><i class="key" style="background:var(--c{one["colour"]})"></i>{escape(one["name"])}</span>'
            for one in chart["series"]
        )
        key = chart["id"]
        boxes.append(
            f'<div class="chart{" wide" * (chart["width"] > _WIDTH)}"><header><h3>{escape(chart["title"])}</h3>'
            f'<span class="legend">{keys if len(chart["series"]) > 1 else ""}</span>'
            f'<button id="{key}-log" type="button" aria-pressed="false">log</button></header>'
            f'<svg id="{key}" viewBox="0 0 {chart["width"]} 230" role="img" aria-label="{escape(chart["title"])} by '
            'step"></svg>'
            f'<div class="tip" id="{key}-tip" hidden></div></div>'
        )
    if not boxes:
        return "<section><p>No step is written down yet.</p><input type=hidden id=smooth></section>"
    return (
        '<section><div class="controls"><h2>Training</h2><label>smoothing <input id="smooth" type="range" min="0" '
        f'max="0.99" step="0.01" value="0"></label></div><div class="charts">{"".join(boxes)}</div>'
        "<noscript><p>The curves are drawn by a script of this page, which is switched off.</p></noscript></section>"
    )
