"""The roll call before ranks join their world: who has not come is said by number, and in minutes.

A framework waits half an hour for a rank that never started and then says that a socket timed out. Here rank 0 listens
where the world will meet, for as long as the roll call takes; every other rank says its number and its host and waits
for the answer: all are here, or who is missing. Nothing is believed that a caller says but that it is there.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import time
from contextlib import ExitStack, suppress

__all__ = ["call_roll"]

_PAUSE = 0.05
_MOST_BYTES = 1024  # of what a caller says


def call_roll(rank: int, size: int, address: str, port: int, limit: float) -> None:
    """Wait until all ranks have come; if one has not within ``limit`` seconds, a TimeoutError on all that have."""
    if rank == 0:
        problem = _host(size, address, port, limit)
    else:
        problem = _call(rank, size, address, port, limit)
    if problem is not None:
        raise TimeoutError(problem)


def _host(size: int, address: str, port: int, limit: float) -> str | None:
    end = time.monotonic() + limit
    with ExitStack() as stack:
        listener = stack.enter_context(_listener(address, port))
        watched = stack.enter_context(selectors.DefaultSelector())
        watched.register(listener, selectors.EVENT_READ)
        said: dict[socket.socket, bytes] = {}
        ranks: dict[int, tuple[socket.socket, str]] = {}
        problem = None
        while len(ranks) < size - 1 and problem is None:
            for key, _ in watched.select(max(0.0, min(_PAUSE, end - time.monotonic()))):
                if key.fileobj is listener:
                    caller = stack.enter_context(listener.accept()[0])
                    caller.setblocking(False)
                    watched.register(caller, selectors.EVENT_READ)
                    said[caller] = b""
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    problem = problem or _hear(key.fileobj, watched, said, ranks, size)
            if time.monotonic() >= end and len(ranks) < size - 1:
                problem = problem or _missing([one for one in range(1, size) if one not in ranks], size, limit)
        answer = json.dumps({"problem": problem}).encode() + b"\n"
        for caller in said:
            with suppress(OSError):  # It has gone, or never reads; the answer fits into what the kernel keeps for it.
                caller.send(answer)
        return problem


def _listener(address: str, port: int) -> socket.socket:
    family, *_, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    host = where[0] if str(where[0]) in ("127.0.0.1", "::1") else ""
    try:
        return socket.create_server((str(host), port), family=family, backlog=1024)
    except OSError as error:
        why = os.strerror(error.errno or 0)
        raise ValueError(
            f"rank 0 cannot listen at port {port} of {address}, where the ranks are to meet: {why}; "
            "set MASTER_PORT, or --master, to another port"
        ) from None


def _hear(
    caller: socket.socket,
    watched: selectors.DefaultSelector,
    said: dict[socket.socket, bytes],
    ranks: dict[int, tuple[socket.socket, str]],
    size: int,
) -> str | None:
    """What one caller has to say: its card, nonsense, or that it is gone; a problem if two say one number."""
    try:
        data = caller.recv(_MOST_BYTES)
    except OSError:
        data = b""
    said[caller] += data
    if data and b"\n" not in said[caller] and len(said[caller]) < _MOST_BYTES:
        return None
    known = next((rank for rank, (sock, _) in ranks.items() if sock is caller), None)
    if data and known is None:
        with suppress(ValueError, TypeError, KeyError):
            card = json.loads(said[caller].split(b"\n")[0])
            rank, host, of = int(card["rank"]), str(card["host"])[:64], int(card["size"])
            if of != size:
                return f"rank {rank} on {host} is of a world of {of} ranks and rank 0 of one of {size}"
            if rank in ranks or not 0 < rank < size:
                other = f"on {ranks[rank][1]} and on {host}" if rank in ranks else f"one of them on {host}"
                return f"two processes say that they are rank {rank}: {other}; give every process its own RANK"
            ranks[rank] = (caller, host)
            return None
    watched.unregister(caller)
    if known is not None:  # It has come, and it is gone again.
        del ranks[known]
    return None


def _call(rank: int, size: int, address: str, port: int, limit: float) -> str | None:
    end = time.monotonic() + limit
    card = json.dumps({"rank": rank, "size": size, "host": socket.gethostname()}).encode() + b"\n"
    while time.monotonic() < end:
        try:
            with socket.create_connection((address, port), timeout=max(0.1, end - time.monotonic())) as sock:
                sock.sendall(card)
                # Rank 0 may have started its own limit later, and is the one to say who is missing.
                sock.settimeout(max(0.1, end - time.monotonic()) + limit)
                answer = sock.makefile("rb").readline(64 * _MOST_BYTES)
            return json.loads(answer)["problem"]
        except (OSError, ValueError, KeyError, TypeError):
            time.sleep(_PAUSE)
    return f"rank 0 of {size} has not come to {address}, port {port}, within {limit:g} s, says rank {rank}"


def _missing(ranks: list[int], size: int, limit: float) -> str:
    shown = ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
    many = len(ranks) > 1
    return f"rank{'s' * many} {shown} of {size} {'have' if many else 'has'} not come within {limit:g} s"
