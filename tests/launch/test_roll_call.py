"""The roll call of real sockets, one thread a rank: who is missing is named on every rank that has come."""

from __future__ import annotations

import socket
import threading
import time

import pytest

from hyper_parallel.launch.roll_call import call_roll

only_on = "torch"  # imports no framework: once is enough


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _call(ranks, size, limit, port=None, before=None):
    """What each rank raises, or None; `before(port)` is called while rank 0 listens."""
    port = port or _free_port()
    ends = []

    def one(rank):
        try:
            call_roll(rank, size, "127.0.0.1", port, limit)
            ends.append((rank, None))
        except Exception as error:
            ends.append((rank, error))

    threads = [threading.Thread(target=one, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    if before is not None:
        before(port)
    for thread in threads:
        thread.join(30)
    return [(rank, None if error is None else str(error)) for rank, error in sorted(ends, key=lambda end: end[0])]


@pytest.mark.parametrize("size", [2, 5])
def test_all_have_come(size):
    assert _call(range(size), size, 20) == [(rank, None) for rank in range(size)]


def test_rank_0_may_come_last():
    assert _call([2, 1, 0], 3, 20) == [(0, None), (1, None), (2, None)]


def test_the_port_is_free_for_the_world_afterwards():
    port = _free_port()
    for _ in range(3):
        assert _call([0, 1], 2, 20, port) == [(0, None), (1, None)]


def test_who_is_missing_is_named_on_all_that_are_here():
    missing = "ranks 2, 4 of 5 have not come within 0.4 s"
    assert _call([0, 1, 3], 5, 0.4) == [(0, missing), (1, missing), (3, missing)]
    one = "rank 1 of 2 has not come within 0.2 s"
    assert _call([0], 2, 0.2) == [(0, one)]


def test_without_rank_0_the_others_say_so():
    start = time.monotonic()
    ((_, said),) = _call([1], 2, 0.4)
    assert said.startswith("rank 0 of 2 has not come to 127.0.0.1, port ")
    assert said.endswith(" within 0.4 s, says rank 1")
    assert time.monotonic() - start < 10


def test_two_that_are_one_rank():
    (problem,) = {text for _, text in _call([0, 1, 1], 3, 20)}
    assert problem.startswith("two processes say that they are rank 1: on ")
    assert problem.endswith("; give every process its own RANK")


def test_worlds_of_different_sizes():
    def come(port):
        with pytest.raises(TimeoutError, match=r"rank 1 on .* is of a world of 3 ranks and rank 0 of one of 2"):
            call_roll(1, 3, "127.0.0.1", port, 20)

    ((_, said),) = _call([0], 2, 20, before=come)
    assert said.endswith(" is of a world of 3 ranks and rank 0 of one of 2")


def test_strangers_are_not_counted_and_hold_nobody_up():
    def visit(port):
        deadline = time.monotonic() + 10
        for text in (b"", b"GET / HTTP/1.1\n", b"x" * 5000, b'{"rank": 1}\n', b'{"rank": [], "size": 2, "host": 1}\n'):
            while time.monotonic() < deadline:
                try:
                    stranger = socket.create_connection(("127.0.0.1", port), timeout=5)
                    break
                except OSError:
                    time.sleep(0.01)
            stranger.sendall(text)
            if text != b"x" * 5000:
                stranger.close()
        call_roll(1, 2, "127.0.0.1", port, 10)

    assert _call([0], 2, 20, before=visit) == [(0, None)]


def test_a_rank_that_came_and_went_is_missing():
    def visit(port):
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=5) as one:
                    one.sendall(b'{"rank": 1, "size": 3, "host": "a"}\n')
                    time.sleep(0.1)
                return
            except OSError:
                time.sleep(0.01)

    assert _call([0], 3, 1.0, before=visit) == [(0, "ranks 1, 2 of 3 have not come within 1 s")]


def test_a_port_that_is_taken_is_said():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ((_, said),) = _call([0], 2, 5, port)
    assert said == (
        f"rank 0 cannot listen at port {port} of 127.0.0.1, where the ranks are to meet: Address already in use; set "
        "MASTER_PORT, or --master, to another port"
    )
