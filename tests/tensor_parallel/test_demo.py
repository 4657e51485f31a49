"""The demo tells equal losses from different ones, draws the layouts, and ends clearly when a rank dies."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.commands import command_environment

only_on = "torch"  # a command, written with PyTorch

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"


def _run(*command, **variables):
    environment = command_environment(**variables)
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, env=environment)


def _demo(*arguments, folder=EXAMPLES):
    return _run(sys.executable, folder / "llama_demo.py", *arguments)


def test_make_demo_shows_equal_losses_memory_collectives_and_the_drawing(tmp_path, sweep):
    steps = 60 if sweep else 4
    done = _run("make", "demo", ARGS=f"--steps {steps} --svg {tmp_path / 'layouts.svg'}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"The losses are equal on every rank at all {steps} steps" in done.stdout
    assert f"sharded over 4 processes: step {steps} of {steps}" in done.stdout
    assert "attention.query" in done.stdout and "128/tp x 128" in done.stdout
    assert "\x1b" not in done.stdout, "colours where there is no terminal"
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if "│" in line]
    cells = {row[0]: row[1:] for row in rows}
    # One gather and one scatter into and out of each of 8 halves, the embedding and the head, in both passes.
    assert cells["all-gather"][0] == cells["reduce-scatter"][0] == "18"
    whole, part = (float(cells[name][0]) for name in ("one process", "rank 1"))
    assert part < 0.26 * whole
    assert float(cells["rank 1"][2]) < 0.5 * float(cells["one process"][2])
    assert (tmp_path / "layouts.svg").read_text().startswith("<svg")


@pytest.mark.sweep
def test_demo_ends_with_a_clear_message_when_a_rank_dies():
    done = _demo("--ranks", "2", "--steps", "4", "--kill-rank", "1")
    assert done.returncode == 1, done.stdout
    assert "The sharded run failed: rank 1 was ended by SIGKILL at step 1 on host " in done.stdout
    assert "; the other ranks were stopped" in done.stdout


@pytest.mark.sweep
def test_demo_says_so_when_the_losses_differ(tmp_path):
    """The same script with one weight of the cut run left untrained must fail: the comparison sees a wrong gradient."""
    text = (EXAMPLES / "llama_demo.py").read_text()
    line = "    model = hp.parallelize_module(make_model(), mesh, hp.models.llama_plan(sequence_parallel=True))\n"
    assert text.count(line) == 1
    spoiled = text.replace(line, f"{line}    model.head.weight.requires_grad_(False)\n")
    (tmp_path / "llama_demo.py").write_text(spoiled)
    done = _demo("--ranks", "2", "--steps", "8", folder=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "The losses differ by up to" in done.stdout


def test_memory_counts_each_kept_tensor_once(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import llama_demo

    class Square(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, ids, labels):
            x = self.weight * 2
            return (x * x).sum() + x.exp().sum()

    memory = llama_demo.memory_of(Square())
    assert memory == {"weights": 16, "optimizer": 48, "activations": 32}  # x, once, and its exponential
