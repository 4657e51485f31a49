"""Tables as data: their text, and the schedules for all numbers of ranks and microbatches."""

import doctest
import importlib
import pkgutil

import pytest

import hyper_parallel.core.pipeline_parallel as package
from hyper_parallel.core.pipeline_parallel.action import Action, Kind, Value
from hyper_parallel.core.pipeline_parallel.check import find_faults
from hyper_parallel.core.pipeline_parallel.prepare import prepare
from hyper_parallel.core.pipeline_parallel.stage_map import StageMap
from hyper_parallel.core.pipeline_parallel.table import Table
from hyper_parallel.core.pipeline_parallel.tables import SCHEDULES, forward_only, make_table
from tests.pipeline_parallel.transport import run_blocking, run_plainly

only_on = "torch"  # no framework takes part

# Which of few microbatches a schedule takes, on any number of ranks.
TAKES = {
    **dict.fromkeys(SCHEDULES, lambda ranks, count: True),
    **dict.fromkeys(("interleaved", "zb1p"), lambda ranks, count: count % max(1, count // ranks) == 0),
    "dual_pipe_v": lambda ranks, count: count >= 2 * ranks,
}


def test_examples_of_docstrings_run():
    own = [
        module.name
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
        if ".stages" not in module.name
    ]
    assert len(own) > 15
    done = [doctest.testmod(importlib.import_module(name)) for name in own]
    assert sum(one.failed for one in done) == 0
    assert sum(one.attempted for one in done) >= 6


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_number_of_ranks_and_microbatches(name):
    """Each one ends on a blocking transport with the numbers of a plain loop, or says what to take instead."""
    for ranks in (1, 2, 3, 4, 5):
        for count in (1, 2, 3, 4, 7, 8, 10):
            if not TAKES[name](ranks, count):
                with pytest.raises(ValueError, match=f"{name}: {count} microbatches do not work, .*; give "):
                    make_table(name, ranks, count)
                continue
            table = make_table(name, ranks, count)
            assert (table.name, table.num_ranks, table.microbatches) == (name, ranks, count)
            ready = prepare(table, batched=count % 2 == 0, sharded=True)
            if ranks == 3 or count < 3:
                assert run_blocking(ready) == run_plainly(table.stages.num_stages, count, True), (ranks, count)


@pytest.mark.parametrize("stages_per_rank", [1, 3])
@pytest.mark.parametrize("name", ["interleaved", "looped_bfs", "zb1p"])
def test_stages_per_rank(name, stages_per_rank):
    ready = prepare(make_table(name, 3, 6, stages_per_rank))
    assert ready.stages == StageMap.loop(3, stages_per_rank)
    assert run_blocking(ready) == run_plainly(3 * stages_per_rank, 6, True)


def test_block_of_the_v_schedules_is_found_for_many_ranks(sweep):
    for ranks in range(1, 33 if sweep else 10):
        for name in ("v_half", "v_min"):
            assert find_faults(make_table(name, ranks, 3)) == []


def test_forwards_alone():
    ready = prepare(forward_only(StageMap.v(3), 4))
    assert run_blocking(ready) == run_plainly(6, 4, False)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("interleaved", 4, 9),
            "interleaved: 9 microbatches do not work, they go in rounds .* at least 4.*; give 8 or 10",
        ),
        (("zb1p", 4, 13), "zb1p: 13 microbatches do not work, .*; give 12 or 15"),
        (("dual_pipe_v", 4, 7), "dual_pipe_v: 7 microbatches do not work, 4 ranks must be filled .*; give 8$"),
        (("gpipe", 4, 0), "gpipe: microbatches is 0; give at least 1"),
        (("zbv", 0, 4), "zbv: ranks is 0; give at least 1"),
        (("1f1b", 2, "4"), "1f1b: microbatches is '4'; give a number"),
        ((7, 2, 4), "a schedule is a name or a Table, got a int: 7"),
        (("zbb", 2, 4), "no schedule 'zbb'; there are gpipe, 1f1b, .*; did you mean zbv?"),
        (("zbv", 2, 4, 3), "zbv has 2 stages per rank, not 3; interleaved, looped_bfs and zb1p take any number"),
    ],
)
def test_what_a_schedule_does_not_take(arguments, said):
    with pytest.raises((ValueError, TypeError), match=said):
        make_table(*arguments)


