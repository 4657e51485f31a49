"""Messages and collectives between host processes, with threads for processes: what is sent, what goes wrong."""

from __future__ import annotations

import contextlib
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hyper_parallel.platform.host import transport
from hyper_parallel.platform.host.host_collectives import HostGroup, reduce_arrays
from hyper_parallel.platform.host.transport import HostTransport, PeerLost

only_on = "torch"  # once is enough: no framework takes part

LONG = 120.0


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_ranks(num_ranks, port, body, name="test"):
    """``body(transport)`` on each rank, all at once; the results by rank."""

    def run(rank):
        transport = HostTransport(rank, num_ranks, "127.0.0.1", port, name, LONG)
        try:
            return body(transport)
        finally:
            transport.close()

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(run, range(num_ranks)))


def group_of(transport, ranks=None, name="group"):
    return HostGroup(transport, range(transport.world_size) if ranks is None else ranks, name)


def test_collectives_of_all_sizes(port):
    def body(transport):
        group, rank, size = group_of(transport), transport.rank, transport.world_size
        for length in (0, 1, 7, 200_000):
            mine = np.arange(length, dtype=np.float32) + rank
            expected = np.arange(length, dtype=np.float32) * size + sum(range(size))
            for in_flight in (False, True):
                assert (group.start_reduction("all_reduce", mine, "sum", in_flight)() == expected).all()
            gathered = group.start_gather("gather", mine.view(np.uint8))()
            assert all((part.view(np.float32) == np.arange(length) + r).all() for r, part in enumerate(gathered))
            data = np.full(length, rank, np.int16).view(np.uint8)
            assert (group.start_broadcast("broadcast", data, size - 1)().view(np.int16) == size - 1).all()
        return True

    assert run_ranks(3, port, body) == [True] * 3


def test_several_in_flight_are_finished_in_any_order(port):
    def body(transport):
        group = group_of(transport)
        started = [group.start_reduction("all_reduce", np.full(100_000, float(n)), "sum", True) for n in range(4)]
        order = range(4) if transport.rank else reversed(range(4))
        return all((started[number]() == 3.0 * number).all() for number in order)

    assert all(run_ranks(3, port, body))


def test_groups_made_in_a_cycle_do_not_wait_for_each_other(port):
    def body(transport):
        pairs = {0: ([0, 1], [0, 2]), 1: ([1, 2], [0, 1]), 2: ([0, 2], [1, 2])}[transport.rank]
        groups = [group_of(transport, ranks, str(ranks)) for ranks in pairs]
        started = [(group, group.start_gather("gather", np.array([transport.rank], np.uint8))) for group in groups]
        return all([int(part[0]) for part in finish()] == group.ranks for group, finish in started)

    assert all(run_ranks(3, port, body))


def test_messages_wait_for_nobody_and_come_by_tag(port):
    def body(transport):
        group, peer = group_of(transport), 1 - transport.rank
        large = np.full(3_000_000, transport.rank, np.uint8)  # both send before either receives
        for tag in (1, 2):
            group.send("send", large + tag, peer, tag)
        second = group.receive("send", peer, 2)
        first = group.receive("send", None, 1)
        return first[0] == peer and int(first[1][0]) == peer + 1 and int(second[1][-1]) == peer + 2

    assert all(run_ranks(2, port, body))


def test_ranks_that_do_different_things_are_told(port):
    def body(transport):
        group = group_of(transport)
        operation = "all_reduce" if transport.rank else "barrier"
        with pytest.raises(RuntimeError, match=f"the ranks disagree: rank {transport.rank} is in {operation}, rank"):
            group.start_gather(operation, np.zeros(4, np.uint8))()
        with pytest.raises(RuntimeError, match=r"expects \d bytes from rank \d and got \d"):
            group.start_reduction("all_reduce", np.zeros(1 + transport.rank, np.float32), "sum", False)()
        return True

    assert all(run_ranks(2, port, body))


def test_a_peer_that_goes_is_named(port):
    """Rank 2 hangs up without a goodbye, as the kernel does for a process that dies; later rank 1 leaves in order."""
    all_here, gone = threading.Barrier(3), threading.Event()

    def body(transport):
        group = group_of(transport)
        all_here.wait(LONG)
        if transport.rank == 2:
            for peer in transport._peers.values():
                peer.socket.shutdown(socket.SHUT_RDWR)
            gone.set()
            return True
        assert gone.wait(LONG)
        with pytest.raises(PeerLost, match=rf"all_reduce on rank {transport.rank} cannot end: rank 2 \(process \d+ on"):
            group.start_gather("all_reduce", np.zeros(4, np.uint8))()
        pair = group_of(transport, [0, 1], "pair")  # does not need rank 2
        assert len(pair.start_gather("gather", np.zeros(1, np.uint8))()) == 2
        if transport.rank == 0:
            with pytest.raises(PeerLost, match=r"rank 1 .* has left the world"):
                pair.receive("send", 1, 0)
        return True

    assert all(run_ranks(3, port, body))


