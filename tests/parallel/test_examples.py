"""The examples of `hp.parallelize` print the same losses on any number of processes, whatever the degrees."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.commands import command_environment
from tests.frameworks import on_mindspore

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
EXAMPLE = f"examples/{'parallelize_mindspore' if on_mindspore else 'hugging_face'}.py"
FRAMEWORK = "mindspore" if on_mindspore else "torch"


def _losses(processes, *arguments):
    """Those that the first rank prints."""
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
    return [float(loss) for loss in re.findall(r"^step \d+ loss ([\d.]+)$", done.stdout, re.MULTILINE)]


@pytest.mark.processes("an example, as a user starts it")
def test_losses_do_not_depend_on_the_degrees(tmp_path, sweep):
    want = _losses(1)
    assert len(want) == 6 and want[-1] < want[0] - 0.1
    of_two = ((2, "tp=2"), (2, "cp=2"), (2, "dp_replicate=2"))
    of_four = ((4, "cp=2, tp=2"), (4, "dp_shard=2, cp=2"), (4, "dp_shard=2, tp=2"))
    for processes, degrees in (*of_two, *of_four) if sweep else of_four[-1:]:
        got = _losses(processes, degrees, tmp_path / str(processes))
        assert got == pytest.approx(want, abs=3e-5), degrees
    assert (tmp_path / "4" / "checkpoint" / "metadata.json").exists()
    if not on_mindspore:
        resumed = _losses(2, "dp_shard=2", tmp_path / "4")
        assert resumed[-1] < want[-1] - 0.1  # from the weights of that folder


def test_both_frameworks_show_the_same_calls():
    calls = [
        re.findall(r"\b(?:hp|run)\.(\w+)", (ROOT / "examples" / name).read_text())
        for name in ("hugging_face.py", "parallelize_mindspore.py")
    ]
    only_pytorch = {"load_hugging_face", "save_hugging_face"}
    assert set(calls[0]) - only_pytorch == set(calls[1]) - {"models", "gradients", "zero_grad"}
