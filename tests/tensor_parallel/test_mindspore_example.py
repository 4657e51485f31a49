"""The example for MindSpore runs on two processes, and is that for PyTorch but for the framework."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import mindspore  # noqa: F401  # this test is about MindSpore only
import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
EXAMPLE = "examples/tensor_parallel_mindspore.py"
PARALLEL = ("init_process_group", "init_device_mesh", "parallelize_module", "to_local", "destroy_process_group")


def _environment(*import_paths: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {
        **inherited,
        "PYTHONPATH": os.pathsep.join(map(str, (*import_paths, ROOT))),
        "HYPER_PARALLEL_PLATFORM": "mindspore",
    }


def _assert_said(output: str) -> None:
    for rank in range(2):  # The two may write to one pipe, so their lines may run together.
        assert f"rank {rank} holds (33, 16) of the first weight; loss " in output


@pytest.mark.sweep  # test_mindspore_start has a small program under torchrun
def test_the_example_runs_under_torchrun():
    command = [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", EXAMPLE]
    done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    _assert_said(done.stdout)


def test_the_example_runs_started_by_hand_where_there_is_no_torch(tmp_path):
    """What `pip install hyper-parallel[mindspore]` installs is enough."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    outputs = [(tmp_path / f"rank{rank}.txt").open("w+") for rank in range(2)]
    ranks = [
        subprocess.Popen(
            [sys.executable, EXAMPLE],
            cwd=ROOT,
            env={**_environment(tmp_path), **meeting, "RANK": str(rank)},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        for rank, output in enumerate(outputs)
    ]
    try:
        codes = [rank.wait(timeout=600) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
        said = "".join(Path(output.name).read_text() for output in outputs)
        for output in outputs:
            output.close()
    assert codes == [0, 0], said
    _assert_said(said)


def test_what_makes_it_parallel_is_the_same_on_both_frameworks():
    examples = [ROOT / "examples" / f"tensor_parallel{framework}.py" for framework in ("", "_mindspore")]
    one, other = (
        [line for line in example.read_text().splitlines() if any(name in line for name in PARALLEL)]
        for example in examples
    )
    assert one == other and len(one) == len(PARALLEL)
