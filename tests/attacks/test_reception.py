"""Strangers at a listener that takes only those who know a secret: none gets in, few are kept, nobody waits."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from hyper_parallel.platform.host import reception
from hyper_parallel.platform.host.reception import Reception, Refused, introduce
from tests.attacks.strangers import LONG, SECRET, STRANGERS, no_new_files, open_files

only_on = "torch"  # sockets and threads, no framework takes part


@pytest.fixture(autouse=True)
def no_file_is_left_open():
    with no_new_files():
        yield


def test_words_of_others_cannot_be_used_again():
    """What a rank said to one listener, or a listener to a rank, opens nothing later."""
    with socket.create_server(("127.0.0.1", 0)) as listener, Reception(listener, SECRET, "world") as hall:
        door = listener.getsockname()
        said = []

        class Overheard(socket.socket):
            def sendall(self, data, *flags):
                said.append(bytes(data))
                return super().sendall(data, *flags)

        def call():
            with Overheard() as sock:
                sock.settimeout(LONG)
                sock.connect(door)
                introduce(sock, SECRET, "world", {"rank": 1})

        with ThreadPoolExecutor(1) as pool:
            calling = pool.submit(call)
            with hall.next_caller(LONG).socket:
                calling.result()
            with socket.create_connection(door, LONG) as stranger:
                stranger.sendall(b"".join(said[:2]))
                with pytest.raises(TimeoutError):
                    hall.next_caller(0.3)
                assert stranger.recv(1000)[48:] == bytes(32)  # refused
                assert stranger.recv(1) == b""


def test_a_card_that_was_changed_on_the_way_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as listener, Reception(listener, SECRET, "world") as hall:

        class Changed(socket.socket):
            def sendall(self, data, *flags):
                return super().sendall(data.replace(b'"rank": 1', b'"rank": 2'), *flags)

        with ThreadPoolExecutor(1) as pool, Changed() as sock:
            sock.settimeout(LONG)
            sock.connect(listener.getsockname())
            calling = pool.submit(introduce, sock, SECRET, "world", {"rank": 1})
            with pytest.raises(TimeoutError, match="nobody who knows the secret"):
                hall.next_caller(0.3)
            with pytest.raises(Refused, match="refused this caller"):
                calling.result()


def test_strangers_are_few_and_small():
    """However many come: the oldest go, and what they send is not kept."""
    with socket.create_server(("127.0.0.1", 0), backlog=600) as listener, Reception(listener, SECRET, "world") as hall:
        port = listener.getsockname()[1]
        before = open_files()
        with contextlib.ExitStack() as stay:
            callers = [stay.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(400)]
            with pytest.raises(TimeoutError):
                hall.next_caller(0.3)
            assert open_files() == before + len(callers) + 256
            assert callers[0].recv(1) == b""  # sent away
            callers[-1].settimeout(0.05)
            with pytest.raises(TimeoutError):
                callers[-1].recv(1)
            with ThreadPoolExecutor(1) as pool, socket.create_connection(("127.0.0.1", port), LONG) as rank:
                calling = pool.submit(introduce, rank, SECRET, "world", {"rank": 7})
                caller = hall.next_caller(LONG)
                assert caller.card == {"rank": 7}
                caller.socket.close()
                calling.result()


def test_each_caller_has_little_time_and_the_others_do_not_wait_for_it():
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        Reception(listener, SECRET, "world", patience=0.3) as hall,
        socket.create_connection(listener.getsockname(), LONG) as dribbling,
        ThreadPoolExecutor(1) as pool,
    ):

        def dribble():
            with contextlib.suppress(OSError):
                for byte in reception._greeting("world") + bytes(1000):
                    dribbling.sendall(bytes([byte]))
                    time.sleep(0.05)
            return time.monotonic()

        started = time.monotonic()
        sent_away = pool.submit(dribble)
        with pytest.raises(TimeoutError, match="nobody who knows the secret called within 1 s"):
            hall.next_caller(1.0)
        assert sent_away.result() - started < 5.0


def test_a_reception_that_is_out_of_files_sends_somebody_away():
    """A process without a file for a new caller takes it all the same, for somebody who is half-way."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        Reception(listener, SECRET, "world") as hall,
        contextlib.ExitStack() as stay,
        ThreadPoolExecutor(1) as pool,
    ):
        callers = [stay.enter_context(socket.create_connection(listener.getsockname(), LONG)) for _ in range(5)]
        resource.setrlimit(resource.RLIMIT_NOFILE, (_first_free_file() + 2, limits[1]))
        try:
            calling = pool.submit(introduce, callers[-1], SECRET, "world", {"rank": 1})
            with hall.next_caller(LONG).socket:
                calling.result()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert callers[0].recv(1) == b""


def _first_free_file():
    with open(os.devnull) as file:
        return file.fileno()


def test_a_reception_ends_when_it_is_told():
    reading, writing = os.pipe()
    try:
        with socket.create_server(("127.0.0.1", 0)) as listener, Reception(listener, SECRET, "world") as hall:
            threading.Timer(0.1, os.write, (writing, b".")).start()
            assert hall.next_caller(LONG, reading) is None
            with pytest.raises(TimeoutError):  # and can be asked again
                hall.next_caller(0.05)
    finally:
        os.close(reading)
        os.close(writing)


def test_a_caller_that_gives_up_before_the_end_has_not_come():
    with socket.create_server(("127.0.0.1", 0)) as listener, Reception(listener, SECRET, "world") as hall:

        class Impatient(socket.socket):
            def sendall(self, data, *flags):
                if len(data) == 1:
                    raise TimeoutError
                return super().sendall(data, *flags)

        with ThreadPoolExecutor(1) as pool, Impatient() as sock:
            sock.settimeout(LONG)
            sock.connect(listener.getsockname())
            calling = pool.submit(introduce, sock, SECRET, "world", {"rank": 1})
            with pytest.raises(TimeoutError, match="nobody who knows the secret"):
                hall.next_caller(0.3)
            with pytest.raises(TimeoutError, match="did not answer in time"):
                calling.result()


def test_every_kind_of_stranger_is_sent_away_or_runs_out_of_time():
    """One by one, so that none hides behind another; the reception goes on all the time."""
    with socket.create_server(("127.0.0.1", 0)) as listener, Reception(listener, SECRET, "w", patience=0.2) as hall:
        for stranger in STRANGERS:
            with ThreadPoolExecutor(1) as pool:
                coming = pool.submit(stranger, listener.getsockname()[1], "w")
                with pytest.raises(TimeoutError):
                    hall.next_caller(0.4)
                coming.result(LONG).close()
        end = time.monotonic() + LONG  # a busy machine hears late that somebody has gone
        while hall._half_way and time.monotonic() < end:
            with pytest.raises(TimeoutError):
                hall.next_caller(0.2)
        assert hall._half_way == {}
