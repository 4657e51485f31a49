"""Ranks that disagree about a collective or a message over gloo: every rank is told who does what, and none is aborted.

Gloo compares sizes in a thread of its own and ends the process, or takes what is too short without a word. Here each
disagreement happens on real ranks in a group of its own, in every order of arrival, and the ranks go on living: nobody
may wait for one that has raised.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_parallel.platform.torch.communication import collectives, differentiable, groups, messages
from tests.attacks.breakable_groups import check_told, fresh_group, last, ones
from tests.world import RanksFailed, run_on_ranks


def exchanged(rank: int, group: Any) -> None:
    size = dist.get_world_size()
    sent, received = [2] * size, [2] * size
    if last(rank):
        received[0] = 1
    collectives.all_to_all_single(torch.ones(sum(sent)), (sum(received),), group, False, received, sent)


def rows(rank: int, group: Any, splits: list[int] | None) -> None:
    size = dist.get_world_size()
    data = torch.ones(2 * size, 2 + last(rank))
    collectives.all_to_all_single(data, data.shape, group, False, None, splits)


def not_waiting(call: Callable[[], Any], group: Any) -> None:
    """A rank that waits for nobody may be done before another comes; then it is told when it uses the group again."""
    call()
    collectives.all_reduce(torch.ones(1), group)


def shape(*numbers: int) -> str:
    return re.escape(f"(shape={numbers}")


# What each rank does, and what everybody is told.
COLLECTIVES: list[tuple[Callable[[int, Any], Any], str]] = [
    (
        lambda r, g: collectives.all_reduce(ones(r, 2, 3), g),
        f"the same shape.*all_reduce{shape(2)}.*all_reduce{shape(3)}",
    ),
    (
        lambda r, g: collectives.all_reduce(ones(r, 3, 2), g),
        f"the same shape.*all_reduce{shape(3)}.*all_reduce{shape(2)}",
    ),
    (lambda r, g: collectives.all_reduce(ones(r, 10**6, 10**6 + 1), g), "not the same shape"),
    (lambda r, g: collectives.all_reduce(ones(r, (2, 3), (3, 2)), g), "not the same shape"),
    (lambda r, g: not_waiting(lambda: collectives.all_reduce(ones(r, 3, 0), g), g), "not the same shape"),
    (lambda r, g: collectives.all_reduce(ones(r, (), 1), g), r"all_reduce\(shape=\(\).*all_reduce\(shape=\(1,\)"),
    (
        lambda r, g: collectives.all_reduce(ones(r, 4, dtypes=(torch.float32, torch.float64)), g),
        r"not the same dtype.*dtype=torch\.float32, op=sum.*dtype=torch\.float64, op=sum",
    ),
    (lambda r, g: collectives.all_reduce(ones(r, 4, dtypes=(torch.float32, torch.int32)), g), "not the same dtype"),
    (lambda r, g: collectives.all_reduce(ones(r, 3, 4).bfloat16(), g), "not the same shape"),
    (lambda r, g: collectives.all_reduce(ones(r, 3, 4).to(torch.float8_e5m2), g), "not the same shape"),
    (lambda r, g: collectives.all_reduce(ones(r, 3, 5)[::2], g), r"all_reduce\(shape=\(2,\).*all_reduce\(shape=\(3,\)"),
    (lambda r, g: collectives.all_reduce(torch.ones(4), g, op=("sum", "max")[last(r)]), "the same op.*=sum.*=max"),
    (lambda r, g: collectives.all_reduce(ones(r, 2, 3), g, async_op=True)[1].wait(), "not the same shape"),
    (
        lambda r, g: [
            handle.wait()
            for handle in [collectives.all_reduce(torch.ones(2 + (last(r) and i == 3)), g, True)[1] for i in range(6)]
        ],
        "not the same shape",
    ),
    (lambda r, g: collectives.reduce_scatter_tensor(torch.ones(6 * (1 + last(r))), g), "reduce_scatter_tensor"),
    (lambda r, g: collectives.reduce_scatter_tensor(torch.ones(6 * (1 + last(r))).bfloat16(), g), "torch.bfloat16"),
    (lambda r, g: collectives.reduce_scatter_tensor(torch.ones(6 + 6 * last(r)).bool(), g), "not the same shape"),
    (lambda r, g: collectives.all_gather_into_tensor(ones(r, 2, 3), g), "not the same shape.*all_gather_into_tensor"),
    (lambda r, g: collectives.all_gather_into_tensor(ones(r, 3, 2), g), "not the same shape.*all_gather_into_tensor"),
    (
        lambda r, g: collectives.all_gather_into_tensor(ones(r, 2, dtypes=(torch.float32, torch.complex64)), g, True)[
            1
        ].wait(),
        "not the same dtype",
    ),
    (
        lambda r, g: not_waiting(lambda: collectives.broadcast(ones(r, 2, 3), 0, g), g),
        rf"not the same shape.*broadcast{shape(2)}.*src=0",
    ),
    (lambda r, g: not_waiting(lambda: collectives.broadcast(ones(r, 3, 2), 0, g), g), "not the same shape"),
    (lambda r, g: not_waiting(lambda: collectives.broadcast(ones(r, 3, 2).t(), 0, g), g), "not the same shape"),
    (
        lambda r, g: not_waiting(lambda: collectives.broadcast(torch.ones(3), int(last(r)), g), g),
        "not the same src.*src=0.*src=1",
    ),
    (lambda r, g: rows(r, g, None), "not the same shape"),
    (lambda r, g: rows(r, g, [2] * dist.get_world_size()), "not the same shape of a row"),
    (exchanged, r"sends 2 rows to group rank \d, which expects 1.*input_splits=\[2, .*output_splits=\[1, "),
    (lambda r, g: groups.barrier(g) if last(r) else collectives.all_reduce(torch.ones(2), g), r"function.*barrier\(\)"),
    (
        lambda r, g: (
            groups.barrier(g) if last(r) else not_waiting(lambda: collectives.broadcast(torch.ones(2), 0, g), g)
        ),
        r"barrier\(\)",
    ),
    (
        lambda r, g: (
            collectives.all_reduce(torch.ones(2), g)
            if last(r)
            else collectives.all_gather_into_tensor(torch.ones(2), g)
        ),
        "function.*all_gather_into_tensor.*all_reduce",
    ),
    (
        lambda r, g: (
            collectives.all_gather_into_tensor(torch.ones(2), g)
            if last(r)
            else messages.all_gather_object([None] * dist.get_world_size(), "here", g)
        ),
        r"all_gather_object\(\).*all_gather_into_tensor",
    ),
    (
        lambda r, g: (
            groups.barrier(g) if last(r) else messages.all_gather_object([None] * dist.get_world_size(), "here", g)
        ),
        r"all_gather_object\(\).*barrier\(\)",
    ),
    (
        lambda r, g: (
            collectives.reduce_scatter_tensor(torch.ones(6), g)
            if last(r)
            else collectives.all_to_all_single(torch.ones(12), (12,), g)
        ),
        r"all_to_all_single\(shape=\(12,\).*reduce_scatter_tensor\(shape=\(6,\)",
    ),
    (lambda r, g: collectives.all_reduce(torch.ones(2), g) if last(r) else exchanged(r, g), "not the same function"),
]


def sends(*calls: Callable[[Any], Any]) -> Callable[[int, Any], Any]:
    """Rank 0 does the first, rank 1 the second, the others nothing."""
    return lambda rank, group: calls[rank](group) if rank < 2 else None


MESSAGES = [
    (
        sends(
            lambda g: messages.isend(torch.ones(3), 1, g).wait(), lambda g: messages.irecv(torch.ones(2), 0, g).wait()
        ),
        r"message 1 with tag 0 from rank 0 to rank 1: rank 0 sends 3 element\(s\) of torch.float32.*"
        r"rank 1 receives 2 element\(s\) of torch.float32",
    ),
    (
        sends(
            lambda g: messages.isend(torch.ones(2), 1, g).wait(), lambda g: messages.irecv(torch.ones(3), 0, g).wait()
        ),
        r"sends 2 element.*receives 3 element",
    ),
    (
        sends(
            lambda g: messages.isend(torch.ones(2), 1, g, 7).wait(),
            lambda g: messages.irecv(torch.ones(2).int(), 0, g, 7).wait(),
        ),
        r"message 1 with tag 7 .*sends 2 element\(s\) of torch.float32.*receives 2 element\(s\) of torch.int32",
    ),
    (
        sends(
            lambda g: [messages.isend(torch.ones(size), 1, g) for size in (2, 3, 4)][2].wait(),
            lambda g: [w.wait() for w in [messages.irecv(torch.ones(size), 0, g) for size in (2, 4, 3)]],
        ),
        "message 2 with tag 0 from rank 0 to rank 1: rank 0 sends 3 .* receives 4",
    ),
    (
        sends(
            lambda g: messages.isend(torch.ones(10**6), 1, g).wait(),
            lambda g: messages.irecv(torch.ones(2, 2).t(), 0, g).wait(),
        ),
        "sends 1000000 .* receives 4",
    ),
    (
        sends(lambda g: messages.send_object_list([1, 2], 1, g), lambda g: messages.recv_object_list([None], 0, g)),
        r"sends a list of 2 object\(s\).*receives a list of 1 object\(s\)",
    ),
    (
        sends(lambda g: messages.send_object_list([1], 1, g), lambda g: messages.recv_object_list([None] * 2, 0, g)),
        r"sends a list of 1 object\(s\).*receives a list of 2 object\(s\)",
    ),
    (
        sends(lambda g: messages.isend(torch.ones(20), 1, g).wait(), lambda g: messages.recv_object_list([None], 0, g)),
        r"sends 20 element.*receives a list of 1 object",
    ),
    (
        sends(
            lambda g: messages.isend(torch.tensor([1 << 40]), 1, g).wait(),
            lambda g: messages.recv_object_list([None], 0, g),
        ),
        r"sends 1 element\(s\) of torch.int64.*receives a list of 1 object",
    ),
    (
        sends(
            lambda g: messages.send_object_list([1], 1, g),
            lambda g: messages.irecv(torch.ones(1, dtype=torch.uint8), 0, g).wait(),
        ),
        r"sends a list of 1 object\(s\).*receives 1 element",
    ),
    (
        sends(
            lambda g: differentiable.p2p_exchange(torch.ones(2), 1, g),
            lambda g: differentiable.p2p_exchange(torch.ones(3), 0, g),
        ),
        r"message 1 with tag 0 from rank \d to rank \d: rank \d sends \d element",
    ),
    (
        sends(
            lambda g: not_waiting(lambda: differentiable.p2p_exchange(torch.ones(0), 1, g), g),
            lambda g: differentiable.p2p_exchange(torch.ones(3), 0, g),
        ),
        "message 1 with tag 0",
    ),
]


@run_on_ranks(2, 3)
def test_every_rank_is_told_whoever_comes_first():
    rank, size = dist.get_rank(), dist.get_world_size()
    cases = [(*case, size) for case in COLLECTIVES] + [(*case, 2) for case in MESSAGES]
    for number, (call, told, num_ranks) in enumerate(cases):
        with fresh_group() as group:
            dist.barrier()
            if rank == number % num_ranks:
                time.sleep(0.02)
            check_told(call, told, group, rank < num_ranks)


@pytest.fixture
def num_rounds(sweep: bool) -> int:
    return 2000 if sweep else 40


@run_on_ranks(2, 3, timeout=1800)
def test_ranks_that_come_at_the_same_moment_do_not_miss_each_other(num_rounds):
    rank = dist.get_rank()
    chosen = random.Random(7)
    for _ in range(num_rounds):
        first, second = chosen.sample(range(1, 6), 2)
        with fresh_group() as group:
            for _ in range(chosen.randrange(3)):  # They have met before, or not.
                collectives.all_reduce(torch.ones(1), group)
            dist.barrier()
            check_told(
                lambda rank, group, sizes=(first, second): collectives.all_reduce(ones(rank, *sizes), group),
                "not the same shape",
                group,
                True,
            )
    assert collectives.all_reduce(torch.tensor([rank]), None).item() == sum(range(dist.get_world_size()))


@run_on_ranks(3)
def test_other_groups_are_not_touched():
    rank = dist.get_rank()
    with fresh_group() as whole, fresh_group() as other:
        check_told(lambda r, g: collectives.all_reduce(ones(r, 2, 3), g), "not the same shape", whole, True)
        assert collectives.all_reduce(torch.tensor([rank]), other).item() == 3
        assert collectives.all_gather_into_tensor(torch.tensor([rank]), None).tolist() == [0, 1, 2]


def _lose_rank_1_after_a_disagreement() -> None:
    group = groups.split_group(None, [[0, 1]])
    check_told(lambda r, g: collectives.all_reduce(ones(r, 2, 3), g), "not the same shape", group, True)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    message = r"(?s)on rank 0: rank 1 \(process \d+\) has ended: .*\nthe ranks of the group .* disagree: not the same"
    with pytest.raises(RuntimeError, match=message):
        collectives.all_reduce(torch.ones(1), None)


def test_a_disagreement_of_before_does_not_hide_a_rank_that_is_gone(worlds):
    with pytest.raises(RanksFailed) as caught:
        worlds(2).run(_lose_rank_1_after_a_disagreement)
    outcome = caught.value.outcome
    assert outcome.died == {1: -signal.SIGKILL}, str(caught.value)
    assert not outcome.raised, str(caught.value)
    assert not outcome.silent, str(caught.value)
