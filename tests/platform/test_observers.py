"""What observers of communication are told: launches with peers, tags and splits, and waits that have ended."""

from __future__ import annotations

import contextlib
import pickle
import time

import pytest
import torch

from hyper_parallel import CommRecorder
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.checks.collective_observers import end_observers, observers, wait_observers
from hyper_parallel.platform.shared.membership import Member, as_member
from tests.frameworks import collectives, on_mindspore, ours
from tests.world import run_on_ranks

platform = get_platform()


@contextlib.contextmanager
def watching():
    """The events of the block: ("launch" or "wait", what was told)."""
    events = []

    def launch(call):
        events.append(("launch", call))

    def wait(call):
        events.append(("wait", call))

    observers.append(launch)
    wait_observers.append(wait)
    try:
        yield events
    finally:
        observers.remove(launch)
        wait_observers.remove(wait)


def spelled(events):
    return [(kind, call.op) for kind, call in events]


# ---------------------------------------------------------------- in every world


def check_messages():
    rank = platform.get_rank()
    other = 1 - rank
    with watching() as events:
        sending = collectives.isend(torch.ones(3), other, None, 7)
        receiving = collectives.irecv(torch.ones(3), other, None, 7)
        receiving.wait()
        sending.wait()
    assert spelled(events) == [("launch", "isend"), ("launch", "irecv"), ("wait", "irecv"), ("wait", "isend")]
    calls = [call for _, call in events]
    assert calls[2] is calls[1]
    assert calls[3] is calls[0]
    assert {(call.peer, call.tag, call.num_bytes, call.async_op, call.splits) for call in calls} == {
        (other, 7, 12, True, None)
    }


def check_collectives():
    rank = platform.get_rank()
    world = platform.create_group([0, 1])
    rows = [[1, 3], [2, 1]]
    received = [rows[0][rank], rows[1][rank]]
    with watching() as events:
        collectives.all_reduce(torch.ones(2), None)
        first = collectives.all_reduce(torch.ones(2), None, True)[1]
        second = collectives.all_gather_into_tensor(torch.ones(4), None, True)[1]
        first.wait()
        first.wait()  # told once
        collectives.broadcast(torch.ones(1), 1, None)
        second.wait()
        collectives.reduce_scatter_tensor(torch.ones(2, 3), None, True)[1].wait()
        sent = torch.ones(sum(rows[rank]), 2)
        collectives.all_to_all_single(sent, (sum(received), 2), None, True, received, rows[rank])[1].wait()
        collectives.all_to_all_single(torch.ones(2), (2,), None)
    assert spelled(events) == [
        ("launch", "all_reduce"),
        ("launch", "all_reduce"),
        ("launch", "all_gather_into_tensor"),
        ("wait", "all_reduce"),
        ("launch", "broadcast"),
        ("wait", "all_gather_into_tensor"),
        ("launch", "reduce_scatter_tensor"),
        ("wait", "reduce_scatter_tensor"),
        ("launch", "all_to_all_single"),
        ("wait", "all_to_all_single"),
        ("launch", "all_to_all_single"),
    ]
    calls = [call for _, call in events]
    assert calls[3] is calls[1]
    assert all(call.group is world for call in calls)
    assert [call.peer for call in calls if call.peer is not None] == [1]  # the source of the broadcast
    assert calls[8].splits == (tuple(rows[rank]), tuple(received))
    assert calls[10].splits is None
    assert all(call.tag is None for call in calls)


def check_carried_dtypes_and_strides():
    """Where local work follows the communication, the wait is told after it."""
    with watching() as events:
        summed = torch.ones(2, 3).bool()
        collectives.all_reduce(summed, None, True)[1].wait()
        collectives.all_reduce(torch.ones(2, 3).t(), None, True)[1].wait()
        received = torch.zeros(3, 2).t()
        sending = collectives.isend(torch.ones(2, 3), 1 - platform.get_rank())
        collectives.irecv(received, 1 - platform.get_rank()).wait()
        sending.wait()
    assert spelled(events) == [
        *[("launch", "all_reduce"), ("wait", "all_reduce")] * 2,
        *[("launch", "isend"), ("launch", "irecv"), ("wait", "irecv"), ("wait", "isend")],
    ]


def check_barriers_and_objects():
    rank = platform.get_rank()
    mine = {"rank": rank, "text": "x" * 100}
    with watching() as events:
        platform.barrier()
        platform.barrier(async_op=True).wait()
        platform.all_gather_object([None, None], mine)
        if rank == 0:
            platform.send_object_list([mine, 3], 1)
        else:
            platform.recv_object_list([None, None], 0)
    message = ("launch", "recv_object_list" if rank else "send_object_list")
    assert spelled(events) == [
        ("launch", "barrier"),
        ("launch", "barrier"),
        ("wait", "barrier"),
        ("launch", "all_gather_object"),
        message,
    ]
    calls = [call for kind, call in events if kind == "launch"]
    assert all((call.shape, call.dtype, call.splits, call.tag) == ((), None, None, None) for call in calls)
    assert [call.async_op for call in calls] == [False, True, False, False]
    assert [call.num_bytes for call in calls[:3]] == [0, 0, len(pickle.dumps(mine))]
    assert calls[3].peer == 1 - rank
    assert calls[3].num_bytes == 0 if rank else calls[3].num_bytes > 100


def check_lists():
    with watching() as events:
        platform.all_gather_into_tensors(ours([torch.ones(2), torch.ones(4, 1)]), None, True)[1].wait()
    assert [kind for kind, _ in events] == ["launch", "wait"]
    assert events[0][1].num_bytes == 24


