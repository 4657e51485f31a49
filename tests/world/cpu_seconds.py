"""Processor time of the tests by folder and file, with all processes that they started: what a run costs anywhere.

Wall time says more about who else uses the cores. The processes of a test are children of this one, or theirs; what has
ended is in the sums of who waited for it.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

_TICKS = os.sysconf("SC_CLK_TCK")
_PROCESSES = Path("/proc")
_FILES_TOLD = 15
_TOLD = "cpu_seconds"


class CpuSeconds:
    """A pytest plugin: two lines at the end of a run. Where other processes run the tests, they tell theirs."""

    def __init__(self) -> None:
        self._file = "collection"
        self._before = 0.0
        self._seconds: Counter[str] = Counter()

    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        self._go_on_with(item.nodeid.partition("::")[0])

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._file == "collection" and session.config.getoption("numprocesses", None):
            return  # Others have run the tests.
        self._go_on_with("")
        if (told := getattr(session.config, "workeroutput", None)) is not None:
            told[_TOLD] = dict(self._seconds)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        self._seconds.update(getattr(node, "workeroutput", {}).get(_TOLD, {}))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        folders: Counter[str] = Counter()
        for file, seconds in self._seconds.items():
            folders[file.split("/")[1] if file.count("/") > 1 else "the rest"] += seconds
        terminalreporter.write_line(f"CPU seconds: {sum(folders.values()):.0f} ({_listed(folders)})")
        terminalreporter.write_line(f"of these: {_listed(self._seconds, _FILES_TOLD)}")

    def _go_on_with(self, file: str) -> None:
        if file != self._file:
            now = _of_all(os.getpid())
            self._seconds[self._file] += now - self._before
            self._file, self._before = file, now


def _listed(seconds: Counter[str], count: int | None = None) -> str:
    return ", ".join(f"{name} {number:.0f}" for name, number in seconds.most_common(count))


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
