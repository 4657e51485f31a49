"""The test world when a call hangs, crashes, raises or cannot be pickled: what it says, and that it recovers."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import threading
import time

import pytest

from tests.world import RanksFailed
from tests.world.helpers import await_end, echo, gather_ranks, meet, my_rank
from tests.world.world import busyness


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch):
    monkeypatch.setattr("tests.world.world.GRACE", 1.0)


# ---- A call that fails ----


def _fail_and_replace(worlds, world_size, function, *args, timeout=100.0):
    """The failure of a call, after making sure that its ranks are gone and that new ones serve the next call."""
    pids = worlds(world_size).run(os.getpid)
    with pytest.raises(RanksFailed) as caught:
        worlds(world_size, timeout).run(function, *args)
    for pid in pids:
        with pytest.raises(ProcessLookupError):  # Not even a zombie is left.
            os.kill(pid, 0)
    assert not set(worlds(world_size).run(os.getpid)) & set(pids)
    assert worlds(world_size).run(gather_ranks) == [list(range(world_size))] * world_size
    return str(caught.value)


def _hang_on_rank_1():
    if my_rank() == 1:
        time.sleep(1000)
    meet()


def test_hang(worlds):
    started = time.monotonic()
    message = _fail_and_replace(worlds, 4, _hang_on_rank_1, timeout=2.0 * busyness())
    assert time.monotonic() - started < 100
    assert re.match(
        r"tests.world.test_failures._hang_on_rank_1 failed in the world of 4: ranks 0-3 had not answered after \d",
        message,
    )
    blocked, asleep = re.findall(r"^---- (ranks? [\d, -]+) had not answered", message, flags=re.MULTILINE)
    assert (blocked, asleep) == ("ranks 0, 2-3", "rank 1")
    assert message.count(" in _hang_on_rank_1") == 2, "equal stacks are shown once"
    assert " in meet" in message
    assert "worker.py" not in message, "the stack ends at the test"


def _hold_the_interpreter_on_rank_0():
    if my_rank() == 0:
        sum(itertools.repeat(0))  # A loop in C that never lets another thread run, nor a Python signal handler.
    meet()


@pytest.mark.sweep
def test_hang_that_holds_the_interpreter(worlds):
    message = _fail_and_replace(worlds, 2, _hold_the_interpreter_on_rank_0, timeout=2.0 * busyness())
    assert "ranks 0-1 had not answered" in message
    assert message.count(" in _hold_the_interpreter_on_rank_0") == 2


def _hang_in_two_threads():
    thread = threading.Thread(target=_wait_in_a_thread, daemon=True)
    thread.start()
    thread.join()


def _wait_in_a_thread():
    threading.Event().wait()


def test_stacks_show_all_threads(worlds):
    message = _fail_and_replace(worlds, 2, _hang_in_two_threads, timeout=2.0 * busyness())
    assert " in _wait_in_a_thread" in message
    assert " in _hang_in_two_threads" in message
    assert message.count(" in _hang_in_two_threads") == 1, "thread ids do not keep equal stacks apart"


def _stop_rank_1():
    if my_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.sweep
def test_rank_that_cannot_give_its_stack(worlds, monkeypatch):
    monkeypatch.setattr("tests.world.world._STACK_TIMEOUT", 0.5)
    message = _fail_and_replace(worlds, 2, _stop_rank_1, timeout=2.0 * busyness())
    assert "rank 1 had not answered after" in message
    assert "no stack: the process did not react to the signal that asks for it" in message


def _end_rank_1(how):
    print("before the end")
    if my_rank() == 1:
        os._exit(how) if how >= 0 else os.kill(os.getpid(), -how)
    meet()


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (-signal.SIGKILL, "rank 1 was killed by SIGKILL"),
        (-signal.SIGSEGV, "rank 1 was killed by SIGSEGV"),
        (-signal.SIGRTMIN, f"rank 1 was killed by {signal.SIGRTMIN.name}"),
        (3, "rank 1 exited with code 3"),
        (0, "rank 1 exited with code 0"),
    ],
)
def test_death(worlds, how, said):
    message = _fail_and_replace(worlds, 4, _end_rank_1, how)
    assert message.startswith(f"tests.world.test_failures._end_rank_1 failed in the world of 4: {said}")
    section = message.split(f"---- {said}")[1].split("----\n")[1]
    if how == -signal.SIGSEGV:
        assert section.startswith("Fatal Python error: Segmentation fault")
        assert " in _end_rank_1" in section
    else:
        assert section.startswith("no stack was left")
    # The others are woken by the broken connection, or are shown where they wait for it.
    others = message.split("\n")[0].split(said)[1]
    assert re.search("raised (Runtime|Communication)Error", others) or "had not answered" in others
    assert " in meet" in message
    assert message.split("---- ranks 0-3 printed -")[1].splitlines()[1:] == ["before the end"]


def _die_with_a_child_left():
    if my_rank() == 0:
        if os.fork() == 0:
            time.sleep(1000)
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.sweep
def test_death_of_a_rank_with_child_processes(worlds):
    started = time.monotonic()
    message = _fail_and_replace(worlds, 2, _die_with_a_child_left)
    assert "rank 0 was killed by SIGKILL" in message
    assert time.monotonic() - started < 100, "the child, which holds the dead rank's connection, is not waited for"


def _die_after_the_answer():
    if my_rank() == 1:
        threading.Timer(0.2, os._exit, [7]).start()


def test_death_between_calls(worlds):
    pids = worlds(2).run(os.getpid)
    worlds(2).run(_die_after_the_answer)
    assert worlds.nursery.await_exit(pids[1], time.monotonic() + 100) == 7
    with pytest.warns(
        UserWarning, match="after tests.world.test_failures._die_after_the_answer had ended: rank 1 exited with code 7"
    ):
        assert not set(worlds(2).run(os.getpid)) & set(pids)


@pytest.mark.sweep
def test_death_of_the_nursery(worlds):
    pids = worlds(2).run(os.getpid)
    os.kill(worlds.nursery.pid, signal.SIGKILL)
    time.sleep(0.2)
    with pytest.warns(UserWarning, match="The process that starts the ranks of the test worlds ended with code -9"):
        assert not set(worlds(2).run(os.getpid)) & set(pids)
    await_end(pids)


# ---- A call that raises ----


def _raise_on_rank_1():
    if my_rank() == 1:
        raise ValueError("this rank has had enough")
    meet()


def test_raise_on_one_rank(worlds):
    message = _fail_and_replace(worlds, 4, _raise_on_rank_1)
    assert re.match(
        r"tests.world.test_failures._raise_on_rank_1 failed in the world of 4: "
        r"rank 1 raised ValueError; ranks 0, 2-3 had not answered after \d\.\d s",
        message,
    )
    section = message.split("---- rank 1 raised ValueError -")[1].split("\n----")[0].splitlines()[1:]
    assert section[0] == "Traceback (most recent call last):"
    assert section[1].endswith("in _raise_on_rank_1"), "the traceback begins at the test"
    assert section[-1] == "ValueError: this rank has had enough"
    assert message.index("rank 1 raised") < message.index("ranks 0, 2-3 had not answered")
    assert message.count(" in meet") == 1


def _raise_on_all():
    raise ValueError("all the same") from KeyError("why")


def _differ():
    assert my_rank() == 5


def test_equal_tracebacks_are_shown_once(worlds):
    message = _fail_and_replace(worlds, 4, _raise_on_all)
    assert "ranks 0-3 raised ValueError" in message
    assert message.count("ValueError: all the same") == 1
    assert message.count("KeyError: 'why'") == 1
    assert message.count(" in _raise_on_all") == 1


def test_messages_that_differ_are_told_apart(worlds):
    message = _fail_and_replace(worlds, 2, _differ)
    assert message.count("Traceback") == 1
    assert "rank 0: AssertionError: assert 0 == 5" in message, "asserts explain themselves"
    assert "rank 1: AssertionError: assert 1 == 5" in message


def _exit_on_rank_0():
    if my_rank() == 0:
        sys.exit(3)


def test_sys_exit_is_a_failure(worlds):
    message = _fail_and_replace(worlds, 2, _exit_on_rank_0)
    assert "rank 0 raised SystemExit" in message
    assert "SystemExit: 3" in message


def _print_and_raise():
    print(f"rank {my_rank()} in Python")
    os.write(2, b"below Python\n")
    raise ValueError("see above")


def test_output_is_shown_by_rank(worlds, capfd):
    worlds(2).run(print, "of a call that passes")
    message = _fail_and_replace(worlds, 2, _print_and_raise)
    for rank in range(2):
        printed = message.split(f"---- rank {rank} printed -")[1].split("\n----")[0].splitlines()[1:]
        assert printed == [f"rank {rank} in Python", "below Python"]
    assert "of a call that passes" not in message
    assert capfd.readouterr() == ("", "")


def _print_much():
    for number in range(10_000):
        print(number)
    raise ValueError("too much")


def test_long_output_is_cut_at_the_front(worlds):
    message = _fail_and_replace(worlds, 1, _print_much)
    assert len(message) < 25_000
    assert message.endswith("\n9998\n9999")


# ---- What cannot be pickled ----


class _Unloadable:
    def __reduce__(self):
        return int, ("not a number",)


def _return_lock_on_rank_1():
    return threading.Lock() if my_rank() == 1 else 0


def test_unpicklable_result(worlds):
    message = _fail_and_replace(worlds, 2, _return_lock_on_rank_1)
    assert "rank 1 raised TypeError" in message
    assert "_return_lock_on_rank_1 returned a lock that cannot be sent to the pytest process" in message


def test_result_that_cannot_be_loaded(worlds):
    with pytest.raises(
        TypeError, match=r"the result of tests.world.test_failures._Unloadable on rank 0 was sent but cannot"
    ):
        worlds(2).run(_Unloadable)
    assert worlds(2).run(gather_ranks) == [[0, 1], [0, 1]]


@pytest.mark.parametrize(
    ("args", "kwargs", "name"), [([1, threading.Lock()], {}, "1"), ([], {"key": threading.Lock()}, "'key'")]
)
def test_unpicklable_argument(worlds, args, kwargs, name):
    pids = worlds(2).run(os.getpid)
    with pytest.raises(TypeError, match=f"argument {name} of echo, a lock, cannot be sent to the ranks: cannot pickle"):
        worlds(2).run(echo, *args, **kwargs)
    assert worlds(2).run(os.getpid) == pids


def test_argument_that_cannot_be_loaded(worlds):
    message = _fail_and_replace(worlds, 2, echo, _Unloadable())
    assert "ranks 0-1 raised ValueError" in message
    assert "invalid literal for int()" in message


def test_functions_without_a_name_of_their_own(worlds):
    def local():
        pass

    for function in (local, lambda: None):
        with pytest.raises(TypeError, match="write a function at the top level of a module"):
            worlds(2).run(function)


def test_a_world_has_a_rank(worlds):
    with pytest.raises(ValueError, match="at least 1 rank, not 0"):
        worlds(0)


# ---- Skipping ----


def _skip(ranks):
    if my_rank() in ranks:
        pytest.skip("not today")


def test_skip_on_all_ranks(worlds):
    with pytest.raises(pytest.skip.Exception, match="not today"):
        worlds(2).run(_skip, [0, 1])


def test_skip_on_one_rank_is_a_failure(worlds):
    message = _fail_and_replace(worlds, 2, _skip, [1])
    assert "pytest.skip('not today'), which other ranks did not call" in message
