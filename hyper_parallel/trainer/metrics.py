"""What a run writes down: one line of JSON for each step and event, in a file that outlives the run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

__all__ = ["METRICS_FILE", "MetricsFile", "append_event", "read_metrics"]

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
    """The lines of a run's metrics; a last one that was cut short by a kill is left out."""
    path = Path(folder) / METRICS_FILE
    if not path.is_file():
        return
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)


def append_event(folder: Path, event: str, **values: Any) -> None:
    """Write down an event behind a run's last, which may have been cut short by a kill."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / METRICS_FILE).open("a+b") as file:
        file.seek(0)
        written = file.read()
        file.truncate(written.rfind(b"\n") + 1)
        file.write(json.dumps({"event": event, "time": round(time.time(), 3), **values}).encode() + b"\n")