@pytest.mark.parametrize("name", SCHEDULES)
def test_text_and_back(name):
    table = prepare(make_table(name, 3, 6), batched=True, sharded=True)
    again = Table.parse(str(table))
    assert again == table
    assert again.digest == table.digest
    assert make_table(name, 3, 8 if name not in ("interleaved", "zb1p") else 9).digest != table.digest


def test_text_of_actions():
    assert Action.parse("3SEND_B2").value == Value(2, False, 2)
    assert Action.parse("3RECV_B2").value == Value(3, False, 2)
    assert Action.parse("12REDUCE") == Action(Kind.REDUCE, 12)
    assert str(Action.parse("0SEND_F3+0RECV_B1")) == "0SEND_F3+0RECV_B1"


def test_tags_are_unique():
    values = [Value(*parts) for parts in ((b, d, k) for b in range(3) for d in (True, False) for k in range(4))]
    assert sorted(value.tag(4) for value in values) == list(range(24))


GOOD = "stages: 0 1\nmicrobatches: 1\nrank 0: 0F0 0B0\nrank 1: 1F0 1B0  # the loss\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            GOOD.replace("0B0", "0X0"),
            "line 3 of the text, rank 0 line 2: '0X0' is no action; allowed are F, B, I, W, SEND_F",
        ),
        (GOOD.replace("1B0", "1B"), "line 4 of the text, rank 1 line 2: '1B' has no microbatch; write 1B0"),
        (GOOD.replace("0B0", "0UNSHARD3"), "rank 0 line 2: '0UNSHARD3': weights serve all .* write 0UNSHARD"),
        (
            GOOD.replace("0F0 0B0", "0F0+0SEND_F0"),
            "rank 0 line 1: '0F0[+]0SEND_F0' cannot run at once: an OVERLAP is two",
        ),
        (
            GOOD.replace("rank 1", "rank 0"),
            "line 4 of the text: rank 0 is there twice; write all its actions behind one",
        ),
        (
            GOOD.replace("micro", "stages: 1 0\nmicro"),
            "line 2 of the text: 'stages:' is there twice; keep one of the lines",
        ),
        (
            GOOD.replace("rank 1: 1F0 1B0", ""),
            r"lie on 2 ranks, but the text has actions of \[0\]; write rank 0:, rank 1:",
        ),
        (GOOD.replace("stages: 0 1\n", ""), "the text has no line 'stages:'; write one such as 'stages: 0 1'"),
        (GOOD.replace("microbatches: 1\n", ""), "no line 'microbatches:'; write one such as 'microbatches: 4'"),
        (GOOD.replace(": 1\n", ": one\n"), "line 2 of the text: 'one' is no number of microbatches"),
        (
            GOOD.replace(": 1\n", ": 9999999999\n"),
            "has 9999999999 microbatches and 4 actions; every stage",
        ),
        (GOOD.replace("0 1", "0 2"), "line 1 of the text: stages 0 2: rank 1 has none; number the ranks from 0"),
        (GOOD.replace("0 1", "a b"), "line 1 of the text: 'a b' is no list of ranks; write stages: 0 1"),
        ("hello\n" + GOOD, "line 1 of the text: 'hello' belongs to no rank; allowed are name:, stages:, microbatches:"),
    ],
)
def test_mistakes_in_a_text(text, said):
    assert Table.parse(GOOD).num_ranks == 2
    with pytest.raises(ValueError, match=said):
        Table.parse(text)


def test_a_table_is_whole():
    with pytest.raises(ValueError, match="actions of 1 ranks, but the stages lie on 2; give each rank its list"):
        Table(StageMap.loop(2), 1, ((),))
    with pytest.raises(ValueError, match="0 microbatches; give at least 1"):
        Table(StageMap.loop(1), 0, ((),))
