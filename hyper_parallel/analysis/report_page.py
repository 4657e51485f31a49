"""The report of a dry run as one HTML page, light and dark, that needs no other file and no network."""

from __future__ import annotations

import json
from html import escape

from hyper_parallel.analysis.byte_sizes import byte_text
from hyper_parallel.analysis.memory_log import KINDS
from hyper_parallel.analysis.report import DryRun
from hyper_parallel.analysis.report_text import headline, job_line, tables

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1f24; --paper: #ffffff; --faint: #68707c; --line: #d9dde3; --soft: #f3f5f8;
  --good: #1a7f46; --bad: #b3261e;
  --k0: #3566b8; --k1: #c2672c; --k2: #7a56a8; --k3: #2f8f83; --k4: #b0892b; --k5: #6d7885; --k6: #a34d78;
  --k7: #4d8fae; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --paper: #14171b; --faint: #9aa3ae; --line: #333941;
  --soft: #1d2127; --good: #5fc98c; --bad: #f2867d;
  --k0: #7aa5ee; --k1: #eda06c; --k2: #b394dc; --k3: #6cc9bd; --k4: #dcb863; --k5: #a2acb8; --k6: #de8bb4;
  --k7: #8fc4de; } }
body { margin: 2rem auto; max-width: 62rem; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif; color: var(--ink);
  background: var(--paper); }
h1 { font-size: 1.4rem; margin-bottom: .2rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
p { margin: .2rem 0; } .faint { color: var(--faint); } .good { color: var(--good); } .bad { color: var(--bad); }
.verdict { font-weight: 600; margin: .8rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; }
th, td { text-align: left; padding: .3rem 1.2rem .3rem 0; border-bottom: 1px solid var(--line); }
th { color: var(--faint); font-weight: 500; } tr.total td { font-weight: 600; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; padding-right: .2rem; }
.number + .number { padding-left: 1.2rem; } h2 { overflow-wrap: anywhere; }
.bar { display: flex; height: 2rem; border: 1px solid var(--line); border-radius: 4px; overflow: hidden;
  background: var(--soft); margin: .6rem 0; position: relative; }
.limit { position: absolute; top: 0; bottom: 0; border-left: 3px solid var(--bad); }
.key { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .4em; }
.key.thin { width: 3px; border-radius: 0; background: var(--bad); }
.keys span { margin-right: 1.2em; white-space: nowrap; }
section + section { border-top: 2px solid var(--line); margin-top: 2.5rem; }
"""

_NUMBERS = {"bytes", "share", "how many", "calls", "sent", "operations"}  # columns, set flush right
_TOTALS = {"peak", "a step"}  # rows


def page(reports: list[DryRun]) -> str:
    """One page about these ranks of one job."""
    first = reports[0]
    data = json.dumps([report.as_data() for report in reports]).replace("<", "\\u003c")
    sections = "".join(f"<section>{_section(report)}</section>" for report in reports)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Dry run of {escape(first.model)}</title><style>{_STYLE}</style></head>\n<body>{sections}"
        f'<script type="application/json" id="dry-run">{data}</script></body></html>\n'
    )


def _section(report: DryRun) -> str:
    parts = [f"<h1>{escape(headline(report))}</h1>", f'<p class="faint">{escape(job_line(report))}</p>']
    tone = "" if report.device_memory is None else " good" if report.fits else " bad"
    parts.append(f'<p class="verdict{tone}">{escape(report.verdict())}</p>')
    parts += [f'<p class="faint">{escape(note)}</p>' for note in report.notes]
    parts.append(_bar(report))
    for caption, columns, rows in tables(report):
        body = "".join(_row(row, columns, "td") for row in rows)
        head = _row(columns, columns, "th")
        parts.append(f'<h2>{escape(caption)}</h2><div class="scroll"><table>{head}{body}</table></div>')
    return "\n".join(parts)


def _row(cells: list[str], columns: list[str], tag: str) -> str:
    kind = ' class="total"' if cells[0] in _TOTALS else ""
    kinds = (' class="number"' if name in _NUMBERS else "" for name in columns)
    written = (f"<{tag}{of}>{escape(cell)}</{tag}>" for cell, of in zip(cells, kinds, strict=True))
    return f"<tr{kind}>{''.join(written)}</tr>"


def _bar(report: DryRun) -> str:
    """The peak by kind to scale, with the device's memory as a line."""
    scale = max(report.peak_bytes, report.device_memory or 0) * 1.02 or 1
    pieces, keys = [], []
    for kind, size in report.peak_by_kind.items():
        colour = f"var(--k{KINDS.index(kind)})"
        label = f"{kind}: {byte_text(size)}"
        pieces.append(f'<div title="{label}" style="width:{100 * size / scale:.2f}%;background:{colour}"></div>')
        keys.append(f'<span><i class="key" style="background:{colour}"></i>{label}</span>')
    if report.device_memory is not None:
        place = 100 * report.device_memory / scale
        pieces.append(f'<div class="limit" title="device memory" style="left:{place:.2f}%"></div>')
        keys.append(f'<span><i class="key thin"></i>device memory: {byte_text(report.device_memory)}</span>')
    return f'<div class="bar">{"".join(pieces)}</div><p class="keys">{"".join(keys)}</p>'
