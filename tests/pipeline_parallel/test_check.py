"""Tables that must not be started are refused with rank, line and who waits for whom."""

import re
import time
from dataclasses import replace

import pytest

from hyper_parallel.core.pipeline_parallel.action import RECEIVES, Action, Kind
from hyper_parallel.core.pipeline_parallel.check import check, find_faults
from hyper_parallel.core.pipeline_parallel.faults import TableError
from hyper_parallel.core.pipeline_parallel.memory import Sizes
from hyper_parallel.core.pipeline_parallel.messages import add_messages
from hyper_parallel.core.pipeline_parallel.prepare import prepare
from hyper_parallel.core.pipeline_parallel.simulate import simulate
from hyper_parallel.core.pipeline_parallel.table import Table
from hyper_parallel.core.pipeline_parallel.tables import SCHEDULES, make_table

only_on = "torch"  # no framework takes part

GOOD = """
stages: 0 1
microbatches: 2
rank 0: 0UNSHARD 0F0 0SEND_F0 0F1 0RECV_B0 0SEND_F1 0B0 0RECV_B1 0I1 0W1 0REDUCE 0RESHARD
rank 1: 1UNSHARD 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1I1 1SEND_B1 1W1 1REDUCE 1RESHARD
"""
SEEDED = {
    "swapped messages": ("0RECV_B0 0SEND_F1", "0SEND_F1 0RECV_B0", [(0, 5), (1, 5)], "deadlock of 2 ranks"),
    "missing RECV": (
        "0RECV_B1 ",
        "",
        [(1, 9)],
        "rank 1 line 9 1SEND_B1 waits for 0RECV_B1, which is missing on rank 0",
    ),
    "missing SEND": (
        "0SEND_F1 ",
        "",
        [(1, 6)],
        "rank 1 line 6 1RECV_F1 waits for 0SEND_F1, which is missing on rank 0",
    ),
    "double F": ("0F1", "0F1 0F0", [(0, 5)], "0F0 is there twice, first at rank 0 line 2 0F0; remove one"),
    "missing F": ("0F1 ", "", [None], "rank 0: 0F1 is missing"),
    "W before I": ("0I1 0W1", "0W1 0I1", [(0, 9)], "0W1 needs rank 0 line 10 0I1, which comes later; swap them"),
    "W without I": ("0I1 0W1", "0W1", [(0, 9)], "rank 0 line 9 0W1: 0I1 is missing; I and W go together"),
    "B and I": (
        "0I1 0W1",
        "0I1 0W1 0B1",
        [(0, 9)],
        "rank 0 line 9 0I1: 0B1 is there too; write B, or I and W, not both",
    ),
    "no backward": ("0I1 0W1 ", "", [None], "rank 0: 0B1 is missing; write it, or 0I1 and 0W1"),
    "stage on two ranks": ("1F0 1B0", "1F0 0F0 1B0", [(1, 4)], "rank 1 line 4 0F0: stage 0 is on rank 0; move"),
    "stage that is none": ("1F0 1B0", "1F0 2F0 1B0", [(1, 4)], "there is no stage 2; the stages are 0 to 1"),
    "early RESHARD": (
        "0SEND_F1 0B0",
        "0SEND_F1 0RESHARD 0B0",
        [(0, 8)],
        "0B0 uses the weights of stage 0, let go at rank 0 line 7 0RESHARD; write 0UNSHARD before it",
    ),
    "late UNSHARD": (
        "1UNSHARD 1RECV_F0 1F0",
        "1RECV_F0 1F0 1UNSHARD",
        [(1, 2)],
        "weights of stage 1, not gathered yet",
    ),
    "UNSHARD twice": ("0F1", "0UNSHARD 0F1", [(0, 4)], "weights of stage 0 are gathered already; remove it"),
    "RESHARD twice": (
        "0REDUCE 0RESHARD",
        "0REDUCE 0RESHARD 0RESHARD",
        [(0, 13)],
        "stage 0 are not gathered; remove it",
    ),
    "early REDUCE": ("0W1 0REDUCE", "0REDUCE 0W1", [(0, 10)], "rank 0 line 10 0REDUCE comes before rank 0 line 11 0W1"),
    "missing REDUCE": (" 0REDUCE", "", [None], "rank 0: 0REDUCE is missing; other stages have theirs"),
    "REDUCE in two forms": ("0REDUCE", "0REDUCE1 0REDUCE", [(0, 12)], "would reduce twice what is reduced by"),
    "REDUCE of some": (
        "0REDUCE",
        "0REDUCE1",
        [None],
        "rank 0: 0REDUCE0 is missing; reduce all microbatches, or 0REDUCE",
    ),
    "wrong microbatch count": ("microbatches: 2", "microbatches: 3", [None], "rank 0: 0F2 is missing"),
    "microbatch too many": ("0F1", "0F1 0F2", [(0, 5)], "there is no microbatch 2; the table has 2, 0 to 1"),
    "duplicate tag": ("0SEND_F1", "0SEND_F1 0SEND_F1", [(0, 7)], "0SEND_F1 is there twice, first at rank 0 line 6"),
    "used before it came": ("1RECV_F1 1F1", "1F1 1RECV_F1", [(1, 6)], "1F1 needs rank 1 line 7 1RECV_F1, which comes"),
    "sent before it is made": (
        "0F1 0RECV_B0 0SEND_F1",
        "0SEND_F1 0F1 0RECV_B0",
        [(0, 4)],
        "0SEND_F1 needs rank 0 line 5",
    ),
    "message to nobody": ("1F1 1I1", "1F1 1SEND_F1 1I1", [(1, 8)], "1SEND_F1: there is no stage to exchange it with"),
    "at once with what it needs": (
        "1F1 1I1",
        "1F1+1I1",
        [(1, 7)],
        "rank 1 line 7 1F1+1I1: 1I1 needs what runs at once with it; write one behind the other",
    ),
    "half a batch": ("0RECV_B0 0SEND_F1", "0RECV_B0+0SEND_F1", [(0, 5), (1, 5)], "deadlock of 2 ranks"),
}


