"""What comes over connections, damaged in every way: messages of ranks, the words of callers and listeners, cards."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import numpy as np
import pytest

from hyper_parallel.platform.host import reception, transport
from hyper_parallel.platform.host.cards import Card, receive_block, send_block
from hyper_parallel.platform.host.host_collectives import HostGroup
from hyper_parallel.platform.host.reception import Reception, introduce
from hyper_parallel.platform.host.shared_segment import ProcessIdentity
from hyper_parallel.platform.host.transport import HostTransport, PeerLost
from tests.attacks.confined import run_confined
from tests.attacks.mutations import damaged_bytes, damaged_data, try_all
from tests.attacks.strangers import LONG, SECRET, free_port, run_ranks

only_on = "torch"  # sockets and threads, no framework takes part

_HEADER = struct.Struct("<QqIQ")
_LIMIT = 100 << 20


# ---------------------------------------------------------------- one peer that sends nonsense


@pytest.mark.parametrize("num_bytes", [2**40, 2**60, 2**63 - 1, 2**63, 2**64 - 1])
def test_a_message_that_fits_nowhere_ends_that_peer_at_once_and_no_other(num_bytes):
    sent, done = threading.Event(), threading.Barrier(3)

    def body(transport):
        pair = HostGroup(transport, [0, 1], "pair") if transport.rank < 2 else None
        if transport.rank == 2:
            transport._peers[0].socket.sendall(_HEADER.pack(77, 0, 0, num_bytes))
            sent.set()
            with pytest.raises(PeerLost):  # and hears of it
                transport.receive([0], 99, 0, "send")
        elif transport.rank == 0:
            assert sent.wait(LONG)
            started = time.monotonic()
            with pytest.raises(
                PeerLost,
                match=r"send on rank 0 cannot end: rank 2 \(process .*\) sent what cannot be received \(Memory",
            ):
                transport.receive([2], 77, 0, "send")
            assert time.monotonic() - started < 10
            with pytest.raises(PeerLost, match=r"rank 2 .* sent what cannot be received"):
                transport.send(2, 77, 0, "send", bytes(1 << 20))
        if pair is not None:
            assert len(pair.start_gather("gather", np.zeros(1, np.uint8))()) == 2
        done.wait(LONG)
        return True

    assert run_ranks(3, free_port(), body) == [True] * 3


def test_any_error_of_the_reader_is_that_peers_end(monkeypatch):
    """Whatever it is: here memory that runs out in the middle of a message."""

    def body(transport):
        if transport.rank == 0:
            with pytest.raises(PeerLost, match=r"rank 1 .* sent what cannot be received \(ZeroDivisionError: reader\)"):
                transport.receive([1], 77, 0, "send")
        else:
            transport.send(0, 77, 0, "send", bytes(100))
            with pytest.raises(PeerLost):
                transport.receive([0], 99, 0, "send")
        return True

    def fail(self, peer):
        raise ZeroDivisionError("reader")

    plain = HostTransport._read_from
    monkeypatch.setattr(HostTransport, "_read_from", lambda self, peer: (plain if self.rank else fail)(self, peer))
    assert run_ranks(2, free_port(), body) == [True] * 2


# ---------------------------------------------------------------- fuzzing: each in a process with limits


def _frames():
    """Messages as ranks send them."""
    number = transport.channel_of("group/collectives")
    small = [_HEADER.pack(number, n, 7, 8) + bytes(8) for n in range(4)]
    return [
        b"".join(small),
        _HEADER.pack(number, 1, 7, 0) + _HEADER.pack(number, 2, 7, 40_000) + bytes(40_000),
        _HEADER.pack(number, -1, 7, 3) + b"abc" + _HEADER.pack(0, 0, 0, 0),
    ]


def fuzz_frames(num, folder):
    """A connection for each input, read by the thread of a transport."""
    receiver = HostTransport(0, 1, "127.0.0.1", free_port(), "world", LONG)
    process = ProcessIdentity.current()

    def read(data):
        ours, theirs = socket.socketpair()
        peer = transport._Peer(1, ours, process, "here", threading.Lock())
        with ours:
            receiver._selector.register(ours, 1, peer)
            with theirs:
                theirs.settimeout(LONG)
                with contextlib.suppress(OSError):
                    theirs.sendall(data)
            with receiver._news:
                assert receiver._news.wait_for(lambda: peer.gone is not None, 5.0), "the reader hangs"
                receiver._arrived.clear()
        assert receiver._reader.is_alive()
        if "sent" in peer.gone:
            raise ValueError(peer.gone)

    counts = try_all(damaged_bytes(_frames(), num), read, (ValueError,), folder, _LIMIT)
    receiver.close()
    return counts


def _conversation(text):
    """What a caller says that knows the secret, but does not wait for the listener's nonce."""
    greeting = reception._greeting("world")
    return greeting + bytes(32) + struct.pack("<I", len(text)) + text + bytes(32) + b"!"


