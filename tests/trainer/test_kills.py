"""Kills and signals to runs of real processes: nothing hangs, nothing is lost, the cause is on top.

Starting a process that trains takes a hundred times as long as the training here. So at every change a rank is killed
and a launcher asked to stop on real processes once each, by the demo (tests/trainer/test_demo.py); what a run does when
it is asked at odd moments is tried on ranks that are threads. The rest is in the sweep, and what the launcher does with
signals in tests/launch.
"""

from __future__ import annotations

import os
import random
import signal
import time

import pytest

import hyper_parallel as hp
from hyper_parallel.checkpoint import latest
from hyper_parallel.launch import StopRequest
from tests.trainer.processes import Run, config_here
from tests.trainer.runs import train_on_threads
from tests.world import small_or_sweep

only_on = "torch"  # the launcher and the loop are the same on both; a run on MindSpore is in test_mindspore_runs.py


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    losses = train_on_threads(config_here(tmp_path_factory.mktemp("undisturbed"))).losses
    assert list(losses) == list(range(1, 31))
    return losses


def _saved(folder):
    return latest(folder / "run" / "checkpoints").name


@pytest.mark.sweep  # At every change it is in the demo, as is a SIGTERM.
def test_a_killed_rank_is_restarted_to_the_same_curve(tmp_path, undisturbed):
    with Run(tmp_path, "parallel.tp=2", restarts=1) as run:
        run.wait_for_step(12)
        os.kill(run.ranks()[1], signal.SIGKILL)
        status, out, err = run.end()
        assert status == 0, out + err
        assert "rank 1 was ended by SIGKILL" in err.splitlines()[0], err
        assert "starting all ranks again from the checkpoint of step" in err and "attempt 2 of 2" in err
        assert run.losses() == pytest.approx(undisturbed, rel=1e-9)


@pytest.mark.sweep
def test_a_killed_rank_ends_the_others_and_a_second_run_goes_on(tmp_path, undisturbed):
    with Run(tmp_path, "parallel.tp=2") as run:
        run.wait_for_step(8)
        os.kill(run.ranks()[0], signal.SIGKILL)
        begin = time.monotonic()
        status, _, err = run.end()
        assert time.monotonic() - begin < 10
        assert status == 1
        assert "rank 0 was ended by SIGKILL" in err.splitlines()[0], err
        assert _saved(tmp_path) in ("step-5", "step-10", "step-15", "step-20", "step-25")
        train_on_threads(config_here(tmp_path, nproc=2))  # dp_shard 2
        assert run.losses() == pytest.approx(undisturbed, rel=1e-9)


@pytest.mark.sweep
@pytest.mark.parametrize("to", ["the launcher", "a rank"])
def test_sigterm_saves_and_the_run_goes_on(tmp_path, undisturbed, to):
    with Run(tmp_path, "parallel.tp=2", every=0) as run:
        run.wait_for_step(8)
        os.kill(run.process.pid if to == "the launcher" else run.ranks()[1], signal.SIGTERM)
        status, out, err = run.end()
        assert status == 143, out + err
        step = run.events("end")[0]["step"]
        assert 8 <= step < 30
        assert _saved(tmp_path) == f"step-{step}"
        assert f"saved step {step}" in out
        train_on_threads(config_here(tmp_path, nproc=2, every=0))  # dp_shard 2
        assert run.losses() == pytest.approx(undisturbed, rel=1e-9)


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
    assert "forecast" not in out  # launch.forecast = false


@pytest.mark.sweep
def test_ctrl_c_saves_too(tmp_path):
    with Run(tmp_path, nproc=1, every=0) as run:
        run.wait_for_step(5)
        os.kill(run.process.pid, signal.SIGINT)
        status, out, err = run.end()
    assert status == 130, out + err
    assert _saved(tmp_path).startswith("step-")


# ---- asked at odd moments ----


def _second_rank_is_asked(after):
    return lambda: StopRequest(after=after if hp.get_platform().get_rank() == 1 else None)


EVALUATES = ("eval.every=1", "eval.samples=1000000", "data.validation=0.5")


def test_a_request_during_evaluation_is_heard_at_once(tmp_path):
    """Inside of an evaluation of 100,000 batches."""
    config = config_here(tmp_path, *EVALUATES, nproc=2, every=0)
    result = train_on_threads(config, asked=_second_rank_is_asked(3.0))
    assert (result.status, result.step, result.exit_code) == ("stopped", 1, 143)
    assert result.reason == "a request to another rank"
    assert _saved(tmp_path) == "step-1"


@pytest.mark.sweep
def test_a_signal_during_evaluation_is_heard_at_once(tmp_path):
    with Run(tmp_path, *EVALUATES, every=0) as run:
        run.wait_for(lambda: run.events("start"))
        time.sleep(1.0)
        os.kill(run.ranks()[0], signal.SIGTERM)
        status, out, err = run.end(timeout=20)
    assert status == 143, out + err
    assert _saved(tmp_path) == "step-1"


def _text_to_prepare(folder, number):
    text = folder / "text"
    text.mkdir()
    for one in range(number):
        (text / f"{one}.txt").write_text("a b c\n")
    return 'data.kind="text"', f'data.path="{text}"', f'data.cache="{folder / "cache"}"'


def test_a_request_while_data_is_prepared_ends_it(tmp_path, capsys):
    data = _text_to_prepare(tmp_path, 100)
    result = train_on_threads(
        config_here(tmp_path / "job", *data, "parallel.tp=2", nproc=2), asked=_second_rank_is_asked(0.0)
    )
    assert (result.status, result.step, result.exit_code) == ("stopped", 0, 143)
    assert "stopped by a request to another rank before a step was made" in capsys.readouterr().out
    assert not (tmp_path / "job" / "run" / "checkpoints").exists()


@pytest.mark.sweep
def test_a_signal_while_data_is_prepared_ends_it(tmp_path):
    with Run(tmp_path / "job", *_text_to_prepare(tmp_path, 20000), "parallel.tp=2") as run:
        run.wait_for(lambda: (tmp_path / "cache").is_dir() and list((tmp_path / "cache").iterdir()))
        os.kill(run.process.pid, signal.SIGTERM)
        status, out, err = run.end(timeout=30)
    assert status == 143, out + err
    assert "stopped by SIGTERM before a step was made" in out
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith("text-")]


@pytest.mark.sweep
def test_a_signal_in_a_save_is_heard_behind_it(tmp_path):
    with Run(tmp_path, "checkpoint.background=false", every=1) as run:
        run.wait_for_step(3)
        os.kill(run.process.pid, signal.SIGTERM)
        status, out, err = run.end()
        assert status == 143, out + err
        assert _saved(tmp_path) == f"step-{run.events('end')[0]['step']}"


def test_a_limit_of_time_saves(tmp_path):
    config = config_here(tmp_path, 'launch.stop_after="2s"', steps=100000, every=0)
    result = hp.Trainer(config).train()
    assert (result.status, result.exit_code, result.reason) == ("stopped", 143, "the limit of 2 s")
    assert _saved(tmp_path) == f"step-{result.step}"


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
