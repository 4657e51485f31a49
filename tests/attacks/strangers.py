"""Strangers on the network: processes that call or listen where the ranks of a world do, without being one of them."""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401 - another user may not be able to load it later
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hyper_parallel.platform.host import reception
from hyper_parallel.platform.host.transport import HostTransport

SECRET = b"known to the ranks alone"
LONG = 60.0
_RESET = struct.pack("ii", 1, 0)  # closing a socket that lingers for 0 s resets the connection


def free_port() -> int:
    """The first of two ports of the loopback device that are free."""
    while True:
        with contextlib.suppress(OSError, OverflowError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            second.bind(("127.0.0.1", port + 1))
            return port


def run_ranks(
    num_ranks: int, port: int, body: Callable[[HostTransport], Any], secret: bytes = SECRET, address: str = "127.0.0.1"
) -> list[Any]:
    """``body(transport)`` on each rank of a world of threads; the results by rank."""

    def run(rank: int) -> Any:
        with contextlib.closing(HostTransport(rank, num_ranks, address, port, "world", LONG, secret)) as transport:
            return body(transport)

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))


def name_of_rank(rank: int, num_ranks: int) -> str:
    """Under which a rank of the world of :func:`run_ranks` is called: every stranger can work it out."""
    return f"world/{num_ranks}/rank {rank}"


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def no_new_files() -> Iterator[None]:
    """Whatever is opened inside is closed in the end."""
    before = open_files()
    yield
    end = time.monotonic() + 5  # Threads of strangers may be closing theirs.
    while open_files() > before and time.monotonic() < end:
        time.sleep(0.01)
    assert open_files() <= before


_EARLIER: set[int] = set()


def leave_out_listeners() -> None:
    """Count no port on which this process listens already: other tests in it may have left theirs."""
    _EARLIER.clear()
    _EARLIER.update(listening_ports())


def listening_ports() -> set[int]:
    """The ports on which this process listens, but for those left out."""
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            inodes.add(os.readlink(f"/proc/self/fd/{name}").removeprefix("socket:[").removesuffix("]"))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].partition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes} - _EARLIER


def await_listener(num: int = 1, other_than: tuple[int, ...] = ()) -> list[int]:
    """The ports on which this process listens, once there are ``num`` besides ``other_than``."""
    end = time.monotonic() + LONG
    while time.monotonic() < end:
        found = sorted(listening_ports() - set(other_than))
        if len(found) >= num:
            return found
        time.sleep(0.005)
    raise AssertionError(f"only {found} after {LONG} s")


# ---------------------------------------------------------------- strangers that call


def _connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), LONG)


def _silent(port: int, name: str) -> socket.socket:
    return _connected(port)


def _garbage(port: int, name: str) -> socket.socket:
    sock = _connected(port)
    sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)
    return sock


def _half_a_greeting(port: int, name: str) -> socket.socket:
    sock = _connected(port)
    sock.sendall(reception._greeting(name)[:7])
    return sock


def _reset(port: int, name: str) -> socket.socket:
    sock = _connected(port)
    sock.sendall(reception._greeting(name))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    sock.close()
    return sock


def _wrong_proof(port: int, name: str) -> socket.socket:
    sock = _connected(port)
    with contextlib.suppress(OSError):
        reception.introduce(sock, b"not the secret", name, {"rank": 1})
    return sock


def _huge_card(port: int, name: str) -> socket.socket:
    sock = _connected(port)
    sock.sendall(reception._greeting(name) + bytes(32) + struct.pack("<I", 2**32 - 1) + bytes(1000))
    return sock


def _card_that_does_not_come(port: int, name: str) -> socket.socket:
    sock = _connected(port)
    sock.sendall(reception._greeting(name) + bytes(32) + struct.pack("<I", reception.CARD_BYTES) + bytes(60_000))
    return sock


STRANGERS = (_silent, _garbage, _half_a_greeting, _reset, _wrong_proof, _huge_card, _card_that_does_not_come)


@contextlib.contextmanager
def strangers_at(port: int, name: str, num: int) -> Iterator[None]:
    """``num`` strangers of all kinds call, and stay as long as they are let."""
    with contextlib.ExitStack() as stay:
        # Those that wait for an answer do so in threads: nobody may be there to answer yet.
        pool = stay.enter_context(ThreadPoolExecutor(num))
        came = [pool.submit(STRANGERS[number % len(STRANGERS)], port, name) for number in range(num)]
        try:
            yield
        finally:
            for stranger in came:
                stranger.result(LONG).close()


# ---------------------------------------------------------------- strangers that listen


@contextlib.contextmanager
def listening_stranger(answer: Callable[[socket.socket], None], port: int) -> Iterator[list[int]]:
    """A stranger that listens on the port and does ``answer(connection)`` for each caller; how many came."""
    came = [0]
    with socket.create_server(("127.0.0.1", port)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = listener.accept()[0]
                    came[0] += 1
                    threading.Thread(target=_answered, args=(answer, connection), daemon=True).start()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield came
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(LONG)


def _answered(answer: Callable[[socket.socket], None], connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError, EOFError):
        answer(connection)


def hand_on(to_port: int) -> Callable[[socket.socket], None]:
    """Be in between: what a caller says goes to another port, what that one says goes back."""

    def answer(connection: socket.socket) -> None:
        with _connected(to_port) as other:
            back = threading.Thread(target=_pump, args=(other, connection), daemon=True)
            back.start()
            _pump(connection, other)
            back.join(LONG)

    return answer


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


# ---------------------------------------------------------------- strangers on the host


@contextlib.contextmanager
def as_another_user(act: Callable[[], bool]) -> Iterator[Callable[[], bytes]]:
    """``act()`` in a process of the user "nobody"; yields a function that gives its result in one byte."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            os.write(writing, b"y" if act() else b"n")
        except BaseException as error:
            os.write(2, repr(error).encode())
            os.write(writing, b"!")
        finally:
            os._exit(0)
    os.close(writing)
    try:
        yield lambda: os.read(reading, 1)
    finally:
        os.close(reading)
        os.waitpid(child, 0)
