"""One rank of a pipeline in which a rank fails in its second step; prints what it raised, and when."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import hyper_parallel as hp
from hyper_parallel.core.pipeline_parallel.runtime.stage_work import StageWork
from hyper_parallel.core.pipeline_parallel.runtime.weight_gradients import WeightGradients
from hyper_parallel.platform import get_platform
from tests.pipeline_parallel import training

FAILING = 1  # the rank that does


def main(fault: str, folder: str) -> None:
    run = hp.parallelize(
        training.model_with_values(), f"pp={os.environ['WORLD_SIZE']}", schedule="zb_h1", microbatches=4
    )
    part = training.rows_of(run)
    run.forward_backward(*part)
    moment = Path(folder) / "moment"
    rank = get_platform().get_rank()
    if rank == FAILING:
        _prepare(fault, moment)
    try:
        run.forward_backward(*part)
    except Exception as error:
        began = float(moment.read_text())
        print(f"raised after {time.time() - began:.2f} s: {type(error).__name__}: {error}", flush=True)
        _wait_for_others(rank, fault, Path(folder))
        os._exit(0)  # groups whose ranks are gone are not left in good order
    print("nothing was raised", flush=True)


def _wait_for_others(rank: int, fault: str, folder: Path) -> None:
    """A rank that ends would be one more that is lost."""
    (folder / f"rank {rank}").touch()
    left = int(os.environ["WORLD_SIZE"]) - (fault != "exception")
    end = time.monotonic() + 30
    while len(list(folder.glob("rank *"))) < left and time.monotonic() < end:
        time.sleep(0.05)


def _prepare(fault: str, moment: Path) -> None:
    """Let the second microbatch of the next step fail."""
    owner, name = {
        "killed in F": (StageWork, "forward"),
        "killed while others wait": (StageWork, "forward"),
        "exception": (StageWork, "forward"),
        "killed in B": (StageWork, "backward"),
        "killed in W": (WeightGradients, "compute"),
    }[fault]
    original, calls = getattr(owner, name), []

    def failing(*args: Any, **kwargs: Any) -> Any:
        calls.append(None)
        if len(calls) == 2:
            if fault == "killed while others wait":
                time.sleep(3)
            moment.write_text(str(time.time()))
            if fault == "exception":
                raise KeyError("from the user's module")
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(owner, name, failing)


if __name__ == "__main__":
    main(*sys.argv[1:])
