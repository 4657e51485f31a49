"""The passes over tables: messages on one line, folded neighbours, gathers and reductions."""

import pytest

from hyper_parallel.core.pipeline_parallel.action import MESSAGES, SENDS, Action, Kind
from hyper_parallel.core.pipeline_parallel.check import check
from hyper_parallel.core.pipeline_parallel.folding import batch_messages, fold_backward
from hyper_parallel.core.pipeline_parallel.memory import Sizes, peaks
from hyper_parallel.core.pipeline_parallel.messages import add_messages
from hyper_parallel.core.pipeline_parallel.prepare import prepare
from hyper_parallel.core.pipeline_parallel.sharding import add_sharding
from hyper_parallel.core.pipeline_parallel.simulate import Times, simulate
from hyper_parallel.core.pipeline_parallel.table import Table
from hyper_parallel.core.pipeline_parallel.tables import SCHEDULES, make_table
from tests.pipeline_parallel.transport import run_blocking, run_plainly

only_on = "torch"  # no framework takes part


def _steps(table, rank=None):
    return [step for where, _, action in table if rank in (None, where) for step in action.steps]


@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_are_added_and_nothing_else_moves(name):
    table = make_table(name, 4, 8)
    for times in (Times(1, 1, 1), Times(), Times(2, 3, 1.5, 0.3), Times(stages=[1 + stage % 3 for stage in range(8)])):
        if times.stages is not None and table.stages.num_stages != 8:
            continue
        placed = add_messages(table, times)
        check(placed)
        rows = tuple(tuple(action for action in row if not action.is_message) for row in placed.actions)
        assert rows == table.actions
        crossing = (
            2
            * 8
            * sum(one != other for one, other in zip(table.stages.rank_of, table.stages.rank_of[1:], strict=False))
        )
        messages = [step for step in _steps(placed) if step.kind in MESSAGES]
        assert len(messages) == len(set(messages)) == 2 * crossing
        tags = [step.value.tag(8) for step in messages if step.kind in SENDS]
        assert len(set(tags)) == crossing


def test_a_receive_stands_at_most_one_action_before_its_data():
    """Whoever posts it goes on with one computation at most before what was sent could be used."""
    table = add_messages(make_table("1f1b", 4, 8), Times())
    spans = {span.place: span for row in simulate(table, Times()).spans for span in row}
    for rank, row in enumerate(table.actions):
        for line, action in enumerate(row):
            if action.kind is Kind.RECV_F:
                made = next(
                    span.end
                    for span in spans.values()
                    if span.action == Action(Kind.F, action.stage - 1, action.microbatch)
                )
                before = [span for place, span in spans.items() if place.rank == rank and place.line < line]
                assert max((span.end for span in before), default=0.0) <= made + 1e-9


def test_backward_is_folded_where_nobody_waits():
    table = make_table("zbv", 4, 8)
    folded = fold_backward(table)
    assert {step.stage for step in _steps(folded) if step.kind is Kind.B} == {0}
    assert simulate(folded).makespan == pytest.approx(simulate(table).makespan)
    everywhere = fold_backward(table, everywhere=True)
    assert {step.stage for step in _steps(everywhere) if step.kind is Kind.B} == set(range(8))
    assert simulate(everywhere).makespan > simulate(table).makespan + 1
    for one in (folded, everywhere):
        check(one)


def test_batches_are_the_same_at_both_ends():
    for name in SCHEDULES:
        table = batch_messages(add_messages(make_table(name, 4, 8)))
        check(table)
        batches = [
            frozenset(step.value for step in action.parts)
            for _, _, action in table
            if action.is_message and action.parts
        ]
        assert all(batches.count(batch) == 2 for batch in batches)
    assert batches, "dual_pipe_v has some"
    assert run_blocking(table) == run_plainly(8, 8, True)


def test_weights_are_gathered_once_and_reduced_once():
    for name in SCHEDULES:
        table = prepare(make_table(name, 4, 8), sharded=True)
        for kind in (Kind.UNSHARD, Kind.REDUCE, Kind.RESHARD):
            stages = [step.stage for step in _steps(table) if step.kind is kind]
            assert sorted(stages) == list(range(table.stages.num_stages)), (name, kind)


def test_gathers_are_one_action_ahead_and_reductions_behind_the_messages():
    table = add_sharding(add_messages(make_table("looped_bfs", 2, 2)))
    assert " ".join(map(str, table.actions[1])) == (
        "1UNSHARD 1RECV_F0 1F0 1RECV_F1 1SEND_F0 3UNSHARD 1F1 1SEND_F1 3RECV_F0 3F0 3RECV_F1 3F1 3B0 3SEND_B0 3B1 "
        "1RECV_B0 3SEND_B1 3REDUCE 3RESHARD 1B0 1SEND_B0 1RECV_B1 1B1 1SEND_B1 1REDUCE 1RESHARD"
    )


def test_fewer_gathered_at_a_time():
    table = add_messages(make_table("interleaved", 2, 4, 4))
    sizes = Sizes(activations=0, weights=1)
    for keep in (1, 2, 3, None):
        sharded = add_sharding(table, keep)
        check(sharded)
        assert max(peak.size for peak in peaks(sharded, sizes)) == (keep or 4)
    gathers = [sum(step.kind is Kind.UNSHARD for step in _steps(add_sharding(table, keep))) for keep in (1, 2, 3, 4)]
    assert gathers == sorted(gathers, reverse=True)
    assert gathers[-1] == 8


def test_each_microbatch_reduced():
    table = prepare(make_table("zb_h1", 2, 4), sharded=True, reduce_each=True)
    reduced = [step for step in _steps(table) if step.kind is Kind.REDUCE]
    assert sorted(map(str, reduced)) == [f"{stage}REDUCE{one}" for stage in (0, 1) for one in range(4)]


def test_passes_refuse_what_they_have_done():
    table = add_messages(make_table("1f1b", 2, 2))
    with pytest.raises(ValueError, match="table 1f1b has messages already; add them to computations only"):
        add_messages(table)
    sharded = add_sharding(make_table("1f1b", 2, 2))
    with pytest.raises(ValueError, match="has UNSHARD, RESHARD or REDUCE already; add them once"):
        add_sharding(sharded)
    with pytest.raises(ValueError, match="table 1f1b has 0UNSHARD; place UNSHARD and REDUCE behind the messages"):
        add_messages(sharded)
    with pytest.raises(ValueError, match="keep is 0; at least the stage that computes must be gathered"):
        add_sharding(table, keep=0)
    with pytest.raises(ValueError, match=r"keep is 1, but .* computes 2 stages at once; give 2"):
        add_sharding(add_messages(make_table("dual_pipe_v", 2, 4)), keep=1)


def test_messages_by_hand_are_kept():
    text = "stages: 0 1\nmicrobatches: 1\nrank 0: 0F0 0SEND_F0 0RECV_B0 0B0\nrank 1: 1RECV_F0 1F0 1B0 1SEND_B0"
    assert prepare(Table.parse(text)) == Table.parse(text)
