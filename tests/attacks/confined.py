"""Run a function of a test module in a process of its own, with limits of time, memory and processor time."""

from __future__ import annotations

import importlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

_ROOT = Path(__file__).resolve().parents[2]
_MEBI = 1 << 20
_ADDRESS_SPACE = 3 << 30  # more than the process has at its start: an allocation of this size fails at once


class Outcome(NamedTuple):
    """What the function returned, or ``(type, text)`` of its error, and how far its memory grew, in MiB."""

    value: Any
    error: tuple[str, str] | None
    grown: float


def run_confined(
    function: str, *args: Any, seconds: float = 30, mebibytes: float = 100, framework: str | None = None
) -> Outcome:
    """Call ``package.module:function(*args)`` with plain data; fails the test where a limit is passed."""
    environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
    if framework is not None:
        environment["HYPER_PARALLEL_PLATFORM"] = framework
    command = [sys.executable, "-m", "tests.attacks.confined", function, json.dumps(args), str(seconds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60, env=environment)
    except subprocess.TimeoutExpired as late:
        raise AssertionError(f"{function} still runs after {late.timeout} s:\n{late.stderr or ''}") from None
    assert done.returncode == 0, f"{function} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    outcome = Outcome(**json.loads(done.stdout.splitlines()[-1]))
    if mebibytes is not None:
        assert outcome.grown <= mebibytes, f"{function} took {outcome.grown:.0f} MiB, more than {mebibytes}"
    return outcome


def forget_peak() -> int:
    """Let the peak of the resident memory start anew; the memory now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    """The peak of the resident memory since :func:`forget_peak`, in bytes."""
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


def _main() -> None:
    name, args, seconds = sys.argv[1], json.loads(sys.argv[2]), float(sys.argv[3])
    module, _, function = name.partition(":")
    called = getattr(importlib.import_module(module), function)
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds) + 1, int(seconds) + 5))
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + _ADDRESS_SPACE,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    before = forget_peak()
    value, error = None, None
    try:
        value = called(*args)
    except Exception as raised:
        error = type(raised).__name__, str(raised)
    grown = (peak() - before) / _MEBI
    print("\n" + json.dumps({"value": value, "error": error, "grown": grown}))


if __name__ == "__main__":
    _main()