@pytest.mark.parametrize("fault", SEEDED)
def test_seeded_fault_is_refused(fault):
    old, new, places, said = SEEDED[fault]
    check(Table.parse(GOOD))
    assert old in GOOD
    table = Table.parse(GOOD.replace(old, new, 1))
    with pytest.raises(TableError, match=re.escape(said)) as caught:
        check(table)
    found = caught.value.faults[0]
    shown = found.cycle or [found.place]
    assert [place and (place.rank, place.line + 1) for place in shown] == places


def test_a_deadlock_is_told_with_ranks_and_lines():
    old, new, *_ = SEEDED["swapped messages"]
    with pytest.raises(TableError) as caught:
        check(replace(Table.parse(GOOD.replace(old, new)), name="mine"))
    assert str(caught.value).splitlines() == [
        "table mine on 2 ranks is refused:",
        "  deadlock of 2 ranks: rank 0 line 5 0SEND_F1 waits for the activation 0->1 of microbatch 1, which is taken "
        "by rank 1 line 6 1RECV_F1;",
        "    rank 1 line 5 1SEND_B0 waits for the gradient 1->0 of microbatch 0, which is taken by rank 0 line 6 "
        "0RECV_B0",
    ]


def test_a_value_that_nobody_sends():
    with pytest.raises(
        TableError, match="rank 1 line 6 1F1 uses the activation 0->1 of microbatch 1, which never comes"
    ):
        check(Table.parse(GOOD.replace("0SEND_F1 ", "").replace("1RECV_F1 ", "")))


def test_a_circle_of_three_ranks():
    """Each rank sends to the next before it receives: stages 0 1 2 0 1 2 0."""
    rows = [
        "0F0 0SEND_F0 0F1 0SEND_F1 3RECV_F0 3F0 3SEND_F0 3RECV_F1 3F1 3SEND_F1",
        "1RECV_F0 1F0 1SEND_F0 1RECV_F1 1F1 1SEND_F1 4RECV_F0 4F0 4SEND_F0 4RECV_F1 4F1 4SEND_F1",
        "2RECV_F0 2F0 2SEND_F0 2RECV_F1 2F1 2SEND_F1 5RECV_F0 5F0 5RECV_F1 5F1",
    ]
    text = "stages: 0 1 2 0 1 2\nmicrobatches: 2\n" + "\n".join(f"rank {rank}: {row}" for rank, row in enumerate(rows))
    check(Table.parse(text))
    waiting = text.replace("0F1 0SEND_F1 3RECV_F0 3F0 3SEND_F0", "3RECV_F0 3F0 3SEND_F0 0F1 0SEND_F1")
    waiting = waiting.replace("1SEND_F0 1RECV_F1 1F1 1SEND_F1", "1RECV_F1 1F1 1SEND_F0 1SEND_F1")
    [fault] = find_faults(Table.parse(waiting))
    assert sorted(place.rank for place in fault.cycle) == [0, 1, 2]
    assert fault.text.startswith("deadlock of 3 ranks: ")


