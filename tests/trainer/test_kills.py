"""Kills and signals to runs of real processes: nothing hangs, nothing is lost, the cause is on top."""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

from hyper_parallel.checkpoint import latest
from tests.trainer.processes import Run
from tests.world import small_or_sweep

only_on = "torch"  # the launcher and the loop are the same on both; a run on MindSpore is in test_mindspore_runs.py


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    with Run(tmp_path_factory.mktemp("undisturbed"), nproc=1) as run:
        status, out, err = run.end()
        assert status == 0, out + err
        losses = run.losses()
    assert list(losses) == list(range(1, 61))
    return losses


def test_a_killed_rank_ends_the_others_and_a_second_run_goes_on(tmp_path, undisturbed):
    with Run(tmp_path, "parallel.tp=2") as run:
        run.wait_for_step(15)
        os.kill(run.ranks()[1], signal.SIGKILL)
        begin = time.monotonic()
        status, _, err = run.end()
        assert time.monotonic() - begin < 10
    assert status == 1
    assert "rank 1 was ended by SIGKILL" in err.splitlines()[0], err
    assert latest(tmp_path / "run" / "checkpoints").name in ("step-10", "step-20", "step-30", "step-40", "step-50")
    with Run(tmp_path) as run:  # dp_shard 2
        status, out, err = run.end()
        assert status == 0, out + err
        assert run.losses() == pytest.approx(undisturbed, rel=1e-9)


def test_a_killed_rank_is_restarted_to_the_same_curve(tmp_path, undisturbed):
    with Run(tmp_path, "parallel.tp=2", restarts=2) as run:
        run.wait_for_step(25)
        os.kill(run.ranks()[0], signal.SIGKILL)
        status, out, err = run.end()
        assert status == 0, out + err
        assert "attempt 2 of 3" in err
        assert run.losses() == pytest.approx(undisturbed, rel=1e-9)


@pytest.mark.parametrize("to", ["the launcher", "a rank"])
def test_sigterm_saves_and_the_run_goes_on(tmp_path, undisturbed, to):
    with Run(tmp_path, "parallel.tp=2", every=0) as run:
        run.wait_for_step(12)
        os.kill(run.process.pid if to == "the launcher" else run.ranks()[1], signal.SIGTERM)
        status, out, err = run.end()
        assert status == 143, out + err
        step = run.events("end")[0]["step"]
        assert 12 <= step < 60
        assert latest(tmp_path / "run" / "checkpoints").name == f"step-{step}"
        assert f"saved step {step}" in out
    with Run(tmp_path, nproc=1, every=0) as run:
        assert run.end()[0] == 0
        assert run.losses() == pytest.approx(undisturbed, rel=1e-9)


def test_ctrl_c_saves_too(tmp_path):
    with Run(tmp_path, nproc=1, every=0) as run:
        run.wait_for_step(5)
        os.kill(run.process.pid, signal.SIGINT)
        status, out, err = run.end()
    assert status == 130, out + err
    assert latest(tmp_path / "run" / "checkpoints") is not None


def test_a_signal_during_evaluation_is_heard_at_once(tmp_path):
    evaluates = ("eval.every=1", "eval.samples=1000000", "data.validation=0.5")
    with Run(tmp_path, *evaluates, every=0) as run:
        run.wait_for(lambda: run.events("start"))
        time.sleep(1.0)  # inside of an evaluation of 100,000 batches
        os.kill(run.ranks()[0], signal.SIGTERM)
        status, out, err = run.end(timeout=20)
    assert status == 143, out + err
    assert latest(tmp_path / "run" / "checkpoints").name == "step-1"


@pytest.mark.parametrize("delay", small_or_sweep([0.1, 0.6, 1.5], [0.6]))
def test_a_signal_during_the_start_ends_it(tmp_path, delay):
    """Before Python has read the program, while frameworks are read, or while the ranks meet."""
    with Run(tmp_path, "parallel.tp=2") as run:
        run.wait_for(lambda: len(run.ranks()) == 2)
        time.sleep(delay)
        os.kill(run.process.pid, signal.SIGTERM)
        status, out, err = run.end(timeout=20)
    assert status == 143, out + err
    assert "Traceback" not in err


def test_a_signal_while_data_is_prepared_ends_it(tmp_path):
    text = tmp_path / "text"
    text.mkdir()
    for number in range(20000):
        (text / f"{number}.txt").write_text("a b c\n")
    data = ('data.kind="text"', f'data.path="{text}"', f'data.cache="{tmp_path / "cache"}"')
    with Run(tmp_path / "job", *data, "parallel.tp=2") as run:
        run.wait_for(lambda: (tmp_path / "cache").is_dir() and list((tmp_path / "cache").iterdir()))
        os.kill(run.process.pid, signal.SIGTERM)
        status, out, err = run.end(timeout=30)
    assert status == 143, out + err
    assert "stopped by SIGTERM before a step was made" in out
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith("text-")]


def test_a_signal_in_a_save_is_heard_behind_it(tmp_path):
    with Run(tmp_path, "checkpoint.background=false", every=1) as run:
        run.wait_for_step(3)
        os.kill(run.process.pid, signal.SIGTERM)
        status, out, err = run.end()
        assert status == 143, out + err
        assert latest(tmp_path / "run" / "checkpoints").name == f"step-{run.events('end')[0]['step']}"


def test_a_limit_of_time_saves(tmp_path):
    with Run(tmp_path, 'launch.stop_after="8s"', nproc=1, steps=100000, every=0) as run:
        status, out, err = run.end(timeout=40)
        assert status == 143, out + err
        assert run.events("end")[0]["reason"] == "the limit of 8 s"
        assert latest(tmp_path / "run" / "checkpoints").name == f"step-{run.events('end')[0]['step']}"


@pytest.mark.sweep
def test_twenty_random_kills_also_during_saves(tmp_path, undisturbed):
    chance = random.Random(0)
    for number in range(20):
        folder = tmp_path / str(number)
        with Run(folder, "parallel.tp=2", every=2, restarts=1) as run:
            run.wait_for_step(3)
            time.sleep(chance.random() * 1.5)
            ranks = run.ranks()
            if run.process.poll() is None and ranks:
                os.kill(ranks.get(chance.randrange(2), next(iter(ranks.values()))), signal.SIGKILL)
            status, out, err = run.end()
            assert status == 0, out + err
            assert run.losses() == pytest.approx(undisturbed, rel=1e-9)
