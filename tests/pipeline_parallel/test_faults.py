"""Real processes that die or raise in the middle of a step: all others raise in time, and say at which action."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.frameworks import on_mindspore
from tests.pipeline_parallel.faulty_rank import FAILING
from tests.world import small_or_sweep

_FAULTS = ["killed in F", "killed in B", "killed in W", "killed while others wait", "exception"]
_SMALL = ["exception"] if on_mindspore else ["killed in W"]
_RANKS = 3
_IN_TIME = 20.0  # seconds; far below the time limit of a group


def _run(fault: str, folder: Path) -> list[tuple[int, str, str]]:
    """The end and the words of each rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        **os.environ,
        "WORLD_SIZE": str(_RANKS),
        "LOCAL_WORLD_SIZE": str(_RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "HYPER_PARALLEL_PLATFORM": "mindspore" if on_mindspore else "torch",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.pipeline_parallel.faulty_rank", fault, str(folder)],
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(_RANKS)
    ]
    try:
        return [(one.wait(), out, err) for one in ranks for out, err in [one.communicate(timeout=240)]]
    finally:
        for one in ranks:
            one.kill()


@pytest.mark.sweep("mindspore")
@pytest.mark.parametrize("fault", small_or_sweep(_FAULTS, _SMALL))
def test_all_ranks_raise_in_time_and_name_the_action(fault: str, tmp_path: Path) -> None:
    for rank, (code, out, err) in enumerate(_run(fault, tmp_path)):
        if rank == FAILING and fault != "exception":
            assert code == -signal.SIGKILL
            continue
        told = re.search(r"raised after ([-\d.]+) s: PipelineError: (.*)", out, re.DOTALL)
        assert told is not None, f"rank {rank}: {out}{err[-3000:]}"
        assert float(told[1]) < _IN_TIME, f"rank {rank}: {out}"
        words = told[2]
        assert re.search(rf"^pipeline zb_h1: rank {rank} failed (at|behind) .* of stage {rank}", words), words
        if fault == "exception":
            assert "rank 1 failed at 1F1 (forward of stage 1, microbatch 1" in words
            assert "from the user's module" in words
        else:
            assert f"rank {FAILING}" in words, words
