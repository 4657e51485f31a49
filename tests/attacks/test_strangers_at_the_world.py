"""Strangers where the ranks of a world meet: they do not get in, learn nothing, and hold nobody up."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hyper_parallel.platform.host import meeting, reception
from hyper_parallel.platform.host.cards import receive_block
from hyper_parallel.platform.host.host_collectives import HostGroup
from hyper_parallel.platform.host.peer_user import user_of_peer
from hyper_parallel.platform.host.reception import Refused, introduce
from hyper_parallel.platform.host.transport import HostTransport
from tests.attacks.strangers import (
    LONG,
    SECRET,
    as_another_user,
    await_listener,
    free_port,
    hand_on,
    leave_out_listeners,
    listening_ports,
    listening_stranger,
    name_of_rank,
    no_new_files,
    run_ranks,
    strangers_at,
)

only_on = "torch"  # sockets and threads, no framework takes part

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process of another user")


@pytest.fixture(autouse=True)
def _only_new_listeners():
    leave_out_listeners()


@pytest.fixture
def port():
    return free_port()


@pytest.fixture(autouse=True)
def no_file_is_left_open():
    with no_new_files():
        yield


def total(transport):
    group = HostGroup(transport, range(transport.world_size), "group")
    return group.start_reduction("all_reduce", np.array([transport.rank + 1.0]), "sum", False)()[0]


def join(rank, num_ranks, port, timeout, secret=SECRET):
    return HostTransport(rank, num_ranks, "127.0.0.1", port, "world", timeout, secret)


def card_of(rank, **other):
    """What a rank shows to rank 0."""
    process = {"hostname": "here", "boot_id": "", "pid_namespace": "", "pid": 1, "start_time": ""}
    return {"rank": rank, "host": "here", "address": "", "port": 0, "process": process, **other}


# ---------------------------------------------------------------- who gets in


class Gadget:
    """Runs a command where it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("secret", [b"", b"not the secret"], ids=["none", "another"])
def test_a_stranger_without_the_secret_does_not_become_a_rank(port, tmp_path, secret, capfd):
    """It has this very code, and tries to hand rank 0 a pickle that runs a command there."""

    def attack():
        await_listener()
        with contextlib.suppress(TimeoutError), contextlib.closing(join(1, 2, port, 3.0, secret)) as stranger:
            gadget = np.frombuffer(pickle.dumps(Gadget(tmp_path / "was here")), np.uint8)
            HostGroup(stranger, range(2), "group").start_gather("all_gather_object", gadget)
            return "got in"
        return "stayed outside"

    def gather_objects():
        with contextlib.closing(join(0, 2, port, 5.0)) as rank_0:
            mine = np.frombuffer(pickle.dumps("mine"), np.uint8)
            came = HostGroup(rank_0, range(2), "group").start_gather("all_gather_object", mine)()
            return [pickle.loads(part) for part in came]

    with ThreadPoolExecutor(1) as pool:
        attacker = pool.submit(attack)
        with pytest.raises(
            TimeoutError,
            match=r"rank 0 has not heard from rank\(s\) \[1\] of a world of 2\. .*knows the "
            r"name, but does not know the secret; is HYPER_PARALLEL_SECRET the same on all ranks\?",
        ):
            gather_objects()
        assert attacker.result() == "stayed outside"
    assert not (tmp_path / "was here").exists()
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("hyper_parallel: rank 0")]
    assert said == [
        "hyper_parallel: rank 0 sent somebody away: a caller from 127.0.0.1 knows the name, but does not know the "
        "secret; is HYPER_PARALLEL_SECRET the same on all ranks?"
    ]


@pytest.mark.sweep
def test_a_rank_with_another_secret_is_told(port, capfd):
    def rank_0():
        with pytest.raises(TimeoutError, match="HYPER_PARALLEL_SECRET"):
            join(0, 2, port, 5.0)

    with ThreadPoolExecutor(1) as pool:
        hosting = pool.submit(rank_0)
        await_listener()
        with pytest.raises(
            TimeoutError,
            match=r"rank 1 found no rank 0 .* rank 1 looks for rank 0, and whoever listens at 127.0.0.1:\d+ knows the "
            "name, but refused this caller; is HYPER_PARALLEL_SECRET the same on all ranks",
        ):
            join(1, 2, port, 3.0, b"not the secret")
        hosting.result()
    said = capfd.readouterr().err.splitlines()
    assert len([line for line in said if line.startswith("hyper_parallel: rank 1 looks for rank 0")]) == 1


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost", "::ffff:127.0.0.1"])
@pytest.mark.parametrize("secret", [SECRET, b""], ids=["secret", "user"])
def test_ranks_join_on_every_kind_of_loopback(port, address, secret, capfd):
    assert run_ranks(3, port, total, secret, address) == [6.0] * 3
    assert "hyper_parallel" not in capfd.readouterr().err


