"""`make demo`: one training, stopped, killed and resumed under three layouts; and that it would see a difference."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import command_environment

only_on = "torch"  # a command, which runs both frameworks by itself
ROOT = Path(__file__).parents[2]


def _run(*command, timeout=600, **variables):
    environment = command_environment(**variables)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout, env=environment)


def test_make_demo_shows_equal_losses(tmp_path, sweep):
    steps = 40 if sweep else 20  # enough of them to be interrupted between
    done = _run("make", "demo", ARGS=f"--steps {steps} --folder {tmp_path / 'runs'}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The losses are equal: the largest difference is" in done.stdout
    assert "asked to stop by SIGTERM, saved step" in done.stdout
    assert "kill -9 of rank 3 at step" in done.stdout and "started again by itself, done" in done.stdout
    assert "\x1b" not in done.stdout, "colours where there is no terminal"
    said = (tmp_path / "runs" / "three" / "output.txt").read_text()
    assert "rank 3 was ended by SIGKILL at step" in said and "starting all ranks again from the" in said


@pytest.mark.sweep
def test_the_demo_says_so_when_losses_differ(tmp_path):
    """The same with another seed for the second run."""
    text = (ROOT / "examples" / "demo.py").read_text()
    line = '"--set", "parallel.tp=2", "--nproc", "4")\n    run.follow'
    assert text.count(line) == 1
    spoiled = text.replace(line, line.replace('"4")', '"4", "--set", "optimizer.lr=2e-3")'))
    here = f"HERE = Path({str(ROOT / 'examples')!r})"
    spoiled = spoiled.replace("HERE = Path(__file__).resolve().parent", here)
    (tmp_path / "demo.py").write_text(spoiled)
    done = _run(sys.executable, tmp_path / "demo.py", "--steps", "8", "--folder", tmp_path / "runs")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "The losses are NOT equal" in done.stdout
