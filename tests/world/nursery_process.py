"""The nursery: a process that has the framework loaded, forks the ranks of all worlds and says how they ended.

Importing a framework costs seconds; forking a process that has imported it costs milliseconds. The nursery is a process
of its own, so that nothing the pytest process did (threads, process groups) reaches a rank. It holds one end of a
socket; when the other end closes, because the pytest process ended in whatever way, it kills all ranks and ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest

from tests.world import worker
from tests.world.frameworks import FRAMEWORKS, Framework

_PR_SET_PDEATHSIG = 1

# Note [Forking is sound only with one thread]
# A forked child has only the thread that forked; a lock held by another thread stays locked for ever. So the thread
# pools that libraries start when they are imported are switched off for the nursery, and it counts its threads before
# it promises to fork: with more than one, every rank is started as a new interpreter, slower but right.


def _tend(control: socket.socket, framework: Framework, may_fork: bool) -> None:
    """The nursery's life: start ranks, pass signals on, report ends; until the pytest process goes away."""
    for module in framework.preloaded if may_fork else ():
        with contextlib.suppress(Exception):  # It fails again in the ranks, whose failure is shown with its traceback.
            importlib.import_module(module)
    may_fork = may_fork and _num_threads() == 1
    gc.freeze()
    connection = Connection(os.dup(control.fileno()))
    bell, ringer = os.pipe()
    os.set_blocking(bell, False)
    os.set_blocking(ringer, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(ringer)
    nursery, ranks = os.getpid(), set()
    try:
        connection.send(("ready", "fork" if may_fork else "exec"))
        while True:
            ready = wait([connection, bell])
            with contextlib.suppress(BlockingIOError):
                os.read(bell, 4096)
            for pid, code in _reap():
                ranks.remove(pid)
                connection.send(("exited", pid, code))
            if connection not in ready:
                continue
            match connection.recv():
                case ("start",):
                    _, files, _, _ = socket.recv_fds(control, 1, 3)
                    pid = os.fork()
                    if pid == 0:
                        signal.set_wakeup_fd(-1)
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        for inherited in (connection.fileno(), control.fileno(), bell, ringer):
                            os.close(inherited)
                        _become_rank(files, nursery, may_fork)
                    ranks.add(pid)
                    for file in files:
                        os.close(file)
                    connection.send(("started", pid))
                case ("signal", pid, number) if pid in ranks:
                    _signal(pid, number)
    except (EOFError, ConnectionError):
        for pid in ranks:
            _signal(pid, signal.SIGKILL)
        for pid in ranks:
            os.waitpid(pid, 0)


def _become_rank(files: list[int], nursery: int, may_fork: bool) -> None:
    """In the child: be a rank and never come back."""
    try:
        os.setsid()
        _die_with_parent(nursery)
        if may_fork:
            worker.serve(*files)
        else:
            for file in files:
                os.set_inheritable(file, True)
            os.execv(sys.executable, [sys.executable, "-m", "tests.world.nursery_process", "rank", *map(str, files)])
    finally:
        os._exit(1)


def _reap() -> list[tuple[int, int]]:
    ended = []
    with contextlib.suppress(ChildProcessError):
        while (end := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((end[0], os.waitstatus_to_exitcode(end[1])))
    return ended


def _signal(pid: int, number: int) -> None:
    """Signal a rank that has not been reaped; SIGKILL goes to its whole session, if it has got as far as making one."""
    if number == signal.SIGKILL:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, number)
    os.kill(pid, number)


def _num_threads() -> int:
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.exists() else threading.active_count()


def _die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends in whatever way (only Linux can do this)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)


class _InsteadOfTests:
    """A pytest plugin that does `role` where pytest would run tests."""

    def __init__(self, role: Callable[[], None]) -> None:
        self._role = role

    @pytest.hookimpl(tryfirst=True)
    def pytest_cmdline_main(self) -> int:
        self._role()
        return 0


def _main(role: str, *arguments: str) -> int:
    def run() -> None:
        if role == "nursery":
            framework, way, control = arguments
            _tend(socket.socket(fileno=int(control)), FRAMEWORKS[framework], way == "fork")
        else:
            worker.serve(*map(int, arguments))

    # Inside pytest, so that a failing assert explains itself in a rank as it does in any test.
    options = [
        "--noconftest",
        "--capture=no",
        f"--rootdir={os.getcwd()}",
        "--override-ini=addopts=",
        "-pno:cacheprovider",
    ]
    return pytest.main(options, plugins=[_InsteadOfTests(run)])


if __name__ == "__main__":
    if sys.argv[1] == "nursery":
        _die_with_parent(os.getppid())
    sys.exit(_main(*sys.argv[1:]))
