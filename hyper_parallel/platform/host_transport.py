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

Note [Where the ranks meet]
    Rank 0 listens on MASTER_PORT, or on one of the ports after it when that one is taken (torchrun's own store has it).
    The others try these ports in turn; a greeting with the name of the world tells ours from any other server. There is
    no scheduler process, and nothing is left listening once all have come.
"""

from __future__ import annotations

import atexit
import collections
import contextlib
import functools
import hashlib
import ipaddress
import json
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hyper_parallel.platform.eras import Eras
from hyper_parallel.platform.shared_segment import ProcessIdentity

__all__ = ["HostTransport", "PeerFailed", "PeerLost", "channel_of"]

_HEADER = struct.Struct("<QqIQ")  # channel, number, operation, bytes
_LENGTH = struct.Struct("<I")
_NUM_PORTS = 32  # tried from MASTER_PORT on
_GOODBYE, _FAILURE = 0, 2  # channels that no group has
_SMALL = 64 * 1024


class PeerLost(RuntimeError):
    """A rank that is needed has died or has left the world."""


class PeerFailed(RuntimeError):
    """A rank that is needed could not do its backward."""


def channel_of(name: str) -> int:
    """The number of a channel with this name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") | 1


def _operation_number(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")


@dataclass
class _Peer:
    rank: int
    socket: socket.socket
    process: ProcessIdentity
    host: str
    send_lock: threading.Lock
    # What is being received: the header's bytes, then the message's.
    header: bytearray
    num_read: int = 0
    message: np.ndarray | None = None
    key: tuple[int, int] = (0, 0)
    operation: int = 0
    gone: str | None = None  # how it went
    said_goodbye: bool = False
    era: int = 0
    failure: str = ""  # what began its era

    def __str__(self) -> str:
        return f"rank {self.rank} (process {self.process.pid} on {self.host})"


class HostTransport:
    """This process's connections to the other processes of its world."""

    def __init__(self, rank: int, world_size: int, address: str, port: int, name: str, timeout: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout = timeout
        self._arrived: dict[tuple[int, int, int], collections.deque[tuple[int, np.ndarray]]] = {}
        self._news = threading.Condition()
        self._operations: dict[int, str] = {}
        self._closed = False
        self.eras = Eras(self._tell_failure)
        sockets, cards = _meet(rank, world_size, address, port, name, timeout)
        self._peers = {
            peer: _Peer(peer, sock, cards[peer].process, cards[peer].host, threading.Lock(), bytearray(_HEADER.size))
            for peer, sock in sockets.items()
        }
        self._selector = selectors.DefaultSelector()
        for peer in self._peers.values():
            peer.socket.setblocking(True)
            self._selector.register(peer.socket, selectors.EVENT_READ, peer)
        self._bell, self._ringer = socket.socketpair()
        self._selector.register(self._bell, selectors.EVENT_READ, None)
        self._owner = os.getpid()
        self._reader = threading.Thread(target=self._read, name="hyper_parallel-transport", daemon=True)
        self._reader.start()
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

        def has_failed(peer: _Peer) -> bool:
            return not self.eras.may_come(number, peer.era)

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
                if dead or all(peer.gone is not None or has_failed(peer) for peer in asked):
                    break
                if self._closed:
                    self._check_open(operation)
                remaining = end - time.monotonic()
                if remaining <= 0:
                    waited = " or ".join(map(str, asked))
                    raise TimeoutError(
                        f"{operation} on rank {self.rank} gave up after {limit:g} s: nothing came from {waited}"
                    )
                self._news.wait(min(remaining, 3600.0))
        failed = [peer for peer in dead or asked if has_failed(peer)]
        raise self._failed(operation, failed) if failed else self._lost(operation, dead or asked)

    def has_arrived(self, source: int, channel: int, number: int) -> bool:
        """Whether a message is there, so that receiving it does not wait."""
        with self._news:
            return bool(self._arrived.get((source, channel, number)))

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
        for end in (*(peer.socket for peer in self._peers.values()), self._bell, self._ringer):
            end.close()
        self._selector.close()
        atexit.unregister(self._at_exit)

    # ---------------------------------------------------------------- errors

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise RuntimeError(f"{operation} on rank {self.rank}: this process has left the world")
        if self.eras.why_lost is not None:
            raise PeerFailed(f"{operation} on rank {self.rank}: this rank has lost the others: {self.eras.why_lost}")
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

    def _failed(self, operation: str, peers: Sequence[_Peer]) -> PeerFailed:
        how = "; ".join(f"the backward of {peer} failed: {peer.failure}" for peer in peers)
        error = f"{operation} on rank {self.rank} cannot end: {how}"
        self.eras.another_failed(error)
        return PeerFailed(error)

    def _tell_failure(self, era: int, why: str) -> None:
        text = why[:2000].encode()
        for peer in self._peers.values():
            with contextlib.suppress(OSError), peer.send_lock:
                peer.socket.sendall(_HEADER.pack(_FAILURE, era, 0, len(text)) + text)

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
                except (OSError, EOFError):
                    self._selector.unregister(key.data.socket)
                    with self._news:
                        peer = key.data
                        peer.gone = "has left the world" if peer.said_goodbye else "has died"
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
            if channel == _GOODBYE:
                peer.said_goodbye = True
                return
            peer.key = (channel, number)
            peer.message = np.empty(num_bytes, dtype=np.uint8)
            if num_bytes:
                return
        with self._news:
            if peer.key[0] == _FAILURE:
                peer.era, peer.failure = peer.key[1], peer.message.tobytes().decode(errors="replace")
            else:
                queue = self._arrived.setdefault((peer.rank, *peer.key), collections.deque())
                queue.append((peer.operation, peer.message))
            self._news.notify_all()
        peer.message = None


def _call_if_there(method: weakref.WeakMethod) -> None:
    close = method()
    if close is not None:
        close()


# ---------------------------------------------------------------- meeting


@dataclass(frozen=True)
class _Card:
    """What a rank tells the others when they meet."""

    rank: int
    host: str
    address: str
    port: int
    process: ProcessIdentity

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> _Card:
        return cls(**{**fields, "process": ProcessIdentity(**fields["process"])})


def _meet(
    rank: int, world_size: int, address: str, port: int, name: str, timeout: float
) -> tuple[dict[int, socket.socket], dict[int, _Card]]:
    """A connection to every other rank, and what is known about it; see Note [Where the ranks meet]."""
    end = time.monotonic() + timeout
    # It starts with a byte with which no request to torch's store starts, so that one hangs up at once.
    greeting = b"\xff" + hashlib.blake2b(f"hyper_parallel/{name}/{world_size}".encode(), digest_size=15).digest()
    with socket.socket(_family(address)) as listener:
        listener.bind((_interface(address), 0))
        listener.listen(world_size)
        if rank == 0:
            cards, sockets = _host_meeting(world_size, address, port, greeting, end, listener)
        else:
            cards, sockets = _join_meeting(rank, world_size, address, port, greeting, end, listener)
        # Each rank calls those below it and is called by those above it.
        for peer in range(1, rank):
            sockets[peer] = socket.create_connection((cards[peer].address, cards[peer].port), _left(end, "connecting"))
            sockets[peer].sendall(greeting + _LENGTH.pack(rank))
        listener.settimeout(_left(end, "waiting for the other ranks"))
        while len(sockets) < world_size - 1:
            try:
                caller, _ = listener.accept()
            except TimeoutError:
                missing = [peer for peer in range(world_size) if peer != rank and peer not in sockets]
                raise TimeoutError(f"rank {rank}: rank(s) {missing} did not connect within {timeout:g} s") from None
            caller.settimeout(_left(end, "waiting for the other ranks"))
            if _receive(caller, len(greeting)) == greeting:
                sockets[_LENGTH.unpack(_receive(caller, _LENGTH.size))[0]] = caller
    for sock in sockets.values():
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sockets, cards


def _family(address: str) -> socket.AddressFamily:
    return socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][0]


def _interface(address: str) -> str:
    """Where to listen: a world that meets on the loopback device is on one host, and nobody else shall reach it."""
    resolved = str(socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)[0][4][0])
    return resolved if ipaddress.ip_address(resolved.partition("%")[0]).is_loopback else ""


def _left(end: float, what: str) -> float:
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError(f"joining the world took too long: {what}")
    return left


def _my_card(rank: int, listener: socket.socket, address: str) -> _Card:
    return _Card(rank, socket.gethostname(), address, listener.getsockname()[1], ProcessIdentity.current())


def _host_meeting(
    world_size: int, address: str, port: int, greeting: bytes, end: float, listener: socket.socket
) -> tuple[dict[int, _Card], dict[int, socket.socket]]:
    """Rank 0: take everybody's card, hand out all of them; the connections stay."""
    cards = {0: _my_card(0, listener, address)}
    sockets: dict[int, socket.socket] = {}
    if world_size == 1:
        return cards, sockets
    refused: list[socket.socket] = []
    try:
        with _listening(address, port, world_size) as counter:
            while len(sockets) < world_size - 1:
                caller, card = _next_caller(counter, greeting, end, _who_is_missing(world_size, sockets))
                if card.rank in sockets:
                    refused.append(caller)
                    raise ValueError(
                        f"two processes say that they are rank {card.rank}: process {cards[card.rank].process.pid} on "
                        f"{cards[card.rank].host} and process {card.process.pid} on {card.host}; give every process "
                        "its own RANK"
                    )
                sockets[card.rank] = caller
                cards[card.rank] = card
    except (ValueError, TimeoutError) as error:
        # Nobody shall wait for a world that will not be.
        for sock in (*sockets.values(), *refused):
            with contextlib.suppress(OSError), sock:
                _send_block(sock, {"refused": str(error)})
        raise
    for sock in sockets.values():
        _send_block(sock, {"cards": [asdict(card) for card in cards.values()]})
    return cards, sockets


def _next_caller(counter: socket.socket, greeting: bytes, end: float, waiting_for: str) -> tuple[socket.socket, _Card]:
    """The next rank that comes, and its card; other programs and ranks that die meanwhile are passed over."""
    while True:
        counter.settimeout(_left(end, waiting_for))
        try:
            caller, their_address = counter.accept()
        except TimeoutError:
            raise TimeoutError(f"joining the world took too long: {waiting_for}") from None
        try:
            caller.settimeout(min(30.0, _left(end, waiting_for)))
            if _receive(caller, len(greeting)) == greeting:
                caller.sendall(greeting)
                card = _Card.from_dict({**_receive_block(caller), "address": their_address[0]})
                caller.settimeout(None)
                return caller, card
        except (OSError, EOFError):
            pass
        caller.close()


def _who_is_missing(world_size: int, sockets: dict[int, socket.socket]) -> str:
    missing = [peer for peer in range(1, world_size) if peer not in sockets]
    return f"rank 0 has not heard from rank(s) {missing} of a world of {world_size}"


def _listening(address: str, port: int, world_size: int) -> socket.socket:
    for candidate in range(port, min(port + _NUM_PORTS, 65536)):
        counter = socket.socket(_family(address))
        counter.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            counter.bind((_interface(address), candidate))
            counter.listen(world_size)
            return counter
        except OSError as error:
            counter.close()
            problem = error
    raise RuntimeError(f"rank 0 cannot listen on any of the ports {port} to {port + _NUM_PORTS - 1}: {problem}")


def _join_meeting(
    rank: int, world_size: int, address: str, port: int, greeting: bytes, end: float, listener: socket.socket
) -> tuple[dict[int, _Card], dict[int, socket.socket]]:
    """The other ranks: find rank 0, give the own card, take all of them."""
    pause, patience = 0.02, 0.5
    while True:
        for candidate in range(port, min(port + _NUM_PORTS, 65536)):
            sock = _greeted(address, candidate, greeting, min(patience, max(end - time.monotonic(), 0.05)))
            if sock is not None:
                sock.settimeout(_left(end, "waiting for the other ranks"))
                _send_block(sock, asdict(_my_card(rank, listener, "")))
                try:
                    answer = _receive_block(sock)
                except TimeoutError:
                    raise TimeoutError(
                        f"joining the world took too long: rank {rank} met rank 0, but not all {world_size} ranks came"
                    ) from None
                except (OSError, EOFError):
                    sock.close()
                    raise RuntimeError(
                        f"rank 0 ended while the world was being made; rank {rank} was waiting for it"
                    ) from None
                if "refused" in answer:
                    sock.close()
                    raise RuntimeError(f"rank {rank} cannot join the world: {answer['refused']}")
                return {card["rank"]: _Card.from_dict(card) for card in answer["cards"]}, {0: sock}
        if time.monotonic() > end:
            raise TimeoutError(
                f"joining the world took too long: rank {rank} found no rank 0 at {address}, ports {port} to "
                f"{port + _NUM_PORTS - 1}; are MASTER_ADDR and MASTER_PORT the same for all ranks?"
            )
        time.sleep(pause)
        pause, patience = min(pause * 1.5, 0.3), min(patience * 1.5, 20.0)


def _greeted(address: str, port: int, greeting: bytes, patience: float) -> socket.socket | None:
    """A connection to rank 0, if it is it that listens there and answers in time.

    A stranger answers otherwise, hangs up or is silent. A busy rank 0 answers late: it is asked again, with more
    patience, when the other ports have been tried.
    """
    try:
        sock = socket.create_connection((address, port), patience)
    except OSError:
        return None
    try:
        sock.sendall(greeting)
        if _receive(sock, len(greeting)) == greeting:
            return sock
    except (OSError, EOFError):
        pass
    sock.close()
    return None


def _receive(sock: socket.socket, num_bytes: int) -> bytes:
    received = bytearray()
    while len(received) < num_bytes:
        piece = sock.recv(num_bytes - len(received))
        if not piece:
            raise EOFError
        received += piece
    return bytes(received)


def _send_block(sock: socket.socket, content: dict[str, Any]) -> None:
    data = json.dumps(content).encode()
    sock.sendall(_LENGTH.pack(len(data)) + data)


def _receive_block(sock: socket.socket) -> dict[str, Any]:
    return json.loads(_receive(sock, _LENGTH.unpack(_receive(sock, _LENGTH.size))[0]))
