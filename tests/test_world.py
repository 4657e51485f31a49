"""The test world: results, state between calls, `run_on_ranks`, and how it behaves inside a run of pytest."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy
import pytest

from hyper_parallel.platform import get_platform
from tests.world import RanksFailed, Worlds, run_on_ranks, small_or_sweep
from tests.world.frameworks import Framework
from tests.world.helpers import await_end, echo, gather_ranks, meet, my_rank

_ROOT = Path(__file__).resolve().parents[1]


# ---- A call that goes well ----


@pytest.mark.parametrize("world_size", small_or_sweep([1, 2, 3, 4, 8], [1, 2, 4]))
def test_results_come_by_rank(worlds, world_size):
    results = worlds(world_size).run(echo, 1, "two", three=[3.0])
    assert results == [(rank, world_size, (1, "two"), {"three": [3.0]}) for rank in range(world_size)]


@pytest.mark.parametrize("world_size", small_or_sweep([1, 2, 3, 4, 8], [1, 2, 4]))
def test_ranks_are_one_process_group(worlds, world_size):
    assert worlds(world_size).run(gather_ranks) == [list(range(world_size))] * world_size


def test_ranks_are_processes_that_stay(worlds):
    pids = worlds(2).run(os.getpid)
    assert len({os.getpid(), *pids}) == 3
    assert worlds(2).run(os.getpid) == pids
    assert not set(worlds(3).run(os.getpid)) & set(pids)


def test_large_values_pass(worlds):
    value = numpy.arange(1_000_000)
    for rank, result in enumerate(worlds(2).run(_plus_rank, value)):
        numpy.testing.assert_array_equal(result, value + rank)


def _plus_rank(value):
    return value + my_rank()


def test_ranks_are_forked_from_a_process_with_one_thread(worlds):
    assert worlds.nursery.start_method == ("fork" if worlds.framework.may_fork else "exec")


@pytest.mark.sweep
def test_ranks_can_be_new_interpreters(pytestconfig):
    worlds = Worlds(pytestconfig.getoption("--platform"), may_fork=False)
    try:
        assert worlds.nursery.start_method == "exec"
        assert worlds(2).run(gather_ranks) == [[0, 1], [0, 1]]
        with pytest.raises(RanksFailed, match="assert 1 == 5"):
            worlds(2).run(_differ)
    finally:
        worlds.close()


def _differ():
    assert my_rank() == 5


def test_environment_of_a_rank(worlds):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "HYPER_PARALLEL_PLATFORM", "OMP_NUM_THREADS")
    environments = worlds(2).run(_environment)
    for rank, environment in enumerate(environments):
        expected = [str(rank), str(rank), "2", "127.0.0.1", worlds.framework.name, "1"]
        assert [environment[name] for name in names] == expected
    assert environments[0]["MASTER_PORT"] == environments[1]["MASTER_PORT"]


def _environment():
    return dict(os.environ)


def test_a_call_leaves_no_state_to_the_next(worlds):
    before = worlds(2).run(_state)
    worlds(2).run(_change_state)
    assert worlds(2).run(_state) == before
    assert before[0][0] == before[1][0], "all ranks draw the same numbers until they are told not to"


def _state():
    settings = [os.environ.get("LEFT_BY_A_TEST"), os.getcwd(), warnings.filters[:]]
    numbers = [random.random(), numpy.random.rand()]
    if get_platform().platform_type.name == "PYTORCH":
        import torch

        numbers.append(torch.rand(()).item())
        settings += [torch.get_default_dtype(), torch.ones(1).device, torch.get_num_threads(), torch.is_grad_enabled()]
        settings += [torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled()]
    return numbers, list(map(str, settings))


def _change_state():
    os.environ["LEFT_BY_A_TEST"] = "1"
    del os.environ["MASTER_PORT"]
    os.chdir("/")
    warnings.simplefilter("error")
    random.seed(my_rank())
    if get_platform().platform_type.name == "PYTORCH":
        import torch

        torch.manual_seed(my_rank())
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_num_threads(2)
        torch.set_grad_enabled(False)
        torch.autograd.set_detect_anomaly(True)


# ---- The decorator ----


@run_on_ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [0, 5])
def test_body_runs_on_every_rank(dtype, size):
    assert dtype in ("float32", "bfloat16")
    assert size in (0, 5)
    assert gather_ranks() == list(range(int(os.environ["WORLD_SIZE"])))


@pytest.mark.parametrize(("first", "second"), [(1, 2)])
@run_on_ranks(2)
def test_parametrize_may_come_above(first, second):
    assert (first, second) == (1, 2)


class TestMethod:
    """A test of a class runs on every rank too."""

    factor = 2

    @run_on_ranks(2)
    @pytest.mark.parametrize("value", [3])
    def test_body_has_self(self, value):
        assert self.factor * value == 6


@run_on_ranks(2)
def test_fixtures_reach_the_ranks(tmp_path):
    (tmp_path / str(my_rank())).write_text("here")
    meet()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.parametrize("sizes", [(), (0,), ("2",), (my_rank,)])
def test_sizes_are_checked(sizes):
    with pytest.raises(TypeError, match=r"one or more world sizes, as in @run_on_ranks\(2, 4\)"):
        run_on_ranks(*sizes)


def test_worlds_inside_a_rank_is_refused():
    with pytest.raises(TypeError, match="cannot use the fixture `worlds`"):
        run_on_ranks(2)(lambda worlds: None)


# ---- Inside pytest ----

_SUITE = """
import os, pathlib, time
import pytest
from tests.world import run_on_ranks