def check_platform_observers():
    launched, waited = [], []
    stop_launches = platform.observe_collectives(lambda *told: launched.append(told))
    stop_waits = platform.observe_waits(lambda *told: waited.append(told))
    collectives.all_reduce(torch.ones(2), None)
    collectives.all_reduce(torch.ones(3), None, True)[1].wait()
    platform.barrier()
    in_flight = collectives.all_reduce(torch.ones(4), None, True)[1]
    stop_waits()
    in_flight.wait()
    stop_launches()
    collectives.all_reduce(torch.ones(5), None, True)[1].wait()
    told = [("all_reduce", [0, 1], (count,), "float32", 4 * count, count > 2) for count in (2, 3, 4)]
    assert launched == [*told[:2], ("barrier", [0, 1], (), "", 0, False), told[2]]
    assert waited == [told[1]]


def check_times():
    told = []
    stop = platform.time_collectives(lambda *told_now: told.append(told_now))
    before = time.perf_counter()
    collectives.all_reduce(torch.ones(2), None)
    platform.barrier()
    handle = collectives.all_gather_into_tensor(torch.ones(3), None, True)[1]
    assert len(told) == 1
    time.sleep(0.02)
    handle.wait()
    stop()
    collectives.all_reduce(torch.ones(5), None)
    after = time.perf_counter()
    assert [one[:6] for one in told] == [
        ("all_reduce", [0, 1], (2,), "float32", 8, False),
        ("all_gather_into_tensor", [0, 1], (3,), "float32", 12, True),
    ]
    (begin, end), (second, waited) = ((one[6], one[7]) for one in told)
    assert before < begin < end < second < waited - 0.02 < after
    assert not end_observers


def check_begun_before():
    """Of what was begun before somebody watched, nothing is told; a handle is told to whoever watches at its wait."""
    before = collectives.all_reduce(torch.ones(2), None, True)[1]
    with watching() as events:
        before.wait()
        begun = collectives.all_reduce(torch.ones(2), None, True)[1]
    begun.wait()
    assert spelled(events) == [("launch", "all_reduce")]


def check_comm_recorder():
    with CommRecorder() as recorder:
        platform.barrier()
        platform.all_gather_object([None, None], 1)
        collectives.all_reduce(torch.ones(2), None)
    assert recorder.counts == {"all_reduce": 1}
    assert recorder.total_bytes == 8


def check_groups_of_one():
    alone = platform.create_group([platform.get_rank()])
    with watching() as events:
        collectives.all_reduce(torch.ones(2), alone, True)[1].wait()
        platform.all_gather_object([None], 1, alone)
        platform.barrier(alone)
    assert events == []


def check_handles():
    """A handle that tells answers as the handle in it."""
    with watching():
        handle = platform.barrier(async_op=True)
        handle.wait()
        assert handle.is_completed()


CHECKS = [
    check_messages,
    check_collectives,
    check_carried_dtypes_and_strides,
    check_barriers_and_objects,
    check_lists,
    check_platform_observers,
    check_times,
    check_begun_before,
    check_comm_recorder,
    check_groups_of_one,
    check_handles,
]


@run_on_ranks(2)
@pytest.mark.parametrize("check", CHECKS)
def test_on_processes(check):
    check()


@pytest.mark.skipif(on_mindspore, reason="ranks are not threads on MindSpore")
@pytest.mark.parametrize("check", CHECKS)
def test_in_threads(check):
    from hyper_parallel.testing import threads

    threads(2).run(check)
    assert not observers
    assert not wait_observers


@pytest.mark.skipif(on_mindspore, reason="ranks are not threads on MindSpore")
def test_ranks_as_threads_have_observers_of_their_own():
    from hyper_parallel.testing import threads

    def program():
        rank = platform.get_rank()
        with watching() if rank == 0 else contextlib.nullcontext([]) as events:
            collectives.all_reduce(torch.ones(2), None, True)[1].wait()
            platform.barrier()
        return spelled(events)

    assert threads(2).run(program) == [[("launch", "all_reduce"), ("wait", "all_reduce"), ("launch", "barrier")], []]


def test_in_a_silent_world():
    with as_member(Member(1, 4, platform.silent_group)), watching() as events:
        collectives.all_gather_into_tensor(torch.ones(3), None, True)[1].wait()
        collectives.isend(torch.ones(2), 3, None, 5).wait()
        platform.barrier()
        platform.all_gather_object([None] * 4, "mine")
    assert spelled(events) == [
        ("launch", "all_gather_into_tensor"),
        ("wait", "all_gather_into_tensor"),
        ("launch", "isend"),
        ("wait", "isend"),
        ("launch", "barrier"),
        ("launch", "all_gather_object"),
    ]
    assert (events[2][1].peer, events[2][1].tag) == (3, 5)


@run_on_ranks(2)
def test_a_wait_is_told_when_it_has_ended():
    with watching() as events:
        handle = collectives.irecv(torch.ones(2), 1 - platform.get_rank(), None, 3)
        assert not handle.is_completed()
        platform.barrier()
        collectives.isend(torch.ones(2), 1 - platform.get_rank(), None, 3).wait()
        handle.wait()
    assert spelled(events) == [
        ("launch", "irecv"),
        ("launch", "barrier"),
        ("launch", "isend"),
        ("wait", "isend"),
        ("wait", "irecv"),
    ]
