"""Run a function of a test module in a process of its own, with limits of time, memory and processor time.

On PyTorch the process is forked from a server that has the framework loaded (which has one thread, so that this is
sound); on MindSpore, whose threads rule that out, the server has loaded nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import resource
import sys
import tempfile
from functools import cache
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any, NamedTuple

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
    answers, answer = _server().Pipe(duplex=False)
    framework = framework or os.environ["HYPER_PARALLEL_PLATFORM"]
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "output")
        process = _server().Process(target=_call, args=(function, args, seconds, framework, str(said), answer))
        process.start()
        answer.close()
        outcome = None
        if answers.poll(seconds + 60):
            with contextlib.suppress(EOFError):  # It ended without an answer.
                outcome = Outcome(*answers.recv())
        else:
            process.kill()
        process.join()
        output = said.read_text(errors="replace") if said.exists() else ""
    assert outcome is not None, f"{function} ended with {process.exitcode} within {seconds + 60} s:\n{output}"
    if mebibytes is not None:
        assert outcome.grown <= mebibytes, f"{function} took {outcome.grown:.0f} MiB, more than {mebibytes}"
    return outcome


@cache
def _server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    on_torch = os.environ["HYPER_PARALLEL_PLATFORM"] == "torch"
    context.set_forkserver_preload(["pytest", *(["torch", "hyper_parallel.core.dtensor.dtensor"] if on_torch else [])])
    return context


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


def _call(name: str, args: tuple, seconds: float, framework: str, output: str, answer: Connection) -> None:
    """In the process of its own: what it prints goes to a file, the answer back."""
    with open(output, "wb") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    os.environ["HYPER_PARALLEL_PLATFORM"] = framework
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
    answer.send((value, error, (peak() - before) / _MEBI))
