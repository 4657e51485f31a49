"""The simulator against what the papers say: bubble, idle times and memory as formulas of ranks and times."""

import itertools

import pytest

from hyper_parallel.core.pipeline_parallel.memory import Sizes, peaks
from hyper_parallel.core.pipeline_parallel.messages import add_messages
from hyper_parallel.core.pipeline_parallel.simulate import Times, simulate
from hyper_parallel.core.pipeline_parallel.stage_map import StageMap
from hyper_parallel.core.pipeline_parallel.table import Table
from hyper_parallel.core.pipeline_parallel.tables import SCHEDULES, forward_only, make_table
from tests.world import small_or_sweep

only_on = "torch"  # no framework takes part

TIMES = [(1, 1, 1), (1, 1.2, 0.8), (2, 3, 1.5)]
SIZES = [(ranks, rounds * ranks) for ranks in (2, 3, 4, 8) for rounds in (1, 2, 4) if ranks * rounds < 32]


def _about(value):
    return pytest.approx(value, abs=1e-9)


def _chunks(table):
    return [peak.size for peak in peaks(table)]


def _cases(sizes=SIZES):
    for (p, m), (f, i, w) in itertools.product(sizes, TIMES):
        yield p, m, f, i, w, Times(f, i, w)


def test_gpipe_and_1f1b():
    for p, m, f, i, w, times in _cases([*SIZES, (4, 1), (4, 3), (8, 5)]):
        for name in ("gpipe", "1f1b"):
            table = make_table(name, p, m)
            line = simulate(table, times)
            assert line.extra == _about((p - 1) * (f + i + w)), (name, p, m)
            assert line.makespan == _about((m + p - 1) * (f + i + w))
            assert line.bubble == _about((p - 1) / (m + p - 1))
            assert _chunks(table) == [m if name == "gpipe" else min(m, p - r) for r in range(p)]


@pytest.mark.parametrize("v", small_or_sweep([1, 2, 3, 4], [1, 3]))
def test_interleaved_and_breadth_first(v):
    for p, m, f, i, w, times in _cases():
        table = make_table("interleaved", p, m, v)
        assert simulate(table, times).extra == _about((p - 1) * (f + i + w) / v), (p, m)
        assert _chunks(table) == [min(v * m, (v - 1) * p + 2 * (p - 1 - r) + 1) for r in range(p)]
        table = make_table("looped_bfs", p, m, v)
        assert simulate(table, times).extra == _about((p - 1) * (f + i + w) / v), (p, m)
        assert _chunks(table) == [v * m] * p


def test_zb_h1():
    for p, m, f, i, w, times in _cases():
        table = make_table("zb_h1", p, m)
        line = simulate(table, times)
        assert line.extra == _about((p - 1) * (f + i - w)), (p, m)
        assert line.idle_inside == _about(tuple((p - 1 - r) * (f + i - w) for r in range(p)))
        assert _chunks(table) == [p] * p


def test_zb_h2():
    for p, m, f, i, w, times in _cases([(p, m) for p, m in SIZES if m >= 2 * p - 1]):
        table = make_table("zb_h2", p, m)
        line = simulate(table, times)
        assert line.extra == _about(max((p - 1) * f, (p - 1) * (f + i - 2 * w))), (p, m)
        assert line.idle_inside == _about(tuple((p - 1 - r) * max(0, f + i - 2 * w) for r in range(p)))
        assert _chunks(table) == [2 * p - 1] * p


@pytest.mark.parametrize("v", small_or_sweep([1, 2, 3], [2]))
def test_zb1p(v):
    for p, m, f, i, w, times in _cases([(p, m) for p, m in SIZES if m >= 2 * p]):
        table = make_table("zb1p", p, m, v)
        assert simulate(table, times).extra == _about((p - 1) * (f + i - w) / v), (p, m, f, i, w)
        assert _chunks(table) == [v * p] * p


def test_zbv():
    for p, m in [(p, m) for p, m in SIZES if m >= 2 * p - 1]:
        table = make_table("zbv", p, m)
        alike = simulate(table, Times(1, 1, 1))
        assert alike.extra == _about((p - 1) / 2)
        assert alike.idle_inside == _about((0,) * p)
        uneven = simulate(table, Times(1, 1.2, 0.8))
        assert uneven.extra == _about((p - 1) * 1.2 / 2)
        assert max(uneven.idle_inside) == _about((p - 1) * 0.4)
        assert _chunks(table) == [2 * p] * p