def fuzz_callers(num, folder):
    """Damaged callers at a reception that serves them in its own thread."""
    reading, writing = os.pipe()
    listener = socket.create_server(("127.0.0.1", 0), backlog=100)
    door = listener.getsockname()
    hall = Reception(listener, SECRET, "world", patience=3.0)
    taken = []

    def serve():
        while (caller := hall.next_caller(None, reading)) is not None:
            taken.append(caller.card)
            caller.socket.close()

    def read(data):
        with socket.create_connection(door, LONG) as sock, contextlib.suppress(OSError):
            sock.sendall(data[:48])
            if len(data) > 48:
                answer = sock.recv(48)
                if len(answer) == 48:
                    sock.sendall(_with_proof(data, answer[16:]))
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(1000):
                pass
        assert thread.is_alive(), "a caller has ended the reception"
        assert not hall._half_way or time.monotonic() < next(iter(hall._half_way)).deadline

    def _with_proof(data, nonce):
        """The rest of a conversation, with the right proof where there is none: so that cards are read, too."""
        rest = data[48:]
        (length,) = struct.unpack("<I", rest[:4].ljust(4, b"\0"))
        if length > len(rest) or rest[4 + length : 36 + length] != bytes(32):
            return rest
        covered = reception._covered(data[:16], data[16:48], nonce, door, rest[4 : 4 + length])
        proof = reception._proof(SECRET, b"caller", covered)
        return rest[: 4 + length] + proof + rest[36 + length :]

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    samples = [_conversation(json.dumps(card).encode()) for card in ({"rank": 1}, {"a": [[[1]]], "b": "x" * 3000})]
    counts = try_all(damaged_bytes(samples, num), read, (), folder, _LIMIT)
    os.write(writing, b".")
    thread.join(LONG)
    hall.close()
    return {**counts, "joined": len(taken)}


def fuzz_listeners(num, folder):
    """A caller at listeners whose answers are damaged."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=100)
    door = listener.getsockname()
    answers = []

    def serve():
        while True:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.settimeout(LONG)
                connection.recv(48)
                connection.sendall(answers.pop())
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(100_000):
                    pass

    threading.Thread(target=serve, daemon=True).start()

    def read(data):
        answers.append(data)
        with socket.create_connection(door, 3.0) as sock:
            introduce(sock, SECRET, "world", {"rank": 1})

    greeting = reception._greeting("world")
    samples = [greeting + bytes(32) + bytes(32), greeting + os.urandom(64), greeting + bytes(32)]
    return try_all(damaged_bytes(samples, num), read, (ConnectionError, TimeoutError), folder, _LIMIT)


def fuzz_cards(num, folder):
    """The blocks of cards that rank 0 hands out: damaged content, and damaged bytes."""
    process = ProcessIdentity("here", "boot", "pid:[1]", 5, "100")
    block = {"key": "00" * 32, "cards": [asdict(Card(rank, "here", "127.0.0.1", 5, process)) for rank in range(3)]}
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send_block(ours, block)
        sample = theirs.recv(100_000)

    def read(data):
        ours, theirs = socket.socketpair()
        with ours:
            with theirs:
                if isinstance(data, bytes):
                    theirs.sendall(data)
                else:
                    send_block(theirs, data)
            content = receive_block(ours, 65536, time.monotonic() + 5)
            for card in content["cards"]:
                Card.read(card, 3)
            bytes.fromhex(content["key"])

    refusals = (ValueError, TypeError, KeyError, RecursionError, EOFError)
    first = try_all(damaged_bytes([sample], num // 2), read, refusals, folder, _LIMIT)
    second = try_all(damaged_data([block], num // 2), read, refusals, folder, _LIMIT)
    return {"taken": first["taken"] + second["taken"], "refused": first["refused"] + second["refused"]}


@pytest.mark.parametrize("fuzz", [fuzz_frames, fuzz_callers, fuzz_listeners, fuzz_cards])
def test_damaged_bytes_end_nothing(fuzz, tmp_path, sweep):
    folder = tmp_path / "work"
    folder.mkdir()
    num = 10_000 if sweep else 500
    outcome = run_confined(f"{__name__}:{fuzz.__name__}", num, str(folder), seconds=600 if sweep else 60)
    assert outcome.error is None, outcome.error
    counts = outcome.value
    assert counts["taken"] + counts["refused"] == num
    assert fuzz is not fuzz_callers or counts["joined"] > num // 100  # Some damage is inside of cards.
    print(f"{counts}, {outcome.grown:.1f} MiB")


def test_deep_cards_are_refused():
    """Of those who know the secret: JSON that nests deeper than Python does."""
    with socket.create_server(("127.0.0.1", 0)) as listener, Reception(listener, SECRET, "world") as hall:
        deep = json.loads("[" * 500 + "]" * 500)
        with ThreadPoolExecutor(2) as pool:
            for text in (b"[" * 30_000, b"{" * 30_000, b'{"a":' * 12_000, b"\xff\xfe", b"1" * 5000, b"[1]", b"null"):
                with socket.create_connection(listener.getsockname(), LONG) as sock:
                    calling = pool.submit(_introduce_text, sock, text)
                    with pytest.raises(TimeoutError):
                        hall.next_caller(0.1)
                    assert calling.result() in (b"", None)
            with socket.create_connection(listener.getsockname(), LONG) as sock:
                calling = pool.submit(introduce, sock, SECRET, "world", {"deep": deep})
                with hall.next_caller(LONG).socket:
                    calling.result()


def _introduce_text(sock, text):
    greeting, nonce = reception._greeting("world"), bytes(32)
    sock.sendall(greeting + nonce)
    answer = reception.receive_exactly(sock, 48, time.monotonic() + LONG)
    covered = reception._covered(greeting, nonce, answer[16:], sock.getpeername(), text)
    sock.sendall(struct.pack("<I", len(text)) + text + reception._proof(SECRET, b"caller", covered))
    with contextlib.suppress(ConnectionError):
        return sock.recv(100)
    return None
