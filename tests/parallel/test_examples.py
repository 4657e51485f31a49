"""The examples of `hp.parallelize` print the same losses on any number of processes, whatever the degrees."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import hyper_parallel as hp
from hyper_parallel.testing import threads
from tests.commands import command_environment
from tests.frameworks import on_mindspore

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
EXAMPLE = f"examples/{'parallelize_mindspore' if on_mindspore else 'hugging_face'}.py"
FRAMEWORK = "mindspore" if on_mindspore else "torch"


def _losses(processes, *arguments):
    """Those that the first rank prints; ranks are processes."""
    start = ["torchrun", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else ["python"]
    done = subprocess.run(
        [BIN / start[0], *start[1:], EXAMPLE, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        env=command_environment(PYTHONPATH=str(ROOT), HYPER_PARALLEL_PLATFORM=FRAMEWORK),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return _read(done.stdout)


def _read(text):
    return [float(loss) for loss in re.findall(r"^step \d+ loss ([\d.]+)$", text, re.MULTILINE)]


def _losses_of_threads(capsys, ranks, *arguments):
    capsys.readouterr()
    threads(ranks).run(runpy.run_path(str(ROOT / EXAMPLE))["main"], *map(str, arguments))
    return _read(capsys.readouterr().out)


@pytest.mark.sweep("mindspore")
@pytest.mark.sweep("torch")
@pytest.mark.processes("an example, as a user starts it")
def test_losses_do_not_depend_on_the_degrees(tmp_path, sweep):
    want = _losses(1)
    assert len(want) == 6 and want[-1] < want[0] - 0.1
    of_two = ((2, "dp_shard=2"), (2, "tp=2"), (2, "cp=2"), (2, "dp_replicate=2"))
    of_four = ((4, "cp=2, tp=2"), (4, "dp_shard=2, cp=2"), (4, "dp_shard=2, tp=2"))
    for processes, degrees in (*of_two, *of_four) if sweep else of_two[:1]:
        got = _losses(processes, degrees, tmp_path / str(processes))
        assert got == pytest.approx(want, abs=3e-5), degrees


@pytest.mark.skipif(on_mindspore, reason="ranks as threads, and weights of Hugging Face, are of PyTorch")
def test_on_threads_it_goes_on_under_other_degrees_from_what_it_saved(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(hp, "destroy_process_group", lambda: None)  # the world of threads is not the example's to end
    want = _losses_of_threads(capsys, 1)
    assert _losses_of_threads(capsys, 4, "dp_shard=2, tp=2", tmp_path) == pytest.approx(want, abs=3e-5)
    assert (tmp_path / "checkpoint" / "metadata.json").exists()
    resumed = _losses_of_threads(capsys, 2, "dp_shard=2", tmp_path)
    assert resumed[-1] < want[-1] - 0.1  # from the weights of that folder


def test_both_frameworks_show_the_same_calls():
    calls = [
        re.findall(r"\b(?:hp|run)\.(\w+)", (ROOT / "examples" / name).read_text())
        for name in ("hugging_face.py", "parallelize_mindspore.py")
    ]
    only_pytorch = {"load_hugging_face", "save_hugging_face"}
    assert set(calls[0]) - only_pytorch == set(calls[1]) - {"models", "gradients", "zero_grad"}
