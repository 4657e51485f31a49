"""The processes of a host's ranks: started in sessions of their own, their output in files, ended for sure."""

from __future__ import annotations

import ctypes
import inspect
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hyper_parallel.launch.errors import error_path
from hyper_parallel.launch.notes import FOLDER_VARIABLE, clear_notes, notes_path

__all__ = ["ATTEMPT_VARIABLE", "LAUNCHER_VARIABLE", "Job", "Rank", "command_of", "end_ranks", "log_path", "start_ranks"]

ATTEMPT_VARIABLE = "HYPER_PARALLEL_ATTEMPT"
LAUNCHER_VARIABLE = "HYPER_PARALLEL_LAUNCHER"
_SECRET, _SECRET_FILE = "HYPER_PARALLEL_SECRET", "HYPER_PARALLEL_SECRET_FILE"
_POLL_SECONDS = 0.02
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Job:
    """What runs on this host, and its place among the others."""

    command: list[str]
    nproc: int
    hosts: int
    host_rank: int
    master: tuple[str, int] | None  # None: one host, any free port
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def world_size(self) -> int:
        return self.nproc * self.hosts


@dataclass
class Rank:
    """One process."""

    rank: int
    process: subprocess.Popen[bytes]
    log_begin: int = 0  # where its output begins in its log, behind that of earlier runs
    ended: float | None = None  # when it was first seen ended

    def poll(self) -> int | None:
        """Its status, negative for a signal; None while it runs."""
        status = self.process.poll()
        if status is not None and self.ended is None:
            self.ended = time.time()
            if status:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self.process.pid, signal.SIGKILL)  # What it has started ends with it.
        return status

    def send(self, number: int) -> None:
        """Send a signal to it and to what it has started; what has ended gets none."""
        if self.process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)


def command_of(target: Sequence[str] | Callable[..., Any], args: Sequence[Any] = ()) -> list[str]:
    """How a rank is started: a command, a Python script with its arguments, ``-m module``, or a function."""
    if callable(target):
        return [sys.executable, "-m", "hyper_parallel.launch.rank", "--call", _place_of(target), _as_json(target, args)]
    command = [str(part) for part in target]
    if not command:
        raise ValueError('there is nothing to run; give a script and its arguments, ["train.py", "--steps", "10"]')
    if args:
        raise ValueError("args are for a function; those of a command are part of it")
    if command[0].endswith(".py") or command[0] == "-m":
        if command[0].endswith(".py") and not Path(command[0]).is_file():
            raise ValueError(f"there is no script {command[0]!r} here, in {Path.cwd()}")
        return [sys.executable, "-m", "hyper_parallel.launch.rank", *command]
    return command


def _place_of(function: Callable[..., Any]) -> str:
    name = getattr(function, "__qualname__", "")
    if not inspect.isfunction(function) or "<" in name:
        raise ValueError(
            "ranks are processes that import their function, which must be defined at the top of a module; got "
            f"{function!r}"
        )
    module = function.__module__
    if module in ("__main__", "__rank__"):
        module = str(Path(function.__code__.co_filename).resolve())
        if not module.endswith(".py"):
            raise ValueError(f"{name} was typed in and is in no file that ranks could import; put it into a module")
    return f"{module}:{name}"


def _as_json(function: Callable[..., Any], args: Sequence[Any]) -> str:
    try:
        return json.dumps(list(args))
    except TypeError as error:
        raise ValueError(f"the arguments of {function.__qualname__} reach ranks as JSON: {error}") from None


def log_path(folder: Path, rank: int) -> Path:
    """Where a rank's output goes."""
    return folder / f"rank-{rank}.txt"


def start_ranks(job: Job, attempt: int) -> list[Rank]:
    """Start the ranks of this host; each attempt meets at another port."""
    environment = {**os.environ, **job.environment, **_meeting_place(job, attempt)}
    for name in ("TORCHELASTIC_RUN_ID", "MS_ROLE"):  # We were perhaps started by another launcher; the ranks were not.
        environment.pop(name, None)
    if job.hosts == 1:
        environment.pop(_SECRET_FILE, None)
        environment[_SECRET] = secrets.token_hex(32)  # Nobody else can join these ranks.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // job.nproc)))
    environment |= {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1", FOLDER_VARIABLE: str(job.folder.resolve())}
    ranks: list[Rank] = []
    try:
        for local_rank in range(job.nproc):
            ranks.append(_start(job, attempt, local_rank, environment))
    except BaseException:
        end_ranks(ranks, 0)
        raise
    return ranks


def _meeting_place(job: Job, attempt: int) -> dict[str, str]:
    if job.master is not None:
        address, port = job.master[0], job.master[1] + attempt
    else:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address, port = probe.getsockname()
    return {
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(job.nproc),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        ATTEMPT_VARIABLE: str(attempt),
        LAUNCHER_VARIABLE: "1",
    }


def _start(job: Job, attempt: int, local_rank: int, environment: Mapping[str, str]) -> Rank:
    rank = job.host_rank * job.nproc + local_rank
    clear_notes(notes_path(job.folder, rank))
    error_path(job.folder, rank).unlink(missing_ok=True)
    launcher = os.getpid()

    def die_with_the_launcher() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:
            os._exit(1)

    with log_path(job.folder, rank).open("ab") as log:
        if attempt:
            log.write(f"---- attempt {attempt + 1} ----\n".encode())
            log.flush()
        begin = log.tell()
        try:
            process = subprocess.Popen(
                job.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(local_rank)},
                start_new_session=True,
                preexec_fn=die_with_the_launcher,  # It takes no lock that another thread might hold.
            )
        except OSError as error:
            raise ValueError(f"cannot start {job.command[0]!r}: {error.strerror}") from None
    return Rank(rank, process, begin)


def end_ranks(ranks: Sequence[Rank], patience: float, number: int = signal.SIGTERM) -> list[int]:
    """Ask ranks to end, and end those that do not within ``patience`` seconds; the ranks that had to be ended."""
    if patience > 0:
        for rank in ranks:
            rank.send(number)
        end = time.monotonic() + patience
        while any(rank.poll() is None for rank in ranks) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
    stubborn = [rank.rank for rank in ranks if rank.poll() is None]
    for rank in ranks:
        rank.send(signal.SIGKILL)
        rank.process.wait()
        rank.poll()
    return stubborn
