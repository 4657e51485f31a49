"""The pytest process's side of the nursery: starts it, asks it for ranks, learns how they ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from tests.world.frameworks import Framework

_ROOT = Path(__file__).resolve().parents[2]

START_TIMEOUT = 240.0

# See Note [Forking is sound only with one thread].
_ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


class NurseryDied(RuntimeError):
    """The nursery is gone, and its ranks with it."""


class Nursery:
    """The one process from which the ranks of all worlds come (see `nursery_process`)."""

    def __init__(self, framework: Framework, may_fork: bool = True) -> None:
        ours, theirs = socket.socketpair()
        search_path = os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = os.environ | _ONE_THREAD | {"HYPER_PARALLEL_PLATFORM": framework.name, "PYTHONPATH": search_path}
        environment.pop("PYTEST_ADDOPTS", None)
        way = "fork" if may_fork and framework.may_fork else "exec"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the nursery lives
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.world.nursery_process",
                    "nursery",
                    framework.name,
                    way,
                    str(theirs.fileno()),
                ],
                cwd=_ROOT,
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,  # Ctrl-C is for the pytest process, which then ends the ranks.
            )
        self._socket = ours
        self.connection = Connection(os.dup(ours.fileno()))
        self._exit_codes: dict[int, int] = {}
        try:
            if not self.connection.poll(START_TIMEOUT):
                self._process.kill()
            self.start_method: str = self._receive("ready")
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        return self._process.pid

    def start_rank(self, files: list[int]) -> int:
        """Start a process that is a rank with these three open files (see `worker.serve`); gives its pid."""
        self._send(("start",))
        socket.send_fds(self._socket, [b"."], files)
        return self._receive("started")

    def signal_rank(self, pid: int, number: int) -> None:
        """Send a signal to a rank (SIGKILL: to its child processes too); nothing happens when it has ended."""
        self._send(("signal", pid, int(number)))

    def take_news(self) -> None:
        """Learn of the ranks that have ended since the last time."""
        while self.connection.poll():
            self._note(self._next())

    def exit_code(self, pid: int) -> int | None:
        """How the rank ended (minus the signal's number for a signal), None as far as is known."""
        return self._exit_codes.get(pid)

    def await_exit(self, pid: int, deadline: float) -> int | None:
        """How the rank ended; None if it still runs at the deadline (of `time.monotonic`)."""
        while pid not in self._exit_codes and self.connection.poll(max(0.0, deadline - time.monotonic())):
            self._note(self._next())
        return self._exit_codes.get(pid)

    def close(self) -> None:
        """End the nursery and every rank it has started."""
        self.connection.close()
        self._socket.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _receive(self, kind: str) -> int | str:
        while (message := self._next())[0] != kind:
            self._note(message)
        return message[1]

    def _note(self, message: tuple) -> None:
        kind, pid, code = message
        assert kind == "exited", message
        self._exit_codes[pid] = code

    def _send(self, message: tuple) -> None:
        try:
            self.connection.send(message)
        except OSError:
            raise self._death() from None

    def _next(self) -> tuple:
        try:
            return self.connection.recv()
        except (EOFError, OSError):
            raise self._death() from None

    def _death(self) -> NurseryDied:
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        self._log.seek(0)
        said = self._log.read().decode(errors="replace")
        return NurseryDied(f"The process that starts the ranks of the test worlds ended with code {code}.\n{said}")