def test_a_rank_that_leaves_in_the_middle_is_named(port):
    """As a program does that ends by an error."""

    def body(transport):
        group = group_of(transport)
        group.start_gather("gather", np.zeros(1, np.uint8))()
        if transport.rank != 1:
            with pytest.raises(
                PeerLost, match=rf"all_reduce on rank {transport.rank} cannot end: rank 1 .* has left the"
            ):
                group.start_gather("all_reduce", np.zeros(1, np.uint8))()
        return True

    assert all(run_ranks(3, port, body))


def test_a_wait_that_is_too_long_says_for_whom(port):
    def body(transport):
        if transport.rank == 0:
            with pytest.raises(TimeoutError, match=r"send on rank 0 gave up after 0.1 s: nothing came from rank 1"):
                transport.receive([1], 5, 0, "send", timeout=0.1)
            transport.send(1, 7, 0, "go", b"x")
        else:
            transport.receive([0], 7, 0, "go")
        return True

    assert all(run_ranks(2, port, body))


def test_ranks_meet_on_the_next_port_when_the_first_is_taken(port):
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()

        def hang_up():
            with contextlib.suppress(OSError):
                while True:
                    other.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        assert run_ranks(2, port, lambda transport: transport.world_size) == [2, 2]


def test_a_silent_stranger_on_the_port_costs_little_time(port):
    with socket.socket() as stranger:
        stranger.bind(("127.0.0.1", port))
        stranger.listen()
        with ThreadPoolExecutor(2) as pool:
            world = list(pool.map(lambda rank: HostTransport(rank, 2, "127.0.0.1", port, "two", LONG), range(2)))
        for transport in world:
            transport.close()
        with pytest.raises(TimeoutError, match="rank 1 found no rank 0"):
            HostTransport(1, 2, "127.0.0.1", port, "alone", 0.2)


def test_missing_ranks_and_ranks_that_are_there_twice(port):
    with pytest.raises(TimeoutError, match=r"rank 0 has not heard from rank\(s\) \[1, 2\] of a world of 3"):
        HostTransport(0, 3, "127.0.0.1", port, "alone", 0.2)
    with pytest.raises(TimeoutError, match=r"rank 1 found no rank 0 at 127.0.0.1.*MASTER_ADDR and MASTER_PORT"):
        HostTransport(1, 3, "127.0.0.1", port, "alone", 0.2)

    def join(rank):
        with pytest.raises((ValueError, RuntimeError, TimeoutError)) as raised:
            HostTransport(rank, 3, "127.0.0.1", port, "twice", 10.0)
        return str(raised.value)

    with ThreadPoolExecutor(3) as pool:
        messages = list(pool.map(join, [0, 1, 1]))
    for message in messages:
        assert "two processes say that they are rank 1" in message
        assert "give every process its own RANK" in message


def test_a_world_that_was_left_cannot_be_used(port):
    transport = HostTransport(0, 1, "127.0.0.1", port, "one", LONG)
    transport.close()
    transport.close()
    with pytest.raises(RuntimeError, match="this process has left the world"):
        transport.receive([], 1, 0, "barrier")
    assert not any(thread.name == "hyper_parallel-transport" for thread in threading.enumerate())


def test_reductions_round_once_and_keep_nan():
    halves = [np.array([1.0], np.float16), *[np.array([2.0**-12], np.float16)] * 4]
    assert reduce_arrays(halves, "sum") == np.float16(1 + 4 * 2.0**-12)
    bad = [np.array([1.0, np.nan], np.float32), np.array([np.nan, 1.0], np.float32)]
    assert np.isnan(reduce_arrays(bad, "max")).all()
    assert np.isnan(reduce_arrays(bad, "min")).all()
    assert reduce_arrays([np.array([200], np.uint8)] * 2, "sum") == 144
    assert reduce_arrays([np.array([True]), np.array([False])], "sum").tolist() == [True]


def test_channels_differ():
    names = [f"{kind}/{number}" for kind in ("collectives", "messages") for number in range(1000)]
    assert len({transport.channel_of(name) for name in names}) == len(names)
