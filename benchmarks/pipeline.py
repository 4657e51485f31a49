"""A step of a pipeline: ours and ``torch.distributed.pipelining``, in turns, on the same stages.

One thread per process. 8 blocks of width 64 and of width 256, cut for two ranks; a step is forward and backward of 8
micro-batches. Both libraries run the same modules, losses and splits. Times are the fastest of many rounds that
alternate between the libraries, since everything that disturbs a step makes it slower. Live bytes are those of all
memory that a step makes and holds at once, gradients included, on the rank that holds most.

``--quick`` takes fewer rounds; the exit status is 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table as Shown
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

RANKS, NUM_BLOCKS, ROWS, LENGTH, MICROBATCHES = 2, 8, 16, 32, 8
# Ours, theirs with their stages by rank, the largest share of torch's time at width 64 and 256, and of its live bytes.
CASES: dict[str, tuple[Any, dict[int, tuple[int, ...]], dict[int, float], float]] = {
    "1f1b": (Schedule1F1B, {0: (0,), 1: (1,)}, {64: 1.0, 256: 1.0}, 1.0),
    "interleaved": (ScheduleInterleaved1F1B, {0: (0, 2), 1: (1, 3)}, {64: 1.0, 256: 1.0}, 1.0),
    "zb_h1": (ScheduleInterleavedZeroBubble, {0: (0,), 1: (1,)}, {64: 0.75, 256: 0.97}, 0.8),
    "zbv": (ScheduleZBVZeroBubble, {0: (0, 3), 1: (1, 2)}, {64: 0.75, 256: 0.97}, 0.8),
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm1(x)
        x = x + self.o(self.q(h) * torch.sigmoid(self.k(h)) + self.v(h))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(NUM_BLOCKS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


class Part(nn.Module):
    """The blocks of one stage, for torch."""

    def __init__(self, width: int, stage: int, num_stages: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, width) if stage == 0 else None
        self.blocks = nn.ModuleList(Block(width) for _ in range(NUM_BLOCKS // num_stages))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.first is not None:
            x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return x


def _ours(schedule: str, width: int, x: torch.Tensor, num_stages: int) -> Callable[[], Any]:
    import hyper_parallel as hp

    def loss(outputs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
        return (outputs * outputs).sum(), outputs.numel()

    loss.count = lambda batch: torch.tensor(float(batch["x"].numel()))  # type: ignore[attr-defined]
    stages = [NUM_BLOCKS // num_stages] * num_stages
    run = hp.parallelize(Model(width), pp=RANKS, schedule=schedule, microbatches=MICROBATCHES, loss=loss, stages=stages)

    def step() -> None:
        run.forward_backward(x=x)
        run.zero_grad()

    return step


def _theirs(schedule: str, width: int, x: torch.Tensor, num_stages: int, rank: int) -> Callable[[], Any]:
    kind, places, _, _ = CASES[schedule]
    own = [
        PipelineStage(Part(width, stage, num_stages), stage, num_stages, torch.device("cpu")) for stage in places[rank]
    ]
    loss_fn = lambda outputs, target: (outputs * outputs).mean()  # noqa: E731
    given = own[0] if kind is Schedule1F1B else own
    made = kind(given, MICROBATCHES, loss_fn=loss_fn)
    has_first, has_last = 0 in places[rank], num_stages - 1 in places[rank]

    def step() -> None:
        keywords = {"target": x} if has_last else {}
        made.step(*([x] if has_first else []), **keywords)
        for stage in own:
            stage.submod.zero_grad()

    return step


def _best(steps: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    best = dict.fromkeys(steps, float("inf"))
    for step in steps.values():
        step()
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            dist.barrier()
            begin = time.perf_counter()
            step()
            dist.barrier()
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


class _HeldBytes(TorchDispatchMode):
    """The largest sum of bytes of storages that were made and alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._alive = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor) and not tensor.is_meta:
                memory = tensor.untyped_storage()
                if memory not in self._known:
                    self._known.add(memory)
                    self._alive += memory.nbytes()
                    self.peak = max(self.peak, self._alive)
                    weakref.finalize(memory, self._freed, memory.nbytes())
        return result

    def _freed(self, num_bytes: int) -> None:
        self._alive -= num_bytes


def _live_bytes(step: Callable[[], Any]) -> int:
    step()
    with _HeldBytes() as held:
        step()
    return held.peak


def _on_a_rank(rank: int, port: int, width: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS), HYPER_PARALLEL_PLATFORM="torch")
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    x = torch.randn(ROWS, LENGTH, width)
    found: dict[str, Any] = {}
    for schedule, (_, places, _, _) in CASES.items():
        num_stages = RANKS * len(places[0])
        steps = {
            "ours": _ours(schedule, width, x, num_stages),
            "theirs": _theirs(schedule, width, x, num_stages, rank),
        }
        times = _best(steps, rounds)
        live = torch.tensor([_live_bytes(step) for step in steps.values()])
        dist.all_reduce(live, dist.ReduceOp.MAX)
        found[schedule] = (times, live.tolist())
    if rank == 0:
        torch.save(found, Path(folder) / "found")
    dist.destroy_process_group()


def _measure(width: int, rounds: int) -> dict[str, Any]:
    import socket

    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        mp.spawn(_on_a_rank, (port, width, rounds, folder), nprocs=RANKS)
        return dict(torch.load(Path(folder) / "found"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    rounds = 10 if parser.parse_args().quick else 40
    console, missed = Console(width=120), []
    times = Shown(
        "width", "schedule", "ours, ms", "torch, ms", "share", "target", "live, kB", "torch", "share", "target"
    )
    for width in (64, 256):
        found = _measure(width, rounds)
        for schedule, (fastest, (live, their_live)) in found.items():
            _, _, targets, live_target = CASES[schedule]
            share, live_share = fastest["ours"] / fastest["theirs"], live / their_live
            for what, got, target in (("time", share, targets[width]), ("live bytes", live_share, live_target)):
                if got > target:
                    missed.append(f"{schedule} at width {width}: {what} {got:.2f}, target {target}")
            times.add_row(
                str(width),
                schedule,
                *(f"{1e3 * fastest[who]:.2f}" for who in ("ours", "theirs")),
                f"{share:.2f}",
                f"{targets[width]}",
                f"{live / 1e3:.0f}",
                f"{their_live / 1e3:.0f}",
                f"{live_share:.2f}",
                f"{live_target}",
            )
    console.print(times)
    for line in missed:
        console.print(f"missed: {line}", style="red")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