def test_nothing_is_left_listening(port):
    assert run_ranks(3, port, lambda transport: (total(transport), listening_ports())) == [(6.0, set())] * 3


def test_a_stranger_in_between_is_found_out(port):
    """It got MASTER_PORT before rank 0 did, and hands calls on to the port that rank 0 took instead."""

    def body(transport):
        return transport._peers[1 - transport.rank].socket.getpeername()[1], total(transport)

    with listening_stranger(hand_on(port + 1), port) as came:
        ends = run_ranks(2, port, body)
        assert came[0] >= 1
    assert [end[1] for end in ends] == [3.0, 3.0]
    assert ends[1][0] == port + 1


def echo(connection):
    while data := connection.recv(4096):
        connection.sendall(data)


def pretend(connection):
    """Everything that can be said without the secret."""
    connection.sendall(connection.recv(16) + os.urandom(32) + os.urandom(32))
    connection.recv(100_000)


def mirror(connection):
    """Everything as rank 0 says it, with the caller's own proof for one of the secret."""
    opening = reception.receive_exactly(connection, 48, time.monotonic() + LONG)
    connection.sendall(opening[:16] + os.urandom(32))
    connection.sendall(connection.recv(100_000)[-32:])
    connection.recv(1)


def wait(connection):
    connection.sendall(connection.recv(16))
    connection.recv(100_000)
    time.sleep(1.0)


@pytest.mark.parametrize("behaviour", [echo, pretend, mirror, wait])
def test_a_stranger_that_says_it_is_rank_0_does_not_keep_ranks_from_the_real_one(port, behaviour):
    with listening_stranger(behaviour, port) as came:
        assert run_ranks(2, port, total) == [3.0, 3.0]
        assert came[0] >= 1


# ---------------------------------------------------------------- users of the host


@needs_root
def test_another_user_of_the_host_does_not_join_a_world_without_a_secret(port, capfd):
    def attack():
        with contextlib.suppress(OSError):
            sock = socket.create_connection(("127.0.0.1", port), 5.0)
            introduce(sock, b"", name_of_rank(0, 2), card_of(1))
            return True
        return False

    def rank_0():
        with pytest.raises(
            TimeoutError, match=r"not admitted; without HYPER_PARALLEL_SECRET all ranks of a host must "
        ):
            join(0, 2, port, 1.0, b"")

    with ThreadPoolExecutor(1) as pool:
        hosting = pool.submit(rank_0)
        await_listener()
        with as_another_user(attack) as has_joined:
            assert has_joined() == b"n"
        hosting.result()
    assert capfd.readouterr().err.count("hyper_parallel: rank 0 sent somebody away") == 1
    assert run_ranks(2, port, total, b"") == [3.0, 3.0]


@needs_root
def test_another_user_who_listens_gets_no_card(port):
    """It got MASTER_PORT first and answers as rank 0 does, which takes no secret here."""

    def attack():
        with socket.create_server(("127.0.0.1", port)) as listener:
            sock = listener.accept()[0]
            sock.settimeout(5.0)
            opening = reception.receive_exactly(sock, 48, time.monotonic() + 5)
            sock.sendall(opening[:16] + os.urandom(32))
            return sock.recv(1) != b""

    with as_another_user(attack) as got_card:
        end = time.monotonic() + LONG
        while time.monotonic() < end:  # until it listens
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    break
        assert run_ranks(2, port, total, b"") == [3.0, 3.0]
        assert got_card() == b"n"


def test_a_socket_that_nobody_holds_belongs_to_nobody():
    """The system lists it as root's."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as caller:
        assert user_of_peer(caller) is None  # not accepted yet
        with listener.accept()[0] as accepted:
            assert user_of_peer(caller) == user_of_peer(accepted) == os.geteuid()
            caller.close()
            assert user_of_peer(accepted) is None


def test_where_nothing_tells_ranks_from_strangers_the_user_is_told_once(capfd, monkeypatch, port):
    world = meeting._Meeting(0, 2, "192.0.2.1", 29500, "world", 1.0, b"")
    for _ in range(2):
        world.warn_of_everybody()
    assert capfd.readouterr().err == (
        "hyper_parallel: the ranks meet at 192.0.2.1, port 29500, without a secret, so everybody who reaches this "
        "network can join and run code in them; unless you trust all of these, set HYPER_PARALLEL_SECRET to one random "
        "text on all ranks\n"
    )
    meeting._Meeting(0, 2, "192.0.2.1", 29501, "world", 1.0, SECRET).warn_of_everybody()
    assert capfd.readouterr().err == ""
    monkeypatch.setattr(meeting, "can_tell_users", lambda: False)
    assert run_ranks(2, port, total, b"") == [3.0, 3.0]
    assert capfd.readouterr().err.count("so every user of this host can join") == 1


# ---------------------------------------------------------------- what strangers cost


def seconds_to_start(port, num_strangers):
    """Rank 1 comes when the strangers are there. The slowest rank's time from there on."""

    def start(rank):
        if rank == 0:
            return join(0, 2, port, LONG), 0.0
        await_listener()
        with strangers_at(port, name_of_rank(0, 2), num_strangers):
            time.sleep(0.2)  # They have come.
            started = time.monotonic()
            return join(1, 2, port, LONG), time.monotonic() - started

    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(start, range(2)))
    for transport, _ in ranks:
        transport.close()
    return max(seconds for _, seconds in ranks)


