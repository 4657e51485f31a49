"""Ranks that disagree about a collective or a message over gloo: every rank is told who does what, and none is aborted.

Gloo compares sizes in a thread of its own and ends the process, or takes what is too short without a word. Here each
disagreement happens on real ranks in a group of its own, in every order of arrival, and the ranks go on living: nobody
may wait for one that has raised.
"""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_parallel.platform import ledger_pages
from hyper_parallel.platform.call_ledger import CallLedger
from hyper_parallel.platform.ledger_pages import Pages
from hyper_parallel.platform.message_ledger import MessageLedger
from hyper_parallel.platform.torch import collectives, differentiable, groups, messages
from tests.world import run_on_ranks

SECONDS = 20  # within which everybody has heard of a disagreement; gloo alone would wait for half an hour


@contextmanager
def fresh_group(timeout: timedelta | None = None):
    """A group of all ranks that is not the world: it may break."""
    group = groups.split_group(None, [range(dist.get_world_size())], timeout)
    try:
        yield group
    finally:
        dist.barrier()
        groups.destroy_process_group(group)


def last(rank: int) -> bool:
    return rank == dist.get_world_size() - 1


def ones(rank: int, *shapes: Any, dtypes: tuple = (torch.float32, torch.float32)) -> torch.Tensor:
    """On the last rank of the second shape and dtype."""
    return torch.ones(shapes[last(rank)] if len(shapes) > 1 else shapes[0], dtype=dtypes[last(rank)])


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


def check_told(call: Callable[[int, Any], Any], told: str, group: Any, takes_part: bool) -> None:
    """This rank's part of a disagreement: it is told soon, and the group is broken for it."""
    rank = dist.get_rank()
    start = time.monotonic()
    if not takes_part:
        call(rank, group)
        return
    ranks = re.escape(str(list(range(dist.get_world_size()))))
    with pytest.raises(RuntimeError, match=rf"(?s)the ranks of the group {ranks} disagree: .*{told}"):
        call(rank, group)
    with pytest.raises(RuntimeError, match=rf"(?s)the group {ranks} cannot be used any more: the ranks.*{told}"):
        collectives.all_reduce(torch.ones(1), group)
    with pytest.raises(RuntimeError, match="cannot be used any more"):
        messages.isend(torch.ones(1), 1 - min(rank, 1), group)
    assert time.monotonic() - start < SECONDS


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


# ---------------------------------------------------------------- who is waited for


@run_on_ranks(3)
def test_a_rank_that_does_not_come_is_named_with_what_is_waited_for():
    rank = dist.get_rank()
    with fresh_group(timedelta(seconds=2)) as group:
        collectives.all_reduce(torch.ones(1), group)
        if rank < 2:
            with pytest.raises(
                RuntimeError,
                match=r"(?s)communication failed on rank \d: .*"
                r"rank 2 has not begun collective 2 of the group \[0, 1, 2\], all_reduce\(shape=\(2, 3\), .*op=sum\)",
            ):
                collectives.all_reduce(torch.ones(2, 3), group)
        dist.barrier()
    with fresh_group(timedelta(seconds=2)) as group:
        if rank == 0:
            with pytest.raises(
                RuntimeError, match=r"rank 1 has not begun to receive message 1 with tag 5 from rank 0 to"
            ):
                messages.isend(torch.ones(1), 1, group, 5).wait()
        elif rank == 1:
            with pytest.raises(RuntimeError, match=r"rank 0 has not begun to send message 1 with tag 6 from rank 0 to"):
                messages.irecv(torch.ones(1), 0, group, 6).wait()


# ---------------------------------------------------------------- ranks that agree are let through


@run_on_ranks(2, 3)
def test_programs_whose_ranks_agree_are_let_through():
    rank, size = dist.get_rank(), dist.get_world_size()
    with fresh_group() as group:
        # More in flight than the ring has entries, begun by one rank long before the others.
        if rank == 0:
            time.sleep(0.2)
        begun = [collectives.all_reduce(torch.full((1 + number % 7,), 1.0), group, True) for number in range(1100)]
        for result, handle in begun:
            handle.wait()
            assert result.unique().tolist() == [size]
        # All-to-alls with and without splits on different ranks, and with rows that differ.
        data = torch.arange(2.0 * size)
        splits = [2] * size if rank else None
        output, _ = collectives.all_to_all_single(data, data.shape, group, False, splits, splits)
        assert output.tolist() == [value for _ in range(size) for value in (2.0 * rank, 2.0 * rank + 1)]
        for step in range(70):
            sent = [(rank + place + step) % 3 for place in range(size)]
            received = [(place + rank + step) % 3 for place in range(size)]
            output, _ = collectives.all_to_all_single(
                torch.full((sum(sent), 2), rank), (sum(received), 2), group, False, received, sent
            )
            assert output[:, 0].tolist() == [place for place in range(size) for _ in range(received[place])]
        # Tags in another order on the other side, and more messages than there are cells.
        peer = (rank + 1) % size
        source = (rank - 1) % size
        tags = list(range(40)) * 10
        works = [messages.isend(torch.full((1 + tag % 5,), float(tag)), peer, group, tag) for tag in tags]
        boxes = [(tag, torch.empty(1 + tag % 5)) for tag in reversed(tags)]
        works += [messages.irecv(box, source, group, tag) for tag, box in boxes]
        for work in works:
            work.wait()
        assert all(box.unique().tolist() == [tag] for tag, box in boxes)


