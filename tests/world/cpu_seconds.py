"""Processor time of the tests by folder, with all processes that they started: what a run costs on any machine.

Wall time says more about who else uses the cores. The processes of a test are children of this one, or theirs; what has
ended is in the sums of who waited for it.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from pathlib import Path

import pytest

_TICKS = os.sysconf("SC_CLK_TCK")
_PROCESSES = Path("/proc")


class CpuSeconds:
    """A pytest plugin: a line at the end of a run."""

    def __init__(self) -> None:
        self._folder = "collection"
        self._before = 0.0
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        parts = nodeid.partition("::")[0].split("/")
        self._go_on_with(parts[1] if len(parts) > 2 else "the rest")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        self._go_on_with("")
        folders = ", ".join(f"{name} {seconds:.0f}" for name, seconds in self._seconds.most_common())
        terminalreporter.write_line(f"CPU seconds: {sum(self._seconds.values()):.0f} ({folders})")

    def _go_on_with(self, folder: str) -> None:
        if folder != self._folder:
            now = _of_all(os.getpid())
            self._seconds[self._folder] += now - self._before
            self._folder, self._before = folder, now


def is_possible() -> bool:
    return (_PROCESSES / "self/task").is_dir()


def _of_all(pid: int) -> float:
    """User and system time of a process, of what it waited for, and of its children."""
    seconds = 0.0
    with contextlib.suppress(OSError):  # It may have ended.
        numbers = (_PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()
        seconds = sum(map(int, numbers[11:15])) / _TICKS
        for thread in (_PROCESSES / str(pid) / "task").iterdir():
            with contextlib.suppress(OSError):
                seconds += sum(_of_all(int(child)) for child in (thread / "children").read_text().split())
    return seconds