def test_a_world_starts_in_its_time_among_strangers(port):
    assert seconds_to_start(port, 50) < 2.0
    assert seconds_to_start(port, 300) < 5.0  # more than are kept at once


def test_strangers_at_the_second_listeners_hold_nobody_up(port):
    """Rank 1 listens for rank 2 before that one is there."""

    def start(rank):
        if rank < 2:
            return join(rank, 3, port, LONG), 0.0
        (second,) = await_listener(1, other_than=(port,))
        with strangers_at(second, name_of_rank(1, 3), 50):
            time.sleep(0.2)
            started = time.monotonic()
            return join(2, 3, port, LONG), time.monotonic() - started

    with ThreadPoolExecutor(3) as pool:
        ranks = list(pool.map(start, range(3)))
        transports = [transport for transport, _ in ranks]
        assert list(pool.map(total, transports)) == [6.0] * 3
    for transport in transports:
        transport.close()
    assert max(seconds for _, seconds in ranks) < 2.0


# ---------------------------------------------------------------- those who know the secret, and what they say


BAD_CARDS = {
    "nothing": {},
    "rank that is no number": card_of("1"),
    "rank that is a bool": card_of(True),
    "rank beyond the world": card_of(3),
    "rank below the world": card_of(-1),
    "port beyond all": card_of(1, port=65536),
    "one field too many": card_of(1, more=1),
    "long text": card_of(1, host="x" * 60_000),
    "text that moves the cursor": card_of(1, host="\x1b[2J"),
    "no process": card_of(1, process=None),
    "process without a number": card_of(1, process={"pid": 1}),
}


def test_wrong_cards_are_refused_and_the_world_is_made(port):
    with ThreadPoolExecutor(2) as pool:
        hosting = pool.submit(join, 0, 2, port, LONG)
        await_listener()
        for what, card in BAD_CARDS.items():
            with socket.create_connection(("127.0.0.1", port), LONG) as sock:
                introduce(sock, SECRET, name_of_rank(0, 2), card)
                answer = receive_block(sock, 10_000, time.monotonic() + LONG)
                assert answer["refused"].startswith("its card is wrong"), what
        with contextlib.closing(join(1, 2, port, LONG)) as rank_1, contextlib.closing(hosting.result()) as rank_0:
            assert list(pool.map(total, (rank_0, rank_1))) == [3.0, 3.0]


def test_a_second_listener_takes_each_rank_above_it_once(port):
    """Rank 2 of 3 is our own: it calls rank 1 under all kinds of names before its own."""
    with ThreadPoolExecutor(2) as pool, contextlib.ExitStack() as stay:
        ranks = [pool.submit(join, rank, 3, port, LONG) for rank in range(2)]
        await_listener(2)
        to_rank_0 = stay.enter_context(socket.create_connection(("127.0.0.1", port), LONG))
        introduce(to_rank_0, SECRET, name_of_rank(0, 3), card_of(2))
        answer = receive_block(to_rank_0, 100_000, time.monotonic() + LONG)
        second = ("127.0.0.1", answer["cards"][1]["port"])
        key = SECRET + bytes.fromhex(answer["key"])
        with socket.create_connection(second, LONG) as sock, pytest.raises(Refused):
            introduce(sock, SECRET, name_of_rank(1, 3), {"rank": 2})  # the secret is not enough here
        for rank in (0, 1, 3, -1, True, "2", None, [2]):
            with socket.create_connection(second, LONG) as sock:
                introduce(sock, key, name_of_rank(1, 3), {"rank": rank})
                assert sock.recv(1) == b"", rank
        to_rank_1 = stay.enter_context(socket.create_connection(second, LONG))
        introduce(to_rank_1, key, name_of_rank(1, 3), {"rank": 2})
        for rank in ranks:
            rank.result().close()


def test_a_rank_that_ended_before_the_others_came_can_be_started_again(port):
    with ThreadPoolExecutor(3) as pool:
        hosting = pool.submit(join, 0, 3, port, LONG)
        await_listener()
        for rank in (1, 1, 2, 2):
            with socket.create_connection(("127.0.0.1", port), LONG) as sock:
                introduce(sock, SECRET, name_of_rank(0, 3), card_of(rank))
        transports = [*pool.map(lambda rank: join(rank, 3, port, LONG), (1, 2)), hosting.result()]
        assert list(pool.map(total, transports)) == [6.0] * 3
    for transport in transports:
        transport.close()
