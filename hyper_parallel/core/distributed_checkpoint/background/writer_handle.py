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
  open in one process only: a rank closes its own when it has handed them over. Keep-alive probes, which the kernel
  answers however busy the process is, find hosts that vanished.

Writers are started as new programs, never forked, so no lock or thread of the training process can hang them; they do
not import the framework, so they are small. They are the leaders of their own sessions: Ctrl-C in a terminal ends the
training and not the checkpoint that is being written.

Note [How a writer is started]
All that a writer must know comes over a socket pair whose other end this process has: the command line and the
environment, which others can read, hold no secret. The interpreter runs isolated (``-I``): it takes no module from the
current directory, from a folder that ``PYTHONPATH`` names, or from the user's own packages before it has this process's
own path, without the entries that depend on where a process happens to be.

Jobs are pickles, since they hold the user's storage writer. Both ends of the pair have come from this process and from
nobody else: what is unpickled was pickled here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import wait
from typing import Any

from hyper_parallel.core.distributed_checkpoint.agreement.agreement import Agreement
from hyper_parallel.core.distributed_checkpoint.background.fork_guard import no_forks, not_for_children
from hyper_parallel.core.distributed_checkpoint.background.shared_memory import SharedMemory
from hyper_parallel.core.distributed_checkpoint.background.writer_links import connect_writers
from hyper_parallel.core.distributed_checkpoint.background.writer_process import MAX_FILES, hand_over, receive_message
from hyper_parallel.core.distributed_checkpoint.base.errors import CheckpointError
from hyper_parallel.platform.host.world_secret import SECRET

# Known from the start: what is imported or changed later has no part in which program is run.
_PYTHON = sys.executable
_PACKAGE = os.path.abspath(os.path.join(os.path.realpath(__file__), *[os.pardir] * 5))
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "from hyper_parallel.core.distributed_checkpoint.background.writer_process import main; main(int(sys.argv[1]))"
)


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
        links = connect_writers(agreement) if self.world_size > 1 else {}
        try:
            self._control, self._writers_end = map(not_for_children, socket.socketpair())
            self._introduce(links)
        finally:
            for link in links.values():
                link.close()

    def _introduce(self, links: dict[int, socket.socket]) -> None:
        """Say who this is and hand the connections over: it stays in the socket until the writer reads it."""
        me = os.pidfd_open(os.getpid())
        try:
            self._send(("rank", (self.rank, self.world_size)), (me,))
        finally:
            os.close(me)
        left = iter(links.items())
        while some := list(itertools.islice(left, MAX_FILES)):
            self._send(("links", [rank for rank, _ in some]), tuple(link.fileno() for _, link in some))

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
            with no_forks:
                self._process = _start(self._writers_end)
            self._ended = os.pidfd_open(self._process.pid)
        except OSError as error:
            self._end_job("failed", ("lost", self._obituary(f"cannot be started: {error}")))
        finally:
            self._writers_end.close()

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
        self._writers_end.close()
        with contextlib.suppress(OSError):  # It may be gone.
            self._control.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Let the writer finish what it does, and end. In a forked child, whose it is not: nothing."""
        if self._owner != os.getpid():
            return
        self._say_no_more()
        self._control.close()
        if self._process is not None:
            self._process.wait()
            os.close(self._ended)
        if self._memory is not None:
            self._memory.close()
            self._memory = None


def _start(control: socket.socket) -> subprocess.Popen[bytes]:
    """Start a writer; see Note [How a writer is started]."""
    if not os.path.isabs(_PYTHON) or not os.access(_PYTHON, os.X_OK) or os.path.isdir(_PYTHON):
        raise FileNotFoundError(
            f"sys.executable is {_PYTHON!r}, which is no program, so there is no Python to start; call save() instead"
        )
    path = [_PACKAGE, *(entry for entry in sys.path if type(entry) is str and os.path.isabs(entry))]
    options = ["-I", *(["-X", "utf8"] if sys.flags.utf8_mode else [])]
    return subprocess.Popen(
        [_PYTHON, *options, "-c", _PROGRAM, str(control.fileno()), json.dumps(path)],
        pass_fds=[control.fileno()],
        stdin=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if name != SECRET},
        start_new_session=True,
    )