def test_dual_pipe_v():
    for p, m, f, i, w, times in _cases([(p, m) for p, m in SIZES if m >= 2 * p]):
        table = make_table("dual_pipe_v", p, m)
        extra = simulate(table, times).extra
        bound = (p - 1) * ((f + i + w) + (i + w) - 3 * w) / 2
        assert extra <= bound + 1e-9, (p, m)
        if f == i == w:
            assert extra == _about(bound)
        assert _chunks(table) == [2 * p + 1] * p
        both = simulate(table, Times(f, i, w, overlap=0.9 * (f + i + w)))
        assert both.makespan < simulate(table, times).makespan


@pytest.mark.parametrize(("name", "most_bubble", "most_chunks"), [("v_half", 0.62, 11), ("v_min", 0.65, 8)])
def test_little_memory(name, most_bubble, most_chunks):
    for p, m in ((4, 8), (4, 16), (8, 16), (8, 32)):
        table = make_table(name, p, m)
        extra = simulate(table, Times(1, 1, 1)).extra
        assert extra / simulate(make_table("1f1b", p, m), Times(1, 1, 1)).extra <= most_bubble
        if p == 8:  # 1F1B has 2p chunks of this size on rank 0.
            assert max(_chunks(table)) == most_chunks <= 0.75 * 2 * p


@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_cost_nothing_where_they_take_no_time(name):
    for p, m in ((2, 4), (4, 8), (3, 12)):
        for times in TIMES:
            table = make_table(name, p, m)
            placed = add_messages(table, Times(*times))
            assert simulate(placed, Times(*times)).makespan == _about(simulate(table, Times(*times)).makespan)
            assert (
                simulate(placed, Times(*times), blocking=True).makespan
                >= simulate(table, Times(*times)).makespan - 1e-9
            )


def test_messages_take_their_time():
    """One microbatch through p stages and back, by hand."""
    table = make_table("gpipe", 4, 1)
    line = simulate(table, Times(1, 1.2, 0.8, message=0.25))
    assert line.makespan == _about(4 * 3 + 6 * 0.25)
    for blocking in (False, True):
        assert simulate(add_messages(table), Times(1, 1.2, 0.8, 0.25), blocking).makespan == _about(13.5)


def test_stages_that_differ():
    """The busiest stage sets the pace: F only, 5 microbatches, the second of three stages twice as long."""
    line = simulate(forward_only(StageMap.loop(3), 5), Times(1, 1, 1, stages=(1, 2, 1)))
    assert line.makespan == _about(1 + 5 * 2 + 1)
    assert line.busy == _about((5, 10, 5))
    with pytest.raises(ValueError, match="times of 2 stages for a table of 3; give all"):
        simulate(forward_only(StageMap.loop(3), 5), Times(stages=(1, 2)))


def test_bytes_alive():
    """By hand: two ranks, two microbatches, 100 bytes saved by F, 60 kept for W, messages of 7, weights of 1000."""
    table = Table.parse(
        """
        stages: 0 1
        microbatches: 2
        rank 0: 0UNSHARD 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0I0 0RECV_B1 0I1 0W0 0W1 0RESHARD
        rank 1: 1RECV_F0 1F0 1I0 1SEND_B0 1RECV_F1 1F1 1I1 1SEND_B1 1W0 1W1
        """
    )
    sizes = Sizes(activations=100, kept=60, message=7, weights=(1000, 0))
    first, second = peaks(table, sizes)
    assert (first.size, first.place) == (1000 + 100 + 100 + 7, (0, 3))  # 0F1, whose output is not sent yet
    assert (second.size, second.place) == (60 + 100 + 7, (1, 6))  # 1I1: kept of 0, saved of 1, the gradient it makes
    assert [peak.size for peak in peaks(table)] == [2, 2]
    with pytest.raises(ValueError, match="sizes: weights has 3 numbers for 2 stages; give one or all"):
        peaks(table, Sizes(weights=(1, 2, 3)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1,2", "times '1,2': write forward, input gradient, weight gradient"),
        ("a,b,c", "times 'a,b,c': write forward"),
        ("1,-1,1", "times: input_gradient is -1.0; give a number of at least 0"),
        ("1,inf,1", "times: input_gradient is inf"),
    ],
)
def test_times_that_are_none(text, said):
    assert Times.parse("1,1.2,.8,.1") == Times(1, 1.2, 0.8, 0.1)
    with pytest.raises(ValueError, match=said):
        Times.parse(text)
