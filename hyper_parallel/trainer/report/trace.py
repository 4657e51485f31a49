"""A step as Chrome's trace events, which Perfetto and chrome://tracing open: a process a rank, a row a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["TRACE_FILE", "trace_of", "write_trace"]

TRACE_FILE = "trace.json"
_ROWS = ("phases", "model", "modules", "collectives", "in flight")


def trace_of(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The parts that ranks have written of one step, on one clock: the wall clocks of their hosts."""
    first = min((part["begin"] for part in parts), default=0.0)
    events: list[dict[str, Any]] = []
    for part in parts:
        rank, shift = part["rank"], round((part["begin"] - first) * 1e6)
        name = f"rank {rank} on {part['host']}"
        events.append({"ph": "M", "name": "process_name", "pid": rank, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}})
        for place, (row, thread) in enumerate(_threads(part["spans"])):
            events.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": thread, "args": {"name": row}})
            events.append(
                {"ph": "M", "name": "thread_sort_index", "pid": rank, "tid": thread, "args": {"sort_index": place}}
            )
        for row, thread, name, begin, end in _on_threads(part["spans"]):
            event = {"ph": "X", "cat": row, "name": name, "pid": rank, "tid": thread}
            events.append({**event, "ts": begin + shift, "dur": max(1, end - begin)})
    step = parts[0]["step"] if parts else None
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"step": step}}


def write_trace(folder: Path, parts: Sequence[dict[str, Any]]) -> Path:
    """Write the trace of a run's recorded step into its folder."""
    path = folder / TRACE_FILE
    path.write_text(json.dumps(trace_of(parts)), encoding="utf-8")
    return path


def _on_threads(spans: Sequence[Sequence[Any]]) -> list[tuple[str, int, str, int, int]]:
    """Spans with the number of their row; what is in flight at the same time gets rows of its own."""
    found: list[tuple[str, int, str, int, int]] = []
    free_at: list[int] = []
    for row, name, begin, end in sorted(spans, key=lambda span: (span[2], -span[3])):
        thread = _ROWS.index(row)
        if row == "in flight":
            lane = next((lane for lane, free in enumerate(free_at) if free <= begin), len(free_at))
            free_at[lane : lane + 1] = [end]
            thread += lane
        found.append((row, thread, name, begin, end))
    return found


def _threads(spans: Sequence[Sequence[Any]]) -> list[tuple[str, int]]:
    return sorted({(row, thread) for row, thread, *_ in _on_threads(spans)}, key=lambda one: one[1])