@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@run_on_ranks(1, 2)
def test_above(dtype):
    pass

@run_on_ranks(1, 2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_below(dtype):
    pass

@run_on_ranks(2)
def test_fails():
    assert os.environ["RANK"] == 7

def _fail():
    raise ValueError("in a rank")

def test_direct(worlds):
    worlds(2).run(_fail)
"""

_HANGING_SUITE = """
import os, pathlib, time
from tests.world import run_on_ranks

def test_hangs(worlds):
    pathlib.Path("nursery.pid").write_text(str(worlds.nursery.pid))
    worlds(2).run(_hang)

def _hang():
    rank = os.environ["RANK"]
    pathlib.Path(rank + ".tmp").write_text(str(os.getpid()))
    pathlib.Path(rank + ".tmp").rename(rank + ".pid")
    time.sleep(1000)
"""


@pytest.fixture
def suite(pytester, monkeypatch):
    """A pytest run of its own in an empty folder, with the plugin of the worlds."""
    monkeypatch.setenv("PYTHONPATH", str(_ROOT))
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    pytester.makeconftest('pytest_plugins = ("tests.world.plugin",)')
    return pytester


def test_a_run_of_pytest(suite):
    suite.makepyfile(_SUITE)
    result = suite.runpytest_subprocess("-v")
    result.assert_outcomes(passed=8, failed=2)
    cases = [f"[world{size}-{dtype}]" for size in (1, 2) for dtype in ("float32", "bfloat16")]
    passed = {line.split("::")[1].split()[0] for line in result.outlines if "PASSED" in line}
    assert passed == {f"test_{name}{case}" for name in ("above", "below") for case in cases}
    result.stdout.fnmatch_lines(
        [
            "platform under test: *",
            "*_ test_fails[[]world2[]] _*",
            "test_a_run_of_pytest.test_fails failed in the world of 2: ranks 0-1 raised AssertionError",
            "---- ranks 0-1 raised AssertionError ---*",
            "Traceback (most recent call last):",
            '  File "*test_a_run_of_pytest.py", line *, in test_fails',
            '    assert os.environ["RANK"] == 7',
            "rank 0: AssertionError: assert '0' == 7",
            "rank 1: AssertionError: assert '1' == 7",
            "*_ test_direct _*",
            ">   *worlds(2).run(_fail)",
            "E   *RanksFailed: test_a_run_of_pytest._fail failed in the world of 2: ranks 0-1 raised ValueError",
            "E   *ValueError: in a rank",
            "FAILED test_a_run_of_pytest.py::test_fails[[]world2[]]*",
        ]
    )
    assert not [line for line in result.outlines if re.search(r"tests/world/\w+\.py", line)], "none of our own frames"


def test_one_world_size(suite):
    suite.makepyfile(_SUITE)
    result = suite.runpytest_inprocess("--collect-only", "-q", "--world-size=1")
    assert [line.split("::")[1] for line in result.outlines if "::" in line] == [
        f"test_{name}[world1-{dtype}]" for name in ("above", "below") for dtype in ("float32", "bfloat16")
    ]
    result.stdout.fnmatch_lines(["*4/10 tests collected (6 deselected)*"])


_LONG_SUITE = """
import pytest
from tests.world import run_on_ranks, small_or_sweep

@run_on_ranks(2, 4, sweep=(8,))
@pytest.mark.parametrize("number", [1, 2, 3])
def test_sizes(number):
    pass

@run_on_ranks(3)
def test_three():
    pass

@pytest.mark.sweep("mindspore")
def test_on_one():
    pass

@pytest.mark.parametrize("number", small_or_sweep([1, 2], [2]))
def test_small(number):
    pass
"""


@pytest.mark.parametrize("name", ["torch", "mindspore"])
def test_what_is_left_to_a_sweep(suite, monkeypatch, name):
    """See Note [What runs on MindSpore at every change]."""
    monkeypatch.setattr(Framework, "is_installed", True)
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", name)
    suite.makepyfile(_LONG_SUITE)

    def collected(*options):
        result = suite.runpytest_inprocess("--collect-only", "-q", f"--platform={name}", *options)
        return [line.split("::")[1] for line in result.outlines if "::" in line]

    on_torch = [f"test_sizes[world{size}-{number}]" for size in (2, 4) for number in (1, 2, 3)]
    on_torch += ["test_three[world3]", "test_on_one", "test_small[2]"]
    on_mindspore = ["test_sizes[world2-1]", "test_sizes[world2-3]", "test_small[2]"]
    assert sorted(collected()) == sorted(on_torch if name == "torch" else on_mindspore)
    assert len(collected("--sweep")) == 9 + 1 + 1 + 2


@pytest.mark.parametrize("name", ["torch", "mindspore"])
def test_platform_that_is_not_installed(suite, monkeypatch, name):
    monkeypatch.setattr(Framework, "is_installed", False)
    result = suite.runpytest_inprocess(f"--platform={name}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        [f'ERROR: --platform={name}: {name} is not installed; pip install "hyper-parallel[[]{name}]"']
    )


def test_platform_that_does_not_exist(suite, monkeypatch):
    monkeypatch.setenv("HYPER_PARALLEL_PLATFORM", "abacus")
    result = suite.runpytest_inprocess()
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: HYPER_PARALLEL_PLATFORM=abacus: must be one of torch, mindspore"])
    assert suite.runpytest_inprocess("--platform=abacus").ret == pytest.ExitCode.USAGE_ERROR


@pytest.mark.sweep
def test_nothing_is_left_when_pytest_ends(suite):
    suite.makepyfile(_HANGING_SUITE)
    ends = {signal.SIGINT: pytest.ExitCode.INTERRUPTED, signal.SIGKILL: -signal.SIGKILL}
    runs = {}
    try:
        for number in ends:
            folder = suite.mkdir(number.name)
            command = [sys.executable, "-m", "pytest", "-q", str(suite.path)]
            runs[number] = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 240
        pids = {number: _await_pids(suite.path / number.name, run, deadline) for number, run in runs.items()}
    finally:
        for number, run in runs.items():
            run.send_signal(number)
    for number, run in runs.items():
        assert run.wait(timeout=120) == ends[number]
        await_end(pids[number])


def _await_pids(folder, run, deadline):
    """The processes of a hanging suite, once they all run."""
    files = [folder / f"{name}.pid" for name in ("nursery", "0", "1")]
    while not all(file.exists() for file in files):
        assert run.poll() is None, "pytest has ended before it was told to"
        assert time.monotonic() < deadline, "the ranks have not come up"
        time.sleep(0.02)
    return [int(file.read_text()) for file in files]
