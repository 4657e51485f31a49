"""Messages between the host processes of a world: bytes over TCP, free of any framework.

A platform whose framework has no transport for host memory that can be relied on builds its collectives on this (see
``host_collectives.py``). Every pair of processes has one connection, made when the world starts. One thread per process
reads them all, so sending never waits for the other side to turn to its receive, and messages may be sent and received
in any order. A message has a channel (which group, and whether a collective or a message of the user), a number (which
collective of the group, or the user's tag) and the name of the operation, for errors.

Note [A peer that dies]
    Its connections are closed by the kernel. Whoever waits for it, or for any member of a group it belongs to, raises
    at once with its rank. A process that ends in order says goodbye first: then only those who wait for *it* raise,
    since it has sent all that it was going to send.

Note [A peer that sends nonsense]
    Whatever goes wrong while a message is read concerns its sender alone: the connection to it ends, and whoever waits
    for it raises at once with the reason.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import hashlib
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hyper_parallel.platform.host.meeting import meet
from hyper_parallel.platform.host.shared_segment import ProcessIdentity

__all__ = ["HostTransport", "PeerLost", "channel_of"]

_HEADER = struct.Struct("<QqIQ")  # channel, number, operation, bytes
_GOODBYE = 0  # a channel that no group has
_SMALL = 64 * 1024


class PeerLost(RuntimeError):
    """A rank that is needed has died or has left the world."""


def channel_of(name: str) -> int:
    """The number of a channel with this name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1


def _operation_number(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")


@functools.cache
def _memory_of_host() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@dataclass
class _Peer:
    rank: int
    socket: socket.socket
    process: ProcessIdentity
    host: str
    send_lock: threading.Lock
    # What is being received: the header's bytes, then the message's.
    header: bytearray = field(default_factory=lambda: bytearray(_HEADER.size))
    num_read: int = 0
    message: np.ndarray | None = None
    key: tuple[int, int] = (0, 0)
    operation: int = 0
    gone: str | None = None  # how it went
    said_goodbye: bool = False

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process.pid} on {self.host})"


