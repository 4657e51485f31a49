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
    ranks, size = (4, "--steps 40") if sweep else (2, "--steps 20 --quick")  # enough steps to be interrupted between
    done = _run("make", "demo", ARGS=f"{size} --folder {tmp_path / 'runs'}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "The losses are equal: the largest difference is" in done.stdout
    assert "asked to stop by SIGTERM, saved step" in done.stdout
    assert f"kill -9 of rank {ranks - 1} at step" in done.stdout and "started again by itself, done" in done.stdout
    assert "forecast: " in done.stdout  # that it fits, if the machine was quick enough to find out
    assert "\x1b" not in done.stdout, "colours where there is no terminal"
    said = (tmp_path / "runs" / "three" / "output.txt").read_text()
    assert f"rank {ranks - 1} was ended by SIGKILL at step" in said and "starting all ranks again from the" in said


@pytest.mark.sweep
def test_the_demo_says_so_when_losses_differ(tmp_path):
    """The same with another seed for the second run."""
    text = (ROOT / "examples" / "demo.py").read_text()
    line = "*length, *second_layout(nproc))"
    assert text.count(line) == 1
    spoiled = text.replace(line, line.replace("nproc))", 'nproc), "--set", "optimizer.lr=2e-3")'))
    here = f"HERE = Path({str(ROOT / 'examples')!r})"
    spoiled = spoiled.replace("HERE = Path(__file__).resolve().parent", here)
    (tmp_path / "demo.py").write_text(spoiled)
    done = _run(sys.executable, tmp_path / "demo.py", "--steps", "8", "--quick", "--folder", tmp_path / "runs")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "The losses are NOT equal" in done.stdout
