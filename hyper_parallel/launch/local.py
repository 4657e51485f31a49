"""Starting the ranks of this host and watching over them: one supervisor a host, which is this process.

Note [Hosts need not talk to each other]
When a rank dies, every other one raises within a second, on all hosts, because its connections break. So each
supervisor sees a death among its own ranks, and starts them again with the next attempt's number; the ranks meet at the
port of that attempt.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from hyper_parallel.launch.durations import seconds_of
from hyper_parallel.launch.failures import RankFailure, deaths_of, tell
from hyper_parallel.launch.notes import notes_path, read_notes
from hyper_parallel.launch.processes import Job, Rank, command_of, end_ranks, log_path, start_ranks
from hyper_parallel.launch.signals import STOPPED_CODES
from hyper_parallel.launch.tail import Tail

__all__ = ["run_local"]

_POLL_SECONDS = 0.05
_SETTLE_SECONDS = 0.3  # after the first death: see Note [The cause among the deaths]
_MOST_WITHOUT_PROGRESS = 2
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def run_local(
    target: Sequence[str] | Callable[..., Any],
    nproc: int = 1,
    *,
    args: Sequence[Any] = (),
    hosts: int = 1,
    host_rank: int = 0,
    master: str | None = None,
    folder: str | Path | None = None,
    max_restarts: int = 0,
    stop_after: float | str | None = None,
    environment: Mapping[str, str] | None = None,
    on_line: Callable[[int, str], None] | None = None,
    end_seconds: float = 5.0,
    stop_seconds: float = 600.0,
) -> int:
    """Run ``target`` as ``nproc`` ranks on this host until all have ended; the exit status to end with.

    ``target``: a Python script with its arguments, ``["train.py", "--steps", "10"]``, ``["-m", "module"]``, any other
    command, or a function of a module, called with ``args`` (values of JSON). Ranks have RANK, WORLD_SIZE, MASTER_ADDR
    and MASTER_PORT set, as ``hp.launch.join`` reads them, and HYPER_PARALLEL_ATTEMPT, from 0.

    Returns 0 when all ranks did, and 130 or 143 when SIGINT, SIGTERM, SIGUSR1 or ``stop_after`` (seconds, or "11h50m")
    asked the ranks to stop and they did, within ``stop_seconds``; a second SIGINT ends them at once. A rank that dies
    is a :class:`RankFailure` that begins with its traceback; the others are asked to end and killed after
    ``end_seconds``. Up to ``max_restarts`` times all ranks are started again instead, but not after two attempts
    without a new checkpoint (:func:`note_checkpoint`).

    The output of rank N goes to ``rank-N.txt`` in ``folder``/logs (a temporary folder that stays after a failure), and
    that of the host's first rank is shown; ``on_line(rank, line)`` gets the lines of all ranks instead.

    On several hosts the same is called on each, with ``hosts``, this one's ``host_rank`` and ``master``, "host:port" of
    host 0, of which the ports up to ``port + max_restarts`` are used.
    """
    limit = seconds_of(stop_after) if isinstance(stop_after, str) else stop_after
    _check(nproc, hosts, host_rank, max_restarts)
    where = _master(master, hosts)
    command = command_of(target, args)
    temporary = folder is None
    logs = Path(tempfile.mkdtemp(prefix="hyper_parallel_")) if folder is None else Path(folder) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    job = Job(command, nproc, hosts, host_rank, where, logs, environment or {})
    supervisor = _Supervisor(job, limit, on_line, end_seconds, stop_seconds)
    try:
        with _Signals(supervisor):
            status = supervisor.run(max_restarts)
    except ValueError:  # Nothing could be started.
        if temporary:
            shutil.rmtree(logs, ignore_errors=True)
        raise
    if temporary:
        shutil.rmtree(logs, ignore_errors=True)
    return status


def _check(nproc: int, hosts: int, host_rank: int, max_restarts: int) -> None:
    for name, value, least in (("nproc", nproc, 1), ("hosts", hosts, 1), ("max_restarts", max_restarts, 0)):
        if value < least:
            raise ValueError(f"run_local: {name} must be at least {least}, got {value}")
    if not 0 <= host_rank < hosts:
        raise ValueError(f"run_local: host_rank must be 0 to {hosts - 1} with hosts={hosts}, got {host_rank}")
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("run_local watches signals, which only the main thread of a process can; call it there")


def _master(text: str | None, hosts: int) -> tuple[str, int] | None:
    if text is None:
        if hosts > 1:
            raise ValueError(f'run_local: {hosts} hosts must know where to meet; give master="host:port" of host 0')
        return None
    address, _, port = text.rpartition(":")
    if not address or not port.isdecimal():
        raise ValueError(f'run_local: master must be "host:port", such as "node1:29500", got {text!r}')
    return address.strip("[]"), int(port)


class _Supervisor:
    """The ranks of this host, and what is asked of them."""

    def __init__(
        self,
        job: Job,
        limit: float | None,
        on_line: Callable[[int, str], None] | None,
        end_seconds: float,
        stop_seconds: float,
    ) -> None:
        self._job = job
        self._stop_at = None if limit is None else time.monotonic() + limit
        self._limit = limit
        self._on_line = on_line
        self._end_seconds, self._stop_seconds = end_seconds, stop_seconds
        self._ranks: list[Rank] = []
        self._tails: list[tuple[int, Tail]] = []
        self._asked: int | None = None  # the signal by which the ranks were asked to stop
        self._asked_at = 0.0
        self._at_once = False

    # ------------------------------------------------------------ signals

    def ask(self, number: int) -> None:
        """Pass a signal on to the ranks, once; a second SIGINT ends them."""
        if self._asked is None:
            self._asked, self._asked_at = number, time.monotonic()
            self._pass_on()
        elif number == signal.SIGINT:
            self._at_once = True

    def _pass_on(self) -> None:
        for rank in self._ranks:
            rank.process.send_signal(self._asked or signal.SIGTERM)

    @property
    def _stopped_status(self) -> int:
        return 128 + (signal.SIGINT if self._asked == signal.SIGINT else signal.SIGTERM)

    # ------------------------------------------------------------ attempts

    def run(self, max_restarts: int) -> int:
        """All attempts; the exit status, or the failure of the last one."""
        best: int | None = None
        num_idle = 0
        for attempt in range(max_restarts + 1):
            try:
                return self._run_once(attempt)
            except RankFailure as failure:
                progress = self._progress()
                num_idle = num_idle + 1 if progress is None or (best is not None and progress <= best) else 0
                best = progress if best is None else max(best, progress or 0)
                if attempt == max_restarts or self._asked is not None:
                    raise
                if num_idle == _MOST_WITHOUT_PROGRESS:
                    raise RankFailure(
                        f"{failure}\nnot started again: {num_idle} attempts in a row made no new checkpoint",
                        failure.deaths,
                    ) from None
                print(failure, file=sys.stderr, flush=True)
                since = "from the last checkpoint, if any" if best is None else f"from the checkpoint of step {best}"
                again = f"starting all ranks again {since}, attempt {attempt + 2} of {max_restarts + 1}"
                print(again, file=sys.stderr, flush=True)
        raise AssertionError("the last attempt returns or raises")

    def _progress(self) -> int | None:
        noted = [read_notes(notes_path(self._job.folder, rank.rank)).checkpoint for rank in self._ranks]
        return max((step for step in noted if step is not None), default=None)

    def _run_once(self, attempt: int) -> int:
        heard = range(self._job.nproc) if self._on_line is not None else range(1)
        first = self._job.host_rank * self._job.nproc
        self._tails = [(first + local, Tail(log_path(self._job.folder, first + local))) for local in heard]
        self._ranks = start_ranks(self._job, attempt)
        if self._asked is not None:  # It came before there were ranks.
            self._pass_on()
        try:
            return self._watch()
        finally:
            end_ranks(self._ranks, 0)
            self._show(at_end=True)

    def _watch(self) -> int:
        left_at: float | None = None  # when the first rank had stopped because it was asked to
        while True:
            self._show()
            statuses = [rank.poll() for rank in self._ranks]
            if self._at_once:
                return self._stopped_status
            if any(status is not None and not self._is_good(status) for status in statuses):
                failure = self._failure()
                if self._asked is not None and all(death.is_echo for death in failure.deaths):
                    return self._stopped_status  # They lost those that stopped first.
                raise failure
            if self._asked is not None and -self._asked in statuses:
                # It knew nothing of the signal yet, and those that do may wait for it to come.
                end_ranks(self._ranks, self._end_seconds)
                return self._stopped_status
            if None not in statuses:
                stopped = [status for status in statuses if status]
                if self._asked is None and stopped:
                    return max(128 - status if status < 0 else status for status in stopped)
                return self._stopped_status if stopped else 0
            now = time.monotonic()
            if left_at is None and any(statuses):
                left_at = now
            if self._stop_at is not None and now >= self._stop_at and self._asked is None:
                print(f"stopping after {self._limit:g} s", file=sys.stderr, flush=True)
                self.ask(signal.SIGTERM)
            since = self._asked_at if self._asked is not None else left_at
            if since is not None and now - since > self._stop_seconds:
                raise self._too_slow(statuses)
            time.sleep(_POLL_SECONDS)

    def _is_good(self, status: int) -> bool:
        """Whether a rank that ended so has done what it was asked to."""
        return status == 0 or status in STOPPED_CODES or (self._asked is not None and status == -self._asked)

    # ------------------------------------------------------------ failures

    def _failure(self) -> RankFailure:
        end = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < end and any(rank.poll() is None for rank in self._ranks):
            time.sleep(_POLL_SECONDS)
        deaths = [death for death in deaths_of(self._ranks, self._job.folder) if not self._is_good(death.status)]
        stubborn = end_ranks(self._ranks, self._end_seconds)
        return RankFailure(tell(deaths, self._job.nproc, self._job.folder, stubborn), deaths)

    def _too_slow(self, statuses: Sequence[int | None]) -> RankFailure:
        slow = [rank.rank for rank, status in zip(self._ranks, statuses, strict=True) if status is None]
        end_ranks(self._ranks, self._end_seconds)
        return RankFailure(
            f"rank{'s' * (len(slow) > 1)} {', '.join(map(str, slow))} did not stop within {self._stop_seconds:g} s of "
            f"being asked to; ended\nlogs: {self._job.folder}/rank-*.txt"
        )

    # ------------------------------------------------------------ output

    def _show(self, at_end: bool = False) -> None:
        for rank, tail in self._tails:
            for line in tail.new_lines(at_end):
                if self._on_line is not None:
                    self._on_line(rank, line)
                else:
                    print(line, flush=True)


class _Signals:
    """While ranks run, signals to this process are for them."""

    def __init__(self, supervisor: _Supervisor) -> None:
        self._supervisor = supervisor
        self._before: dict[int, Any] = {}

    def __enter__(self) -> None:
        for number in _PASSED_ON:
            self._before[number] = signal.signal(number, self._catch)

    def __exit__(self, *exception: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._supervisor.ask(number)