def test_an_order_of_computations_that_cannot_be():
    """Without messages too: rank 0 wants a gradient before it gives the activation that it comes from."""
    table = Table.parse("stages: 0 1\nmicrobatches: 2\nrank 0: 0F0 0F1 0B1 0B0\nrank 1: 1F0 1B0 1F1 1B1")
    check(table)
    backwards = tuple(map(Action.parse, ["0F0", "0B0", "0F1", "0B1"]))
    stuck = replace(table, actions=(backwards, table.actions[1][2:] + table.actions[1][:2]))
    for refusing in (check, simulate, add_messages, prepare):
        with pytest.raises(TableError, match=r"deadlock of 2 ranks: rank 0 line 2 0B0 waits for the gradient 1->0"):
            refusing(stuck)


def test_a_budget():
    table = prepare(make_table("gpipe", 2, 4), budget=4)
    with pytest.raises(
        TableError, match=r"rank 1 line 8 1F3: 4 chunks are alive on rank 1, its budget is 2; take a sch"
    ):
        check(table, budget=[4, 2])
    with pytest.raises(TableError, match=r"rank 0 line \d+ 0F3: 4096 bytes are alive on rank 0, its budget is 4000"):
        check(table, budget=4000, sizes=Sizes(activations=1024))
    with pytest.raises(ValueError, match="budget of 3 ranks for a table of 2; give one number or all"):
        check(table, budget=[1, 2, 3])


def _deferred(table):
    """Receives directly before their use, as `defer_pp_recv` of torch.distributed.pipelining orders them."""
    rows = []
    for actions in table.actions:
        posted = {step.value: step for action in actions for step in action.steps if step.kind in RECEIVES}
        row = []
        for action in actions:
            if action.kind in RECEIVES:
                continue
            for step in action.steps if action.is_computed else ():
                if (value := table.needs(step)) in posted:
                    row.append(posted[value])
            row.append(action)
        rows.append(tuple(row))
    return replace(table, actions=tuple(rows))


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "gpipe"])
def test_receives_at_the_last_moment_are_refused(name):
    for ranks, count in ((2, 4), (4, 8)):
        [fault] = find_faults(_deferred(add_messages(make_table(name, ranks, count))))
        assert len(fault.cycle) >= 2, fault
        assert "deadlock" in str(fault)


def test_many_faults_are_counted():
    table = make_table("gpipe", 2, 8)
    with pytest.raises(TableError, match="and 11 more") as caught:
        check(replace(table, actions=(table.actions[0], ())))
    assert len(caught.value.faults) == 16


def test_a_batch_is_for_one_partner():
    table = Table.parse(
        "stages: 0 1 2\nmicrobatches: 1\nrank 0: 0F0 0SEND_F0\nrank 1: 1RECV_F0+1SEND_F0 1F0\nrank 2: 2RECV_F0 2F0"
    )
    assert "one batch of messages to ranks [0, 2]; batch those to one rank only" in str(find_faults(table)[0])


def test_a_message_within_a_rank():
    table = Table.parse("stages: 0 0\nmicrobatches: 1\nrank 0: 0F0 0SEND_F0 1RECV_F0 1F0")
    assert "rank 0 line 2 0SEND_F0: stages 0 and 1 are both on rank 0; remove it" in str(find_faults(table)[0])


def test_a_large_table_is_proven_in_a_second():
    table = add_messages(make_table("interleaved", 16, 64, 4))
    assert sum(map(len, table.actions)) > 24_000
    started = time.process_time()
    check(table)
    assert time.process_time() - started < 5, "0.5 s on an idle core"
    assert Action(Kind.F, 63, 63) in table.actions[15]
