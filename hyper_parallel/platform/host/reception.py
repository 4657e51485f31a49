"""A listening socket that takes only callers who know a secret, and the callers' side of it. No framework is imported.

Note [How two processes get to know each other]
    ::

        caller      greeting (16 bytes, made of the name), nonce (32)
        listener    greeting, nonce
        caller      length of its card (4), card (JSON), proof (32)
        listener    proof; or zeros, and the connection ends
        caller      a last byte: it has not given up meanwhile

    A proof is an HMAC (SHA-256) under the secret. It covers who speaks, so that none can be sent back to its author;
    both nonces, which are fresh, so that none can be used again; the card; and the door: the listener's end as both
    sides see it. A stranger on another port of the host who hands a call on to the listener, to stay in between, has
    called at another door than the caller. The door is the port and the version of IP, and the address where that is
    loopback; other addresses may be translated on the way. The door of a Unix socket is its name.

    An empty secret proves nothing: ``admits`` says then by other means who is at the other end (``peer_user.py``).
    What follows on the connection is neither signed nor encrypted.

Note [What strangers cost]
    All callers are served at once, each has ``patience`` seconds in all, and nobody waits for one of them. At most
    ``capacity`` can be half-way: the oldest is sent away for a new one. Each can make this process keep one card, of
    64 KiB at most. Whatever they send, or do not, raises nothing here.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import hashlib
import hmac
import ipaddress
import json
import os
import selectors
import socket
import struct
import time
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

__all__ = ["CARD_BYTES", "Caller", "Reception", "Refused", "introduce", "receive_exactly", "unmapped"]

CARD_BYTES = 64 * 1024
_LENGTH = struct.Struct("<I")
_GREETING, _NONCE, _PROOF = 16, 32, 32  # their bytes
_REFUSAL = bytes(_PROOF)
_STILL_THERE = b"!"
_NUM_ACCEPTED = 64  # before those who are there already are heard again
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NO_LISTENER = (errno.EBADF, errno.EINVAL, errno.ENOTSOCK, errno.EOPNOTSUPP)


class Refused(ConnectionError):
    """Whoever is at the other end knows the name, but could not show, or did not believe, that the secret is known."""


class Caller(NamedTuple):
    """Who has proved to know the secret: the connection, what the caller says about itself, where it calls from."""

    socket: socket.socket
    card: dict[str, Any]
    address: str


class _Stranger(Exception):
    """Not one of ours: to be sent away without a word."""


class _HalfWay:
    """A caller that has not proved anything yet."""

    def __init__(self, connection: socket.socket, address: str, deadline: float) -> None:
        self.socket = connection
        self.address = address
        self.deadline = deadline
        self.heard = bytearray()
        self.num_awaited = 0
        self.talk: Generator[int, bytes, dict[str, Any]]


class Reception:
    """Takes callers at ``listener``, which it closes in the end; see Note [What strangers cost].

    Args:
        admits: asked about each caller who has proved to know the secret.
        on_refusal: told about each caller who knows the name and was refused, in a few words.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        name: str,
        *,
        patience: float = 10.0,
        capacity: int = 256,
        admits: Callable[[socket.socket], bool] | None = None,
        on_refusal: Callable[[str], None] | None = None,
    ) -> None:
        self._listener = listener
        self._secret = secret
        self._greeting = _greeting(name)
        self._patience = patience
        self._capacity = capacity
        self._admits = admits
        self._on_refusal = on_refusal
        self._half_way: dict[_HalfWay, None] = {}  # oldest first
        self._taken: collections.deque[Caller] = collections.deque()
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def __enter__(self) -> Reception:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop listening; who is half-way, or was not asked for, is sent away."""
        self._selector.close()
        for connection in [caller.socket for caller in self._half_way] + [caller.socket for caller in self._taken]:
            connection.close()
        self._half_way.clear()
        self._taken.clear()
        self._listener.close()

    def next_caller(self, timeout: float | None, ended: int | None = None) -> Caller | None:
        """The next one who knows the secret; None when ``ended`` becomes readable, TimeoutError after ``timeout`` s."""
        end = float("inf") if timeout is None else time.monotonic() + timeout
        if ended is not None:
            self._selector.register(ended, selectors.EVENT_READ)
        try:
            while not self._taken:
                now = time.monotonic()
                if now >= end:
                    raise TimeoutError(f"nobody who knows the secret called within {timeout:g} s")
                self._send_away_the_slow(now)
                deadline = min([end, *(caller.deadline for caller in self._oldest())])
                for key, _ in self._selector.select(None if deadline == float("inf") else max(deadline - now, 0.0)):
                    if key.fileobj == ended:
                        return None
                    if key.data is None:
                        self._accept()
                    elif key.data in self._half_way:
                        self._hear(key.data)
            return self._taken.popleft()
        finally:
            if ended is not None:
                self._selector.unregister(ended)

    # ---------------------------------------------------------------- who comes and goes

    def _oldest(self) -> list[_HalfWay]:
        return [next(iter(self._half_way))] if self._half_way else []

    def _send_away_the_slow(self, now: float) -> None:
        while self._half_way and self._oldest()[0].deadline <= now:
            self._send_away(self._oldest()[0])

    def _send_away(self, caller: _HalfWay) -> None:
        self._forget(caller)
        caller.socket.close()

    def _forget(self, caller: _HalfWay) -> None:
        del self._half_way[caller]
        self._selector.unregister(caller.socket)

    def _accept(self) -> None:
        for _ in range(_NUM_ACCEPTED):
            try:
                connection, address = self._listener.accept()
            except OSError as error:
                if error.errno in _NO_LISTENER:
                    raise
                if error.errno not in _NO_ROOM:
                    return  # nobody is there, or not any more
                if not self._half_way:
                    time.sleep(0.02)
                    return
                self._send_away(self._oldest()[0])
                continue
            if len(self._half_way) >= self._capacity:
                self._send_away(self._oldest()[0])
            connection.setblocking(False)
            where = unmapped(address[0]) if isinstance(address, tuple) else "this host"
            caller = _HalfWay(connection, where, time.monotonic() + self._patience)
            self._half_way[caller] = None
            self._selector.register(connection, selectors.EVENT_READ, caller)
            caller.talk = self._talk(caller)
            caller.num_awaited = next(caller.talk)

    def _hear(self, caller: _HalfWay) -> None:
        """Take what has come, never more than is awaited: what follows is for whoever asked for the caller."""
        try:
            piece = caller.socket.recv(caller.num_awaited - len(caller.heard))
            if not piece:
                raise EOFError
            caller.heard += piece
            if len(caller.heard) == caller.num_awaited:
                heard, caller.heard = bytes(caller.heard), bytearray()
                caller.num_awaited = caller.talk.send(heard)
        except BlockingIOError:
            pass
        except StopIteration as end:
            self._forget(caller)
            caller.socket.setblocking(True)
            self._taken.append(Caller(caller.socket, end.value, caller.address))
        except (_Stranger, OSError, EOFError, ValueError, RecursionError, MemoryError):
            self._send_away(caller)

    # ---------------------------------------------------------------- what is said

    def _talk(self, caller: _HalfWay) -> Generator[int, bytes, dict[str, Any]]:
        """Yields how many bytes it awaits and is sent them; returns the card.

        See Note [How two processes get to know each other].
        """
        if (yield _GREETING) != self._greeting:
            raise _Stranger
        theirs, ours = (yield _NONCE), os.urandom(_NONCE)
        _send_at_once(caller.socket)
        _say(caller.socket, self._greeting + ours)
        (length,) = _LENGTH.unpack((yield _LENGTH.size))
        if length > CARD_BYTES:
            raise _Stranger
        card_and_proof = yield length + _PROOF
        card, proof = card_and_proof[:length], card_and_proof[length:]
        covered = _covered(self._greeting, theirs, ours, caller.socket.getsockname(), card)
        problem = None
        if not hmac.compare_digest(proof, _proof(self._secret, b"caller", covered)):
            problem = "does not know the secret"
        elif self._admits is not None and not self._admits(caller.socket):
            problem = "is not admitted"
        if problem is not None:
            with contextlib.suppress(OSError):
                _say(caller.socket, _REFUSAL)
            if self._on_refusal is not None:
                self._on_refusal(f"a caller from {caller.address} knows the name, but {problem}")
            raise _Stranger
        content = json.loads(card.decode())
        if not isinstance(content, dict):
            raise _Stranger
        _say(caller.socket, _proof(self._secret, b"listener", covered))
        if (yield len(_STILL_THERE)) != _STILL_THERE:
            raise _Stranger
        return content


def introduce(
    sock: socket.socket,
    secret: bytes,
    name: str,
    card: dict[str, Any],
    *,
    admits: Callable[[socket.socket], bool] | None = None,
) -> None:
    """The caller's side: prove over a new connection that the secret is known, hand in the card, check the listener.

    The timeout of the socket is the limit for all of it. ``admits`` is asked about the listener, once it has answered
    and before it gets the card. Raises :class:`Refused` where the listener knows the name but the two do not trust each
    other, another ``ConnectionError`` where it is a stranger, TimeoutError where it is silent.
    """
    text = json.dumps(card).encode()
    if len(text) > CARD_BYTES:
        raise ValueError(f"a card has {CARD_BYTES} bytes at most, not {len(text)}")
    limit = sock.gettimeout()
    end = float("inf") if limit is None else time.monotonic() + limit
    greeting, ours = _greeting(name), os.urandom(_NONCE)
    door = sock.getpeername()
    where = _shown(door)
    if door == sock.getsockname():  # Loopback connects a port that it tries, and on which nobody listens, to itself.
        raise ConnectionError(f"nobody listens at {where}")
    _send_at_once(sock)
    try:
        sock.sendall(greeting + ours)
        if receive_exactly(sock, _GREETING, end) != greeting:
            raise ConnectionError(f"whoever listens at {where} does not know the name that was called")
        theirs = receive_exactly(sock, _NONCE, end)
        if admits is not None and not admits(sock):
            raise Refused(f"whoever listens at {where} knows the name, but is not admitted")
        covered = _covered(greeting, ours, theirs, door, text)
        sock.sendall(_LENGTH.pack(len(text)) + text + _proof(secret, b"caller", covered))
        answer = receive_exactly(sock, _PROOF, end)
        if not hmac.compare_digest(answer, _proof(secret, b"listener", covered)):
            how = "refused this caller" if answer == _REFUSAL else "does not know the secret"
            raise Refused(f"whoever listens at {where} knows the name, but {how}")
        sock.sendall(_STILL_THERE)
    except (ConnectionResetError, BrokenPipeError, EOFError):
        raise ConnectionError(f"whoever listens at {where} hung up") from None
    except TimeoutError:
        raise TimeoutError(f"whoever listens at {where} did not answer in time") from None
    finally:
        sock.settimeout(limit)


# ---------------------------------------------------------------- the words of both sides


def _greeting(name: str) -> bytes:
    # It starts with a byte with which no request to torch's store starts, so that one hangs up at once.
    return b"\xff" + hashlib.blake2b(f"hyper_parallel/2/{name}".encode(), digest_size=_GREETING - 1).digest()


def _covered(greeting: bytes, of_caller: bytes, of_listener: bytes, door: Any, card: bytes) -> bytes:
    """What a proof covers besides who speaks; all parts but the last two have one length."""
    if isinstance(door, tuple):
        address = ipaddress.ip_address(unmapped(door[0]).partition("%")[0])
        where = f"{address if address.is_loopback else address.version} {door[1]}".encode()
    else:
        where = b"unix " + os.fsencode(door)
    return greeting + of_caller + of_listener + _LENGTH.pack(len(where)) + where + card


def _proof(secret: bytes, role: bytes, covered: bytes) -> bytes:
    return hmac.digest(secret, b"hyper_parallel " + role + b"\0" + covered, "sha256")


def _send_at_once(sock: socket.socket) -> None:
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _say(connection: socket.socket, data: bytes) -> None:
    if connection.send(data) != len(data):  # A new connection has room for these few bytes.
        raise _Stranger


def receive_exactly(sock: socket.socket, num_bytes: int, end: float) -> bytes:
    """The next bytes; EOFError where the other side has closed, TimeoutError at ``end`` of the monotonic clock."""
    received = bytearray()
    while len(received) < num_bytes:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        sock.settimeout(None if left == float("inf") else left)
        piece = sock.recv(num_bytes - len(received))
        if not piece:
            raise EOFError
        received += piece
    return bytes(received)


def unmapped(address: str) -> str:
    """The address of IPv4 that one of IPv6 may stand for."""
    return address.removeprefix("::ffff:") if "." in address else address


def _shown(address: Any) -> str:
    if not isinstance(address, tuple):
        return f"'{os.fsdecode(address)}'"
    return f"[{address[0]}]:{address[1]}" if ":" in address[0] else f"{address[0]}:{address[1]}"