@run_on_ranks(3)
def test_receives_from_any_rank_are_let_through():
    rank = dist.get_rank()
    with fresh_group() as group:
        if rank == 0:
            for _ in range(2):
                box = torch.empty(2)
                messages.irecv(box, None, group, 1).wait()
                messages.irecv(torch.empty(5), int(box[0]), group, 2).wait()
                messages.irecv(torch.empty(7), int(box[0]), group, 1).wait()
        else:
            messages.isend(torch.full((2,), float(rank)), 0, group, 1).wait()
            messages.isend(torch.ones(5), 0, group, 2).wait()
            messages.isend(torch.ones(7), 0, group, 1).wait()
        if rank == 0:
            assert {messages.recv_object_list([None] * 2, None, group) for _ in range(2)} == {1, 2}
            messages.irecv(torch.empty(3), 1, group, 4).wait()
        else:
            messages.send_object_list([rank, rank], 0, group)
            if rank == 1:
                messages.isend(torch.ones(3), 0, group, 4).wait()


@run_on_ranks(2)
def test_a_call_that_fails_before_it_begins_does_not_count():
    rank = dist.get_rank()
    with fresh_group() as group:
        for _ in range(2):
            if rank == 0:
                for call in (
                    lambda: messages.send_object_list([lambda: 0, 1], 1, group),
                    lambda: messages.all_gather_object([None] * 2, lambda: 0, group),
                    lambda: collectives.all_reduce(torch.ones(1).expand(3), group),
                    lambda: collectives.broadcast(torch.ones(1).expand(3), 0, group),
                    lambda: collectives.reduce_scatter_tensor(torch.ones(3), group),
                    lambda: collectives.all_to_all_single(torch.ones(3), (3,), group, False, [1, 1], [1, 2]),
                    lambda: messages.irecv(torch.ones(1).expand(3), 1, group),
                ):
                    with pytest.raises(Exception, match=r"pickle|expanded|equal|rows"):
                        call()
                messages.send_object_list(["well"], 1, group)
            else:
                box = [None]
                messages.recv_object_list(box, 0, group)
                assert box == ["well"]
            assert collectives.all_reduce(torch.ones(2), group).tolist() == [2, 2]


# ---------------------------------------------------------------- the ledger itself


class Refused(Exception):
    """Raised in place of what a platform raises."""


def refuse(text: str) -> None:
    raise Refused(text)


def two_ranks() -> list[Pages]:
    """The pages of world ranks 4 and 6 in this process."""
    known: list[dict] = []
    pages = [Pages([4, 6], place, lambda place: (known, len(known) == 2), refuse) for place in range(2)]
    known.extend(page.address() for page in pages)
    return pages


def test_numbers_begin_anew():
    first, second = (CallLedger(pages) for pages in two_ranks())
    for _ in range(ledger_pages.NUMBERS + 3):
        first.enter("barrier")
        second.enter("barrier")
    assert first.waits_for() == []
    first.enter("all_reduce", (2,), "float32", "sum")
    first.enter("barrier")
    [line] = first.waits_for()
    assert line.startswith(
        "rank 6 has not begun collective 3 of the group [4, 6], all_reduce(shape=(2,), dtype=float32,"
    )
    [line] = second.waits_for()
    assert line.startswith("this rank has not begun collective 3 of the group [4, 6], all_reduce(shape=(2,)")
    with pytest.raises(Refused, match=r"(?s)rank 4: all_reduce\(shape=\(2,\).*rank 6: all_reduce\(shape=\(3,\)"):
        second.enter("all_reduce", (3,), "float32", "sum")


def test_what_is_overwritten_is_not_compared():
    pages = two_ranks()
    first, second = (CallLedger(page) for page in pages)
    for number in range(ledger_pages.RING + 1):
        first.enter("all_reduce", (number,), "float32", "sum")
    second.enter("barrier")
    sender, receiver = (MessageLedger(page) for page in pages)
    for number in range(ledger_pages.CELLS + 1):
        sender.send(1, 0, number, "float32")
    receiver.receive(0, 0, 5, "float32")
    with pytest.raises(
        Refused, match=r"message 2 with tag 0 from rank 4 to rank 6: rank 4 sends something else.*6 receives 5"
    ):
        receiver.receive(0, 0, 5, "float32")


def test_a_description_that_is_not_there_any_more_is_no_reason_to_go_on():
    first, second = (CallLedger(pages) for pages in two_ranks())
    first.enter("all_reduce", tuple(range(400)), "float32", "sum")  # longer than there is room for
    with pytest.raises(Refused, match=r"(?s)not the same .*rank 4: all_reduce\(\)\n  rank 6: barrier\(\)"):
        second.enter("barrier")
    for number in range(3000):
        first.enter("all_reduce", (number,), "float32", "sum")
    second.enter("all_reduce", (0,), "float32", "sum")
    with pytest.raises(Refused, match="rank 4: another call"):
        for number in range(1, 3000):
            second.enter("all_reduce", (number + 1,), "float32", "sum")


def test_pages_that_are_not_ours_are_not_read(tmp_path):
    known: list[dict] = []
    pages = Pages([0, 1, 2, 3, 4, 5], 0, lambda place: (known, True), refuse)
    good = pages.address()
    (tmp_path / "small").write_bytes(b"x")
    (tmp_path / "large").write_bytes(bytes(1 << 20))
    for place, change in enumerate(
        (
            {"host": "elsewhere"},
            {"token": 5},
            {"path": str(tmp_path / "none")},
            {"path": str(tmp_path / "small")},
            {"path": str(tmp_path / "large")},
        ),
        start=1,
    ):
        known.append({**good, "place": place, **change})
    known.extend([{}, {"place": "1"}, {"place": 1, "path": 7, "host": good["host"]}])
    CallLedger(pages).enter("barrier")
    assert not pages.others
    assert pages.unreadable == {1, 2, 3, 4, 5}
