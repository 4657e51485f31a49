"""Worlds: real processes in one default process group, started on first use, replaced after a failure.

Where the test asks for threads, the ranks are threads of one such process (``hyper_parallel.testing.threads``), so that
a test that hangs or crashes is found and ended in the same way.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import signal
import socket
import struct
import sys
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, BinaryIO

import pytest

from tests.world.failures import Outcome, RanksFailed, how_it_ended, name_ranks
from tests.world.frameworks import FRAMEWORKS
from tests.world.messages import Answer, Call, Raised, Setup, Skipped
from tests.world.nursery import START_TIMEOUT, Nursery, NurseryDied
from tests.world.worker import STACK_SIGNAL

# All in seconds.
DEFAULT_TIMEOUT = 180.0
GRACE = 5.0  # for the other ranks to answer after one has failed, on a quiet machine
_EXIT_TIMEOUT = 30.0
_STACK_TIMEOUT = 15.0
_TRANSFER_TIMEOUT = 60.0


@dataclass
class _Rank:
    rank: int
    pid: int
    connection: Connection
    output: BinaryIO
    stacks: BinaryIO

    def forget_output(self) -> None:
        for file in (self.output, self.stacks):
            os.ftruncate(file.fileno(), 0)

    def close(self) -> None:
        for file in (self.connection, self.output, self.stacks):
            file.close()


class Worlds:
    """All worlds of a pytest session.

    `worlds(4)` is the world of 4 ranks, `worlds(4, timeout=5)` the same with 5 seconds for each call. Ranks are forked
    where that is sound for the framework, unless `may_fork=False`.
    """

    def __init__(self, framework: str = "torch", may_fork: bool = True) -> None:
        self.framework = FRAMEWORKS[framework]
        self._may_fork = may_fork
        self.sweep = False  # whether everything is tried, and not a small selection
        self.uses_threads = False  # whether the ranks of the test that runs now are threads
        self._nursery: Nursery | None = None
        self._worlds: dict[int, World] = {}

    def __call__(self, world_size: int, timeout: float = DEFAULT_TIMEOUT) -> TimedWorld:
        if world_size < 1:
            raise ValueError(f"a world has at least 1 rank, not {world_size}")
        key = 0 if self.uses_threads else world_size
        if key not in self._worlds:
            self._worlds[key] = World(self, world_size) if key else World(self, 1, hosts_threads=True)
        return TimedWorld(self._worlds[key], timeout, world_size if self.uses_threads else 0)

    @property
    def nursery(self) -> Nursery:
        if self._nursery is None:
            self._nursery = Nursery(self.framework, self._may_fork)
        return self._nursery

    def close(self) -> None:
        """End all ranks; those that are idle get the time to run what was registered for their exit."""
        try:
            with contextlib.suppress(NurseryDied):
                for world in self._worlds.values():
                    world.close()
        finally:
            self.forget_nursery()

    def forget_nursery(self) -> None:
        """End the nursery, which kills all ranks; the next call starts a new one."""
        for world in self._worlds.values():
            world.forget()
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None


@dataclass(frozen=True)
class TimedWorld:
    """A world with the time limit of its calls."""

    world: World
    timeout: float
    num_threads: int = 0

    def run(self, function: Callable, /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run a module-level function on every rank; gives the results by rank."""
        __tracebackhide__ = True
        results = self.world.run(function, args, kwargs, self.timeout, self.num_threads)
        return results[0] if self.num_threads else results


