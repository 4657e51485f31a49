"""The example for MindSpore runs on two processes under torchrun, and is that for PyTorch but for the framework."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mindspore  # noqa: F401  # this test is about MindSpore only

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PARALLEL = ("init_process_group", "init_device_mesh", "parallelize_module", "to_local", "destroy_process_group")


def test_the_example_runs_on_two_processes():
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment = {**inherited, "PYTHONPATH": str(ROOT), "HYPER_PARALLEL_PLATFORM": "mindspore"}
    command = [BIN / "torchrun", "--standalone", "--nproc-per-node", "2", "examples/tensor_parallel_mindspore.py"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):  # The two write to one pipe, so their lines may run together.
        assert f"rank {rank} holds (33, 16) of the first weight; loss " in done.stdout


def test_what_makes_it_parallel_is_the_same_on_both_frameworks():
    examples = [ROOT / "examples" / f"tensor_parallel{framework}.py" for framework in ("", "_mindspore")]
    one, other = (
        [line for line in example.read_text().splitlines() if any(name in line for name in PARALLEL)]
        for example in examples
    )
    assert one == other and len(one) == len(PARALLEL)
