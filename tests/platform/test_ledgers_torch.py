"""The ledgers in which ranks compare what they are about to do: who is let through, who is named, what is read.

That ranks which disagree are told so is in ``tests/attacks/test_disagreeing_ranks.py``.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_parallel.platform.checks import ledger_pages
from hyper_parallel.platform.checks.call_ledger import CallLedger
from hyper_parallel.platform.checks.ledger_pages import Pages
from hyper_parallel.platform.checks.message_ledger import MessageLedger
from hyper_parallel.platform.torch.communication import collectives, group_facts, messages
from tests.attacks.breakable_groups import fresh_group
from tests.world import run_on_ranks


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


@run_on_ranks(2)
def test_a_rank_without_shared_memory_is_not_compared_and_not_looked_for_again():
    rank = dist.get_rank()

    def no_memory(*size: Any) -> None:
        raise OSError("no memory")

    plain = ledger_pages.SharedSegment.create
    if rank == 1:
        ledger_pages.SharedSegment.create = no_memory
    try:
        with fresh_group() as group:
            for _ in range(3):
                assert collectives.all_reduce(torch.ones(1), group).item() == 2
            ledger = group_facts.find_facts(group)[1].ledger
            assert (ledger is None) == (rank == 1)
            if ledger is not None:
                assert not ledger._pages.attention
                assert not ledger._pages.others
    finally:
        ledger_pages.SharedSegment.create = plain


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
