"""Checkpoints, ours against ``torch.distributed.checkpoint`` and against the bare writing and reading of the bytes.

Four ranks, in one run, taken in turn; times are minima over rounds of the slowest rank. Two states: many small tensors
(2,000 of 16 KiB) and few large ones (32 of 32 MiB). Loading is from files in the page cache for all. Memory is the
largest growth of a rank's resident set while it saves or loads. Planning is measured for 1,024 simulated ranks.

    python -m benchmarks.checkpoint [--quick] [--directory DIR]
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import shutil
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.tensor as theirs
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

import hyper_parallel as ours
from hyper_parallel import checkpoint
from hyper_parallel.core.distributed_checkpoint.chunks import TensorSpec, plan_chunks

NUM_RANKS = 4
STATES = {"2,000 x 16 KiB": (2000, (64, 64)), "32 x 32 MiB": (32, (2048, 4096))}
QUICK_STATES = {"200 x 16 KiB": (200, (64, 64)), "4 x 8 MiB": (4, (1024, 2048))}
# (what, ratio to torch's that is wanted for small tensors, for large ones)
TARGETS = {"save": (0.1, 1.0), "async save, stall": (0.3, 0.3), "load": (0.1, 1.0), "load, other layout": (0.1, 0.7)}


def our_state(count: int, shape: tuple[int, ...], dim: int, fill: bool) -> dict[str, Any]:
    mesh = ours.init_device_mesh("cpu", (NUM_RANKS,))
    make = ours.rand if fill else ours.zeros
    return {f"layer.{i}.weight": make(shape, mesh, [ours.Shard(dim)]) for i in range(count)}


def their_state(count: int, shape: tuple[int, ...], dim: int, fill: bool) -> dict[str, Any]:
    mesh = theirs.init_device_mesh("cpu", (NUM_RANKS,))
    make = torch.rand if fill else torch.zeros
    local = tuple(size // NUM_RANKS if d == dim else size for d, size in enumerate(shape))
    return {
        f"layer.{i}.weight": theirs.DTensor.from_local(make(local), mesh, [theirs.Shard(dim)], run_check=False)
        for i in range(count)
    }


class Memory:
    """How much a process has grown at most since :meth:`start`, in bytes."""

    def start(self) -> None:
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")
        self._before = self._read("VmRSS")

    def growth(self) -> int:
        return max(0, self._read("VmHWM") - self._before)

    def _read(self, name: str) -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
        raise RuntimeError(f"no {name} in /proc/self/status")


def timed(function: Callable[[], Any]) -> tuple[float, int]:
    """Seconds, and bytes of growth, of the slowest and the largest rank."""
    memory = Memory()
    memory.start()
    dist.barrier()
    start = time.perf_counter()
    function()
    worst = torch.tensor([time.perf_counter() - start, memory.growth()], dtype=torch.float64)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return float(worst[0]), int(worst[1])


def raw_write(directory: Path, rank: int, tensors: list[torch.Tensor]) -> None:
    descriptor = os.open(directory / f"raw-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for tensor in tensors:
        view = memoryview(tensor.numpy().reshape(-1)).cast("B")
        while len(view):
            view = view[os.write(descriptor, view) :]
    os.fsync(descriptor)
    os.close(descriptor)


def raw_read(directory: Path, rank: int, tensors: list[torch.Tensor]) -> None:
    with open(directory / f"raw-{rank}", "rb", buffering=0) as file:
        for tensor in tensors:
            view = memoryview(tensor.numpy().reshape(-1)).cast("B")
            while len(view):
                view = view[file.readinto(view) :]


def run(rank: int, port: int, states: dict[str, Any], rounds: int, directory: str, answers: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(NUM_RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ours.get_platform().init_process_group()
    results: dict[Any, tuple[float, int]] = {}
    for label, (count, shape) in states.items():
        measure_state(rank, label, count, shape, rounds, Path(directory), results)
    if rank == 0:
        answers.put(results)
    dist.barrier()
    dist.destroy_process_group()


def measure_state(
    rank: int, label: str, count: int, shape: tuple[int, ...], rounds: int, directory: Path, results: dict[Any, Any]
) -> None:
    def note(library: str, what: str, function: Callable[[], Any]) -> None:
        seconds, growth = timed(function)
        best = results.get((label, what, library), (math.inf, 0))
        results[label, what, library] = (min(best[0], seconds), max(best[1], growth))

    for number in range(rounds):
        mine, other = directory / f"ours-{number}", directory / f"torch-{number}"

        def save_ours(mine: Path = mine) -> None:
            state = our_state(count, shape, 0, fill=True)
            note("ours", "save", lambda: checkpoint.save(state, checkpoint_id=mine))
            stall(note, "ours", lambda: checkpoint.async_save(state, checkpoint_id=mine))

        def save_theirs(other: Path = other) -> None:
            state = their_state(count, shape, 0, fill=True)
            note("torch", "save", lambda: dcp.save(state, checkpoint_id=other))
            stall(note, "torch", lambda: dcp.async_save(state, checkpoint_id=other))

        def save_raw() -> None:
            blocks = [tensor.to_local() for tensor in our_state(count, shape, 0, fill=True).values()]
            note("raw", "save", lambda: raw_write(directory, rank, blocks))
            stall(note, "raw", lambda: [block.clone() for block in blocks])

        # In turn, so that nobody always comes after the same one.
        saves = [save_ours, save_theirs, save_raw]
        for save in saves[number % 3 :] + saves[: number % 3]:
            save()
            os.sync()
        for what, dim in (("load", 0), ("load, other layout", 1)):
            state = our_state(count, shape, dim, fill=False)
            note("ours", what, lambda state=state, mine=mine: checkpoint.load(state, checkpoint_id=mine))
            blocks = [tensor.to_local().contiguous() for tensor in state.values()]
            note("raw", what, lambda blocks=blocks: raw_read(directory, rank, blocks))
            del state, blocks
            state = their_state(count, shape, dim, fill=False)
            note("torch", what, lambda state=state, other=other: dcp.load(state, checkpoint_id=other))
            del state
        dist.barrier()
        if rank == 0:
            shutil.rmtree(mine)
            shutil.rmtree(other)


def stall(note: Callable[..., None], library: str, start: Callable[[], Any]) -> None:
    """How long training stands still for a save in the background; the save itself is awaited outside of that."""
    started = []
    note(library, "async save, stall", lambda: started.append(start()))
    if library != "raw":
        started[0].result()
    dist.barrier()


def time_planning(num_ranks: int = 1024, num_tensors: int = 5000) -> float:
    """Seconds to plan what one rank of many writes."""
    mesh = ours.init_device_mesh(
        "cpu", (num_ranks // 8, 8), mesh_dim_names=("dp", "tp"), rank_list=range(num_ranks), init_backend=False
    )
    choices = [
        ours.Layout.from_placements(mesh, row, 2)
        for row in (
            (ours.Shard(0), ours.Shard(1)),
            (ours.Shard(0), ours.Replicate()),
            (ours.Replicate(), ours.Shard(1)),
            (ours.Replicate(), ours.Replicate()),
        )
    ]
    specs = {f"w{i}": TensorSpec((1024 + i, 4096), "bfloat16", (choices[i % 4],)) for i in range(num_tensors)}
    start = time.perf_counter()
    planned = list(plan_chunks(specs, num_ranks, 0))
    assert planned
    return time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small states")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("small", "large"), help="one of the two states")
    parser.add_argument("--directory", help="where to write; default: a temporary directory")
    options = parser.parse_args()
    states = QUICK_STATES if options.quick else STATES
    if options.only:
        label = list(states)[options.only == "large"]
        states = {label: states[label]}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        context = mp.get_context("spawn")
        answers = context.SimpleQueue()
        arguments = (port, states, options.rounds, directory, answers)
        processes = mp.spawn(run, args=arguments, nprocs=NUM_RANKS, join=False)
        while not processes.join(timeout=0.1):
            if not answers.empty():
                break
        results = answers.get()
        processes.join()
    report(results, list(states))
    return 0


def report(results: dict[Any, Any], labels: list[str]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 130)
    table = Table("state", "what", "ours, s", "torch, s", "raw, s", "ratio", "target", "our memory", "torch memory")
    for label in labels:
        is_large = "MiB" in label
        for what, targets in TARGETS.items():
            (mine, my_growth), (other, their_growth), (raw, _) = (
                results[label, what, library] for library in ("ours", "torch", "raw")
            )
            cells = (f"{mine:.3f}", f"{other:.3f}", f"{raw:.3f}", f"{mine / other:.3f}", f"{targets[is_large]}")
            table.add_row(label, what, *cells, f"{my_growth >> 20} MiB", f"{their_growth >> 20} MiB")
    console.print(table)
    console.print(f"planning for 1,024 ranks and 5,000 tensors: {time_planning():.2f} s on one rank (target 1)")


if __name__ == "__main__":
    sys.exit(main())
