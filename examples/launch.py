"""Start the ranks of an example as local processes and listen to them, with a clear end if one dies.

A rank is the same script started again with RANK, WORLD_SIZE and a meeting place in its environment. It talks by
printing JSON lines. When a rank dies or all fall silent, the others are stopped and `RankFailure` says which one, how,
and what it last wrote.
"""

import contextlib
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

INIT_METHOD_VARIABLE = "EXAMPLE_INIT_METHOD"
_POLL_SECONDS = 0.05
# After the first death its peers fail too, of a broken connection. Wait this long to see all and name the cause.
_SETTLE_SECONDS = 0.3


class RankFailure(RuntimeError):
    """A rank died or fell silent."""


def say(message: dict[str, Any]) -> None:
    """Called by a rank: send a message to the process that started it."""
    print(json.dumps(message), flush=True)


def run_ranks(
    command: list[str], num_ranks: int, silence_seconds: float = 60.0
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Run `command` once per rank and yield (rank, message) until all have ended well; else raise `RankFailure`."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hyper_parallel_")))
        secret = secrets.token_hex(32)  # Nobody else can join these ranks.
        ranks = [_start(command, rank, num_ranks, folder, secret, stack) for rank in range(num_ranks)]
        messages: queue.Queue[tuple[int, str]] = queue.Queue()
        listeners = [
            threading.Thread(target=_listen, args=(rank, process, messages), daemon=True)
            for rank, process in enumerate(ranks)
        ]
        for listener in listeners:
            listener.start()
        last_heard = time.monotonic()
        while True:
            # Looked at before the queue, so that a rank's last message cannot arrive after we have decided to leave.
            all_quiet = not any(listener.is_alive() for listener in listeners)
            try:
                rank, line = messages.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                _raise_if_dead(ranks, folder)
                if all_quiet and all(process.poll() == 0 for process in ranks):
                    return
                if time.monotonic() - last_heard > silence_seconds:
                    raise RankFailure(f"no rank said anything for {silence_seconds:.0f} s; all were stopped") from None
                continue
            last_heard = time.monotonic()
            yield rank, json.loads(line)


def _start(
    command: list[str], rank: int, num_ranks: int, folder: Path, secret: str, stack: contextlib.ExitStack
) -> subprocess.Popen[str]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        INIT_METHOD_VARIABLE: f"file://{folder}/rendezvous",
        "HYPER_PARALLEL_SECRET": secret,
    }
    environment.pop("HYPER_PARALLEL_SECRET_FILE", None)
    if sys.platform == "linux":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with open(folder / f"rank{rank}.txt", "w") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
    stack.callback(_stop, process)
    return process


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.wait()


def _listen(rank: int, process: subprocess.Popen[str], messages: "queue.Queue[tuple[int, str]]") -> None:
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            if line.startswith("{"):
                messages.put((rank, line))


def _raise_if_dead(ranks: list[subprocess.Popen[str]], folder: Path) -> None:
    if not any(process.poll() for process in ranks):
        return
    time.sleep(_SETTLE_SECONDS)
    dead = {rank: process.returncode for rank, process in enumerate(ranks) if process.poll()}
    # A signal is a cause of its own; a failed exit may be the echo of it.
    rank, status = min(dead.items(), key=lambda item: (item[1] >= 0, item[0]))
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
    last_words = (folder / f"rank{rank}.txt").read_text().strip().splitlines()[-3:]
    text = f"rank {rank} {how}; the other ranks were stopped"
    if last_words:
        text += "\n" + "\n".join(f"  rank {rank}: {line}" for line in last_words)
    raise RankFailure(text)