class World:
    """The ranks of one world size. They are started by the first call, and again by the first call after a failure."""

    def __init__(self, worlds: Worlds, world_size: int, hosts_threads: bool = False) -> None:
        self.world_size = world_size
        self._hosts_threads = hosts_threads
        self._worlds = worlds
        self._ranks: list[_Rank] = []
        self._last_call = ""

    def run(self, function: Callable, args: tuple, kwargs: dict, timeout: float, num_threads: int = 0) -> list[Any]:
        """Run the function on every rank; gives the results by rank or raises `RanksFailed` after `timeout` at most."""
        __tracebackhide__ = True
        call = _make_call(function, args, kwargs, num_threads)
        name = f"{call.module}.{call.qualname}"
        try:
            self._retire_if_broken()
            if not self._ranks:
                self._start()
            for rank in self._ranks:
                rank.forget_output()
            answers = self._ask([pickle.dumps(call)] * self.world_size, timeout, name)
        except RanksFailed:
            self.kill()
            raise
        except BaseException:  # The nursery has died, or Ctrl-C came in the middle of anything.
            self._worlds.forget_nursery()
            raise
        self._last_call = name
        if all(isinstance(answer, Skipped) for answer in answers):
            pytest.skip(answers[0].reason)
        return [_load(answer.value, f"the result of {name} on rank {rank}") for rank, answer in enumerate(answers)]

    def kill(self) -> None:
        """End the ranks at once and wait until they are gone."""
        if not self._ranks:
            return
        nursery = self._worlds.nursery
        for rank in self._ranks:
            nursery.signal_rank(rank.pid, signal.SIGKILL)
        deadline = time.monotonic() + _EXIT_TIMEOUT
        for rank in self._ranks:
            nursery.await_exit(rank.pid, deadline)
        self.forget()

    def close(self) -> None:
        """End the ranks, with a moment for what was registered for the exit."""
        for rank in self._ranks:
            rank.connection.close()
        deadline = time.monotonic() + _EXIT_TIMEOUT
        for rank in self._ranks:
            self._worlds.nursery.await_exit(rank.pid, deadline)
        self.kill()

    def forget(self) -> None:
        """Give up ranks that have ended."""
        for rank in self._ranks:
            rank.close()
        self._ranks = []

    def _start(self) -> None:
        __tracebackhide__ = True
        port = _reserve_port()
        for number in range(self.world_size):
            self._ranks.append(self._start_rank(number))
        name, directory, path = self._worlds.framework.name, os.getcwd(), tuple(sys.path)
        world_size = 0 if self._hosts_threads else self.world_size
        setups = [Setup(name, rank.rank, world_size, port, directory, path) for rank in self._ranks]
        self._ask([pickle.dumps(setup) for setup in setups], START_TIMEOUT, "the start")

    def _start_rank(self, number: int) -> _Rank:
        ours, theirs = socket.socketpair()
        # A rank that stops in the middle of a message must not stop us.
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", int(_TRANSFER_TIMEOUT), 0))
        # Unlinked files: nothing is left behind however we end.
        output, stacks = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115 - open as long as the rank
        for file in (output, stacks):
            fcntl.fcntl(file, fcntl.F_SETFL, fcntl.fcntl(file, fcntl.F_GETFL) | os.O_APPEND)
        with theirs:
            pid = self._worlds.nursery.start_rank([theirs.fileno(), output.fileno(), stacks.fileno()])
        return _Rank(number, pid, Connection(ours.detach()), output, stacks)

    def _retire_if_broken(self) -> None:
        """A rank may have died after it had answered: a thread it left behind, the kernel short of memory."""
        if not self._ranks:
            return
        nursery = self._worlds.nursery
        try:
            nursery.take_news()
        except NurseryDied as death:
            how = str(death)
            self._worlds.forget_nursery()
        else:
            codes = {rank.rank: nursery.exit_code(rank.pid) for rank in self._ranks}
            how = "; ".join(f"rank {rank} {how_it_ended(code)}" for rank, code in codes.items() if code is not None)
            if how:
                self.kill()
        if how:
            warnings.warn(f"In the world of {self.world_size}, after {self._last_call} had ended: {how}", stacklevel=2)

    def _ask(self, requests: list[bytes], timeout: float, what: str) -> list[Answer]:
        """Send each rank its request and wait for all answers; raises `RanksFailed` when one is missing or bad."""
        __tracebackhide__ = True
        started = time.monotonic()
        for rank, request in zip(self._ranks, requests, strict=True):
            with contextlib.suppress(OSError):  # It has died or stopped: found out below, when no answer comes.
                rank.connection.send_bytes(request)
        answers, outcome = self._gather(started + timeout)
        skipped = {rank: answer for rank, answer in answers.items() if isinstance(answer, Skipped)}
        if len(skipped) != self.world_size:
            for rank, answer in skipped.items():
                outcome.raised[rank] = Raised(
                    "", f"pytest.skip({answer.reason!r}), which other ranks did not call", "Skipped"
                )
        if outcome.failed:
            headline = self._headline(outcome, what, time.monotonic() - started)
            self._collect_evidence(outcome)
            raise RanksFailed(headline, outcome)
        return [answers[rank] for rank in range(self.world_size)]

    def _gather(self, deadline: float) -> tuple[dict[int, Answer], Outcome]:
        """The answers that come before the deadline, or in the grace after a rank has failed; and what went wrong."""
        nursery = self._worlds.nursery
        answers: dict[int, Answer] = {}
        outcome = Outcome()
        waiting = {rank.connection: rank for rank in self._ranks}
        while waiting and (ready := wait([*waiting, nursery.connection], max(0.0, deadline - time.monotonic()))):
            for connection in [connection for connection in ready if connection in waiting]:
                rank = waiting.pop(connection)
                try:
                    answers[rank.rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    if (code := nursery.await_exit(rank.pid, time.monotonic() + _EXIT_TIMEOUT)) is not None:
                        outcome.died[rank.rank] = code
                    else:
                        outcome.silent.append(rank.rank)
                if isinstance(answers.get(rank.rank), Raised):
                    outcome.raised[rank.rank] = answers[rank.rank]
            if nursery.connection in ready:
                nursery.take_news()
                for connection, rank in list(waiting.items()):
                    # A child process that a dead rank has left may hold its connection open.
                    if (code := nursery.exit_code(rank.pid)) is not None and not connection.poll():
                        del waiting[connection]
                        outcome.died[rank.rank] = code
            if outcome.failed:
                deadline = min(deadline, time.monotonic() + GRACE * busyness())
        outcome.silent = sorted([*outcome.silent, *(rank.rank for rank in waiting.values())])
        return answers, outcome

    def _headline(self, outcome: Outcome, what: str, seconds: float) -> str:
        parts = [f"{name_ranks([rank])} {how_it_ended(code)}" for rank, code in outcome.died.items()]
        if outcome.raised:
            parts.append(f"{name_ranks(outcome.raised)} raised {' and '.join(outcome.names_raised())}")
        if outcome.silent:
            parts.append(f"{name_ranks(outcome.silent)} had not answered after {seconds:.1f} s")
        return f"{what} failed in the world of {self.world_size}: {'; '.join(parts)}"

    def _collect_evidence(self, outcome: Outcome) -> None:
        """The stacks of the ranks that have not answered, and what every rank has printed."""
        asked = [self._ranks[rank] for rank in outcome.silent]
        for rank in asked:
            self._worlds.nursery.signal_rank(rank.pid, STACK_SIGNAL)
        deadline = time.monotonic() + _STACK_TIMEOUT
        sizes: dict[int, int] = {}
        while asked and time.monotonic() < deadline:
            time.sleep(0.05)
            before, sizes = sizes, {rank.rank: os.fstat(rank.stacks.fileno()).st_size for rank in asked}
            if sizes == before and all(sizes.values()):
                break
        for rank in self._ranks:
            if rank.rank in outcome.silent or rank.rank in outcome.died:
                outcome.stacks[rank.rank] = _read(rank.stacks)
            outcome.printed[rank.rank] = _read(rank.output)


def busyness() -> float:
    """How many processes share a core, between 1 and 10: by this much longer takes what is short on a quiet machine."""
    return min(max(os.getloadavg()[0] / (os.cpu_count() or 1), 1.0), 10.0)


def _make_call(function: Callable, args: tuple, kwargs: dict, num_threads: int) -> Call:
    __tracebackhide__ = True
    module, qualname = getattr(function, "__module__", None), getattr(function, "__qualname__", None)
    if not module or not qualname or "<" in qualname:
        raise TypeError(
            f"{function!r} cannot be found by its name in another process: "
            "write a function at the top level of a module and give it what it needs as arguments"
        )
    try:
        arguments = pickle.dumps((args, kwargs))
    except Exception:
        for name, value in [*enumerate(args), *kwargs.items()]:
            try:
                pickle.dumps(value)
            except Exception as error:
                raise TypeError(
                    f"argument {name!r} of {qualname}, a {type(value).__name__}, cannot be sent to the ranks: {error}"
                ) from None
        raise
    seed = zlib.crc32(f"{module}.{qualname}".encode())
    return Call(module, qualname, arguments, seed, tuple(sys.path), num_threads)


def _reserve_port() -> int:
    """A free port on loopback that the kernel gives to nobody else for a minute, though rank 0 can listen on it.

    A connection over it is opened and closed, which leaves the port in TIME_WAIT: never chosen as a free port, but open
    to a server that sets SO_REUSEADDR, as the frameworks' stores do. So no other world or program can get it first.
    """
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        address = server.getsockname()
        with socket.create_connection(address) as client:
            accepted, _ = server.accept()
            accepted.close()  # The side that closes first keeps TIME_WAIT: ours, on the server's port.
            client.recv(1)
    return address[1]


def _load(value: bytes, what: str) -> Any:
    try:
        return pickle.loads(value)
    except Exception as error:
        raise TypeError(f"{what} was sent but cannot be unpickled here: {error!r}") from error


def _read(file: BinaryIO) -> str:
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), size, 0).decode(errors="replace")
