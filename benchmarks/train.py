"""What the loop of ``hyper-parallel train`` costs: its steps against those of a loop written by hand, in turns.

One process, the model and data of ``examples/run.toml``. The hand-written loop reads the same samples, computes the
same loss, clips, steps and reads the loss. A step is from the beginning of one to the beginning of the next, with all
that the trainer does between them: prefetched data, metrics, the learning rate, a look at signals. Times are the
fastest of many rounds that alternate between the two, since everything that disturbs a step makes it slower.

``--quick`` takes fewer rounds; the exit status is 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hyper_parallel as hp
from hyper_parallel.data import open_data
from hyper_parallel.trainer.config.run_config import RunConfig
from hyper_parallel.trainer.metrics import read_metrics
from hyper_parallel.trainer.trainer import Trainer

SIZES = {"dim": 128, "num_blocks": 4}
LENGTH, BATCH, RATE = 128, 8, 1e-3
MOST_OVERHEAD, MOST_STALL = 1.03, 0.01


class _Timed(Trainer):
    """A trainer that notes when each step begins."""

    def _step(self, *args: Any) -> Any:
        self.begins.append(time.perf_counter())
        return super()._step(*args)


def config_of(folder: Path, steps: int) -> RunConfig:
    return RunConfig(
        model={"name": "llama", "args": SIZES},
        data={"kind": "corpus", "length": LENGTH, "isolate": False},
        train={"steps": steps, "batch": BATCH},
        optimizer={"lr": RATE},
        schedule={"name": "constant"},
        checkpoint={"every": 0, "resume": "never"},
        log={"folder": str(folder)},
    )


def by_trainer(folder: Path, steps: int) -> tuple[list[float], list[float]]:
    """Seconds of each step, and of each what it waited for data."""
    trainer = _Timed(config_of(folder, steps))
    trainer.begins = []
    with contextlib.redirect_stdout(io.StringIO()):
        trainer.train()
    waited = [line["seconds"]["data"] for line in read_metrics(folder) if line["event"] == "step"]
    return _differences(trainer.begins), waited


def by_hand(folder: Path, steps: int) -> list[float]:
    config = config_of(folder, steps)
    data = open_data(config.data, seed=0)
    order = data.order(batch=BATCH, seed=0)
    model = hp.models.Llama(hp.models.LlamaConfig(**SIZES))
    decays = [one for one in model.parameters() if one.ndim > 1]
    stays = [one for one in model.parameters() if one.ndim <= 1]
    groups = [{"params": decays, "weight_decay": 0.1}, {"params": stays, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95))
    begins = []
    for step in range(steps):
        begins.append(time.perf_counter())
        batch = data.collate(order.numbers(step * BATCH, BATCH))
        loss = model(torch.from_numpy(batch["input_ids"]), torch.from_numpy(batch["labels"]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    return _differences(begins)


def _differences(begins: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(begins)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds, steps = (3, 15) if parser.parse_args().quick else (8, 30)
    torch.set_num_threads(1)
    ours: list[float] = []
    hand: list[float] = []
    waited: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds):
            took, stalls = by_trainer(Path(folder) / str(number), steps)
            ours += took
            waited += stalls[1:]
            hand += by_hand(Path(folder), steps)
    overhead, stall = min(ours) / min(hand), statistics.median(waited) / statistics.median(ours)
    table = Table("", "measured", "target", title=f"One process, {rounds} rounds of {steps} steps")
    table.add_row("step by hand", f"{min(hand) * 1e3:.1f} ms", "")
    table.add_row("step of the trainer", f"{min(ours) * 1e3:.1f} ms", "")
    table.add_row("the trainer's share", f"{overhead:.3f}", f"<= {MOST_OVERHEAD}")
    table.add_row("waiting for data", f"{stall:.3%}", f"<= {MOST_STALL:.0%}")
    Console().print(table)
    return int(overhead > MOST_OVERHEAD or stall > MOST_STALL)


if __name__ == "__main__":
    sys.exit(main())