class HostTransport:
    """This process's connections to the other processes of its world.

    The ranks prove to each other that they know ``secret``; without one see Note [Who may join] in ``meeting.py``.
    """

    def __init__(
        self, rank: int, world_size: int, address: str, port: int, name: str, timeout: float, secret: bytes = b""
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self._arrived: dict[tuple[int, int, int], collections.deque[tuple[int, np.ndarray]]] = {}
        self._news = threading.Condition()
        self._operations: dict[int, str] = {}
        self._closed = False
        self._bell, self._ringer = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ, None)
        self._owner = os.getpid()
        self._peers: dict[int, _Peer] = {}
        try:
            sockets, cards = meet(rank, world_size, address, port, name, timeout, secret)
            for other, sock in sockets.items():
                peer = _Peer(other, sock, cards[other].process, cards[other].host, threading.Lock())
                self._peers[other] = peer
                self._selector.register(sock, selectors.EVENT_READ, peer)
            self._reader = threading.Thread(target=self._read, name="hyper_parallel-transport", daemon=True)
            self._reader.start()
        except BaseException:
            self._close_files()
            raise
        # Not a reference to this object, which may end before the process does.
        self._at_exit = functools.partial(_call_if_there, weakref.WeakMethod(self.close))
        atexit.register(self._at_exit)

    # ---------------------------------------------------------------- sending and receiving

    def send(self, peer: int, channel: int, number: int, operation: str, data: Any) -> None:
        """Send ``data`` (bytes, or a vector of bytes) to ``peer``; on return it may be overwritten."""
        self._check_open(operation)
        target = self._peers[peer]
        view = memoryview(data)
        header = _HEADER.pack(channel, number, self._number_of(operation), len(view))
        try:
            with target.send_lock:
                if len(view) <= _SMALL:
                    target.socket.sendall(header + view.tobytes())
                else:
                    target.socket.sendall(header)
                    target.socket.sendall(view)
        except OSError:
            # The reader finds out how it ended; give it the moment to read what came before the end.
            with self._news:
                self._news.wait_for(lambda: target.gone is not None or self._closed, 5.0)
            raise self._lost(operation, [target]) from None

    def receive(
        self,
        sources: Sequence[int],
        channel: int,
        number: int,
        operation: str,
        members: Iterable[int] = (),
        timeout: float | None = None,
    ) -> tuple[int, np.ndarray]:
        """(rank, bytes) of the first message that comes from one of ``sources``; ``members`` must be alive
        meanwhile.
        """
        self._check_open(operation)
        keys = [(source, channel, number) for source in sources]
        needed = [self._peers[rank] for rank in {*members, *sources} if rank != self.rank]
        asked = [self._peers[source] for source in sources]

        limit = self.timeout if timeout is None else timeout
        end = time.monotonic() + limit
        with self._news:
            while True:
                for key in keys:
                    queue = self._arrived.get(key)
                    if queue:
                        sent_by, data = queue.popleft()
                        if not queue:
                            del self._arrived[key]
                        self._check_operation(key[0], sent_by, operation)
                        return key[0], data
                dead = [peer for peer in needed if peer.gone is not None and not peer.said_goodbye]
                if dead or all(peer.gone is not None for peer in asked):
                    raise self._lost(operation, dead or asked)
                if self._closed:
                    self._check_open(operation)
                remaining = end - time.monotonic()
                if remaining <= 0:
                    waited = " or ".join(map(str, asked))
                    raise TimeoutError(
                        f"{operation} on rank {self.rank} gave up after {limit:g} s: nothing came from {waited}"
                    )
                self._news.wait(min(remaining, 3600.0))

    def has_arrived(self, source: int, channel: int, number: int) -> bool:
        """Whether a message is there, so that receiving it does not wait."""
        with self._news:
            return bool(self._arrived.get((source, channel, number)))

    def fail(self, peers: Sequence[int], why: str) -> None:
        """Let these peers know that what they wait for from this process will not come, and why."""
        text = why.encode()[:_SMALL]
        for rank in peers:
            with contextlib.suppress(OSError), self._peers[rank].send_lock:
                self._peers[rank].socket.sendall(_HEADER.pack(_GOODBYE, 0, 0, len(text)) + text)

    def close(self) -> None:
        """Say goodbye to all and end the connections. Twice is once."""
        with self._news:
            if self._closed:
                return
            self._closed = True
            self._news.notify_all()
        if os.getpid() == self._owner:
            for peer in self._peers.values():
                with contextlib.suppress(OSError):
                    # A peer that does not read any more must not keep us here.
                    peer.socket.settimeout(5.0)
                    with peer.send_lock:
                        peer.socket.sendall(_HEADER.pack(_GOODBYE, 0, 0, 0))
                        peer.socket.shutdown(socket.SHUT_WR)
            with contextlib.suppress(OSError):
                self._ringer.send(b".")
            if threading.current_thread() is not self._reader:
                self._reader.join(10.0)
        self._close_files()
        atexit.unregister(self._at_exit)

    def _close_files(self) -> None:
        self._selector.close()
        for end in (*(peer.socket for peer in self._peers.values()), self._bell, self._ringer):
            end.close()

    # ---------------------------------------------------------------- errors

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise RuntimeError(f"{operation} on rank {self.rank}: this process has left the world")
        if os.getpid() != self._owner:
            raise RuntimeError(
                f"{operation}: the world belongs to process {self._owner} and cannot be used in its forked child "
                f"{os.getpid()}; start processes before joining the world"
            )

    def _check_operation(self, source: int, sent_by: int, operation: str) -> None:
        if sent_by != self._number_of(operation):
            theirs = self._operations.get(sent_by, "another operation")
            raise RuntimeError(
                f"the ranks disagree: rank {self.rank} is in {operation}, rank {source} is in {theirs}; every rank of "
                "a group must call the same collectives in the same order (HYPER_PARALLEL_CHECK_COLLECTIVES=1 shows "
                "more)"
            )

    def _lost(self, operation: str, peers: Sequence[_Peer]) -> PeerLost:
        how = ", ".join(f"{peer} {peer.gone or 'does not take messages any more'}" for peer in peers)
        return PeerLost(f"{operation} on rank {self.rank} cannot end: {how}")

    def _number_of(self, operation: str) -> int:
        number = _operation_number(operation)
        self._operations[number] = operation
        return number

    # ---------------------------------------------------------------- the reading thread

    def _read(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select():
                if key.data is None:
                    return
                try:
                    self._read_from(key.data)
                except Exception as error:
                    self._lose(key.data, error)

    def _lose(self, peer: _Peer, error: Exception) -> None:
        """See Note [A peer that sends nonsense]."""
        self._selector.unregister(peer.socket)
        if isinstance(error, (OSError, EOFError)):
            how = "has left the world" if peer.said_goodbye else "has died"
        else:
            how = f"sent what cannot be received ({type(error).__name__}: {error})"
            with contextlib.suppress(OSError):  # It shall hear of it too.
                peer.socket.shutdown(socket.SHUT_RDWR)
        with self._news:
            peer.message = None
            peer.gone = peer.gone or how
            self._news.notify_all()

    def _read_from(self, peer: _Peer) -> None:
        """Take what has come: a part of a header, or of a message."""
        into = memoryview(peer.header) if peer.message is None else peer.message.data
        num_read = peer.socket.recv_into(into[peer.num_read :], len(into) - peer.num_read)
        if num_read == 0:
            raise EOFError
        peer.num_read += num_read
        if peer.num_read < len(into):
            return
        peer.num_read = 0
        if peer.message is None:
            channel, number, peer.operation, num_bytes = _HEADER.unpack(peer.header)
            if channel == _GOODBYE and not num_bytes:
                peer.said_goodbye = True
                return
            peer.key = (channel, number)
            if num_bytes > _memory_of_host():
                raise MemoryError(f"{num_bytes} bytes are announced, more than this host has")
            peer.message = np.empty(num_bytes, dtype=np.uint8)
            if num_bytes:
                return
        with self._news:
            if peer.key[0] == _GOODBYE:
                assert peer.message is not None
                peer.gone = f"has failed: {peer.message.tobytes().decode(errors='replace')}"
            else:
                queue = self._arrived.setdefault((peer.rank, *peer.key), collections.deque())
                queue.append((peer.operation, peer.message))
            self._news.notify_all()
        peer.message = None


def _call_if_there(method: weakref.WeakMethod) -> None:
    close = method()
    if close is not None:
        close()
