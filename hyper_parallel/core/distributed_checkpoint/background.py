"""The rank's side of background saves: starting the writer process, giving it memory and jobs, hearing from it.

Note [Slow is not dead]
Nothing here has a time limit. A machine that is busy can make a process wait for minutes, and a writer that is late
must not cost a checkpoint. That a process is gone is told by the kernel alone: its connections end and its pidfd
becomes readable, at once and never before. So

- a rank waits for its writer's answer until the answer, or the writer's end, arrives;
- a writer waits for its rank's jobs until one, or the rank's end, arrives; a job that it has begun it finishes, also
  without the rank, since the bytes are in shared memory: the checkpoint is then whole. So is one whose rank ended
  before its writer had started, since what a process has said stays in the socket when it ends;
- writers wait for each other until a message, or the end of a connection, arrives. Each end of these connections is
  open in one process only: a rank closes its own as soon as its writer has it. Keep-alive probes, which the kernel
  answers however busy the process is, find hosts that vanished.

Writers are started as new programs, never forked, so no lock or thread of the training process can hang them; they do
not import the framework, so they are small. They are the leaders of their own sessions: Ctrl-C in a terminal ends the
training and not the checkpoint that is being written.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

from hyper_parallel.core.distributed_checkpoint.agreement import Agreement
from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError
from hyper_parallel.core.distributed_checkpoint.shared_memory import SharedMemory
from hyper_parallel.core.distributed_checkpoint.writer_process import HELLO, hand_over, receive_message

_WRITER = "hyper_parallel.core.distributed_checkpoint.writer_process"

# A child that this process forks would keep open what ends when the writer or this process ends. So the child closes
# all that is known, and a fork waits while there are files that only the writer may have.
_writers: weakref.WeakSet[WriterProcess] = weakref.WeakSet()
_no_forks = threading.RLock()


def _close_in_child() -> None:
    for writer in list(_writers):
        writer.close_connections()


os.register_at_fork(before=_no_forks.acquire, after_in_parent=_no_forks.release, after_in_child=_no_forks.release)
os.register_at_fork(after_in_child=_close_in_child)


class Address(NamedTuple):
    """Where the writer process of rank 0 listens, and what to say to it."""

    host: str
    port: int
    token: bytes


class WriterProcess:
    """A writer process and what this rank shares with it. One job at a time."""

    def __init__(self, agreement: Agreement) -> None:
        """Every rank calls: connect the writer processes of all ranks, which start with the first job."""
        self.rank, self.world_size = agreement.rank, agreement.world_size
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._memory: SharedMemory | None = None
        self._answer: Any = None
        self.is_busy = False
        self.is_broken = False
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = -1
        self._token = b""
        self._ends: dict[str, socket.socket | None] = {"listener": None, "link": None}
        if self.world_size > 1:
            self._ends["listener"], address = _open_listener(agreement)
            self._token = address.token
            self._ends["link"] = _connect(agreement, address)
        self._control, self._ends["control"] = socket.socketpair()
        _writers.add(self)

    @property
    def pid(self) -> int:
        """The writer's process number, after the first job has begun."""
        assert self._process is not None
        return self._process.pid

    # ---------------------------------------------------------------- memory

    def memory(self, num_bytes: int) -> SharedMemory:
        """Shared memory of at least this size: the one of the last save if that is large enough."""
        if self._memory is None or num_bytes > self._memory.size:
            if self._memory is not None:
                self._memory.close()  # before the new one: only one of them at a time
                self._memory = None
            self._memory = SharedMemory(num_bytes)
            self._send(("memory", self._memory.size), (self._memory.file,))
        return self._memory

    # ---------------------------------------------------------------- jobs

    def start_job(self, job: dict[str, Any]) -> None:
        """Hand over a job; the memory belongs to the writer until the job is done."""
        assert not self.is_busy
        self._answer = None
        self.is_busy = True
        if self._process is None:
            self._start()
        self._send(("job", job))

    def _start(self) -> None:
        """Start the writer. It takes a second of a processor, so only now, behind the copy that training waits for."""
        try:
            with _no_forks:
                self._process = _start(self._ends, self.rank, self.world_size, self._token)
            self._ended = os.pidfd_open(self._process.pid)
        except OSError as error:
            self._end_job("failed", ("lost", self._obituary(f"cannot be started: {error}")))
        finally:
            self._close_ends()

    def _close_ends(self) -> None:
        for end in self._ends.values():
            if end is not None:
                end.close()

    def _send(self, message: Any, files: tuple[int, ...] = ()) -> None:
        # A writer that is gone is found out when its answer is awaited.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            hand_over(self._control, message, files)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the job is done or the writer gone; False if ``timeout`` seconds were not enough."""
        if self._owner != os.getpid():
            raise CheckpointError(
                f"process {self._owner}, which forked this one, has the checkpoint written and hears how that ends: "
                "ask for the result there"
            )
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._lock:
            while self.is_busy:
                left = None if deadline is None else max(deadline - time.monotonic(), 0)
                if not wait([self._control, self._ended], left):
                    return False
                self._take_answer()
            return True

    def _take_answer(self) -> None:
        try:
            with self.ends_writer_if_interrupted():
                # Also when it has ended: it may have answered before.
                answer = receive_message(self._control, self._ended)[0]
        except Exception as error:  # ParentGone, EOFError, ConnectionResetError: all the same
            del error
            answer = ("failed", ("lost", self._obituary(self._how_it_ended())))
        self._end_job(*answer)

    def _end_job(self, kind: str, value: Any) -> None:
        self._answer = kind, value
        if kind == "failed" and value[0] == "lost":
            self.is_broken = True
        self.is_busy = False

    def _how_it_ended(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"

    def _obituary(self, how: str) -> str:
        return (
            f"saving failed: the process that writes the checkpoint for rank {self.rank} {how}; the previous "
            "checkpoint is untouched"
        )

    @property
    def answer(self) -> tuple[str, Any]:
        """("done", what the coordinator committed or None) or ("failed", (kind, text)) of the last job."""
        return self._answer

    # ---------------------------------------------------------------- the end

    @contextlib.contextmanager
    def ends_writer_if_interrupted(self) -> Iterator[None]:
        """What is interrupted in here, by Ctrl-C say, nobody can go on with: the writer ends, so that none waits."""
        try:
            yield
        except BaseException:
            self._say_no_more()
            raise

    def _say_no_more(self) -> None:
        """The writer ends when it has done what it was told, also where a forked child could go on."""
        self.is_broken = True
        self._close_ends()
        with contextlib.suppress(OSError):  # It may be gone.
            self._control.shutdown(socket.SHUT_WR)

    def close_connections(self) -> None:
        """All that this process can say to writers by."""
        self._control.close()
        self._close_ends()

    def close(self) -> None:
        """Let the writer finish what it does, and end. In a forked child, whose it is not: nothing."""
        if self._owner != os.getpid():
            return
        self._say_no_more()
        self.close_connections()
        if self._process is not None:
            self._process.wait()
            os.close(self._ended)
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _start(ends: dict[str, socket.socket | None], rank: int, world_size: int, token: bytes) -> subprocess.Popen[bytes]:
    numbers = {name: None if end is None else end.fileno() for name, end in ends.items()}
    setup: dict[str, Any] = {
        **numbers,
        "parent": os.pidfd_open(os.getpid()),
        "rank": rank,
        "world_size": world_size,
        "token": token.hex(),
    }
    package = str(Path(__file__).resolve().parents[3])
    path = [package, *(entry for entry in sys.path if entry)]
    try:
        return subprocess.Popen(
            [sys.executable, "-m", _WRITER, json.dumps(setup)],
            pass_fds=[setup["parent"], *(number for number in numbers.values() if number is not None)],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
            start_new_session=True,
        )
    finally:
        os.close(setup["parent"])


# ---------------------------------------------------------------------------------------------------------------------
# Connections between writers: made here, where all ranks are known to be alive, and handed over
# ---------------------------------------------------------------------------------------------------------------------


def _open_listener(agreement: Agreement) -> tuple[socket.socket | None, Address]:
    made: list[socket.socket] = []

    def listen() -> Address | None:
        if not agreement.is_coordinator:
            return None
        listener, address = _listen(agreement.world_size)
        made.append(listener)
        return address

    address = agreement.round("starting background saves", listen, lambda addresses: addresses[0])
    return (made[0] if made else None), address


def _listen(world_size: int) -> tuple[socket.socket, Address]:
    host = os.environ.get("MASTER_ADDR") or socket.gethostname()
    family, _, _, _, found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    # Only where the other ranks come from: on one host nobody else can connect.
    where = found[0] if ipaddress.ip_address(found[0]).is_loopback else ""
    listener = socket.create_server((str(where), 0), family=family, backlog=world_size)
    return listener, Address(host, listener.getsockname()[1], os.urandom(16))


def _connect(agreement: Agreement, address: Address) -> socket.socket | None:
    made: list[socket.socket] = []

    def connect() -> None:
        if agreement.is_coordinator:
            return
        try:
            link = socket.create_connection((address.host, address.port))
        except OSError as error:
            raise ConnectionError(
                f"cannot reach the writer process of rank 0 at {address.host}:{address.port}: {error}"
            ) from error
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        link.sendall(HELLO.pack(address.token, agreement.rank))
        made.append(link)

    agreement.round("starting background saves", connect)
    return made[0] if made else None
