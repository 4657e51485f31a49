"""What a run writes down: one line of JSON for each step and event, in a file that outlives the run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["METRICS_FILE", "MetricsFile", "append_event", "count_damaged_lines", "read_metrics"]

METRICS_FILE = "metrics.jsonl"


class MetricsFile:
    """Lines of ``metrics.jsonl``: each an object with ``event`` ("step", "eval", "save", "start", ...) and ``time``.

    Written by one rank, each line at once, so that what a killed run did is there. A run that goes on from a step drops
    what an earlier attempt wrote about later ones; ``num_repeated`` says how many steps those were.
    """

    def __init__(self, folder: Path, resumed_step: int, is_restart: bool = False) -> None:
        self._path = folder / METRICS_FILE
        goes_on = bool(resumed_step) or is_restart
        lines = list(read_metrics(folder)) if goes_on else []
        kept = [line for line in lines if line.get("step", 0) <= resumed_step]
        reached = max((line["step"] for line in lines if line["event"] == "step"), default=0)
        self.num_repeated = max(0, reached - resumed_step)
        temporary = self._path.with_suffix(".new")
        with temporary.open("w", encoding="utf-8") as file:
            for line in kept:
                file.write(json.dumps(line) + "\n")
        os.replace(temporary, self._path)
        self._file = self._path.open("a", encoding="utf-8")

    def write(self, event: str, **values: Any) -> None:
        line = {"event": event, "time": round(time.time(), 3), **values}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_metrics(folder: Path) -> Iterator[Mapping[str, Any]]:
    """The lines of a run's metrics; one that was cut short by a kill, or damaged by a full disk, is left out."""
    for line in _lines(folder):
        if (event := _event(line)) is not None:
            yield event


def count_damaged_lines(folder: Path) -> int:
    """How many lines :func:`read_metrics` leaves out, but for a last one that was cut short."""
    return sum(line.endswith(b"\n") and _event(line) is None for line in _lines(folder))


def _lines(folder: Path) -> Iterator[bytes]:
    path = Path(folder) / METRICS_FILE
    if path.is_file():
        with path.open("rb") as file:
            yield from file


def _event(line: bytes) -> Mapping[str, Any] | None:
    try:
        event = json.loads(line) if line.endswith(b"\n") else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    is_step = isinstance(event.get("step", None if event["event"] == "step" else 0), int)
    return event if is_step and isinstance(event.get("time"), int | float) else None


def append_event(folder: Path, event: str, **values: Any) -> None:
    """Write down an event behind a run's last, which may have been cut short by a kill."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / METRICS_FILE).open("a+b") as file:
        file.seek(0)
        written = file.read()
        file.truncate(written.rfind(b"\n") + 1)
        file.write(json.dumps({"event": event, "time": round(time.time(), 3), **values}).encode() + b"\n")
