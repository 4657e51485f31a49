"""What the loop of ``hyper-parallel train`` costs: its steps against those of a loop written by hand, in turns.

Alone: one process, the model and data of ``examples/run.toml``. The hand-written loop reads the same samples, computes
the same loss, clips, steps and reads the loss. A step is from the beginning of one to the beginning of the next, with
all that the trainer does between them: prefetched data, metrics, the learning rate, a look at signals. Times are the
fastest of many rounds that alternate between the two, since everything that disturbs a step makes it slower.

On 2 and 4 ranks: the trainer with Hugging Face's Llama of ``parallelize.py`` against a loop with the same model under
PyTorch's own FSDP2 and tensor parallelism: the same rows, AdamW, clipping, and the loss read each step.

``--quick`` takes fewer rounds, ``--only`` one of the two; the exit status is 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import hyper_parallel as hp
from benchmarks import parallelize as peer
from hyper_parallel.data import open_data
from hyper_parallel.trainer.config.run_config import RunConfig
from hyper_parallel.trainer.metrics import read_metrics
from hyper_parallel.trainer.trainer import Trainer

SIZES = {"dim": 128, "num_blocks": 4}
LENGTH, BATCH, RATE = 128, 8, 1e-3
MOST_OVERHEAD, MOST_STALL, LEAST_SPEED = 1.03, 0.01, 1.3


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


# ---------------------------------------------------------------- ranks


def on_ranks(rank: int, ranks: int, store: str, degrees: dict[str, int], rounds: int, steps: int, results: Any) -> None:
    os.environ["HYPER_PARALLEL_PLATFORM"] = "torch"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    dp, tp = degrees.get("dp_shard", 1), degrees.get("tp", 1)
    folder = Path(store).parent
    seconds: dict[str, list[float]] = {"trainer": [], "torch": []}
    for number in range(rounds):
        trainer = _Timed(_of_hugging_face(folder, number, degrees, steps, dp))
        trainer.begins = []
        with contextlib.redirect_stdout(io.StringIO()):
            trainer.train()
        seconds["trainer"] += _differences(trainer.begins)[1:]
        del trainer
        seconds["torch"] += _torchs(dp, tp, steps)[1:]
    if rank == 0:
        results.put({name: min(found) for name, found in seconds.items()})
    dist.barrier()
    dist.destroy_process_group()


def _of_hugging_face(folder: Path, number: int, degrees: dict[str, int], steps: int, dp: int) -> RunConfig:
    return RunConfig(
        model={"hugging_face": str(folder / "model"), "weights": "scratch"},
        data={
            **{"kind": "synthetic", "length": peer.LENGTH, "vocab_size": peer.SIZES["vocab_size"], "isolate": False},
            "num_samples": 1024,
        },
        train={"steps": steps, "batch": peer.ROWS * dp},
        optimizer={"lr": 1e-4},
        schedule={"name": "constant"},
        parallel=degrees,
        checkpoint={"every": 0, "resume": "never"},
        log={"folder": str(folder / str(number))},
    )


def _torchs(dp: int, tp: int, steps: int) -> list[float]:
    model = peer.theirs(dp, tp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    positions = torch.arange(peer.LENGTH)[None]
    begins = []
    for step in range(steps):
        begins.append(time.perf_counter())
        given = peer.batch_of(step * dp + dist.get_rank() // tp)
        loss = model(**given, position_ids=positions, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        mean.item()
    return _differences(begins)


def speeds(rounds: int, steps: int) -> tuple[Table, bool]:
    """A table of tokens per second; whether a target is missed."""
    from transformers import LlamaConfig

    table = Table("degrees", "ranks", "trainer, tokens/s", "torch, tokens/s", "times torch", "target")
    is_missed = False
    for text, ranks in peer.LAYOUTS.items():
        degrees = {name.strip(): int(size) for name, size in (part.split("=") for part in text.split(","))}
        with tempfile.TemporaryDirectory() as folder:
            LlamaConfig(**peer.SIZES, architectures=["LlamaForCausalLM"]).save_pretrained(f"{folder}/model")
            results = mp.get_context("spawn").SimpleQueue()
            mp.spawn(on_ranks, (ranks, f"{folder}/store", degrees, rounds, steps, results), nprocs=ranks)
            found = results.get()
        tokens = peer.ROWS * peer.LENGTH * degrees.get("dp_shard", 1)
        ratio = found["torch"] / found["trainer"]
        is_missed = is_missed or ratio < LEAST_SPEED
        cells = [f"{tokens / found[name]:.0f}" for name in ("trainer", "torch")]
        table.add_row(text, str(ranks), *cells, f"{ratio:.2f}", f">= {LEAST_SPEED}")
    return table, is_missed


# ---------------------------------------------------------------- alone


def alone(rounds: int, steps: int) -> tuple[Table, bool]:
    """A table of what the loop costs; whether a target is missed."""
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
    return table, overhead > MOST_OVERHEAD or stall > MOST_STALL


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--only", choices=("alone", "ranks"))
    options = parser.parse_args()
    found = []
    if options.only != "ranks":
        found.append(alone(*((3, 15) if options.quick else (8, 30))))
    if options.only != "alone":
        found.append(speeds(*((1, 8) if options.quick else (4, 15))))
    for table, _ in found:
        Console(width=120).print(table)
    return int(any(is_missed for _, is_missed in found))


if __name__ == "__main__":
    sys.exit(main())
