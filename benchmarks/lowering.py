"""Forward and backward of one tensor-parallel block: by dispatch, as its recorded program, and compiled; in turns.

One process with a process group whose collectives return at once, so that only the work of a rank's processor is
measured; with ``--ranks`` two real ones over gloo. Besides: the plain block on local shapes under ``torch.compile``,
which communicates nothing, and torch's DTensor under ``torch.compile``. Times are the fastest of many rounds that
alternate; the exit status is 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import copy
import gc
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.tensor_parallel import Block

WIDTH, SHAPE = 64, (2, 64, 64)
TARGETS = {"local": 0.75, "inductor": 0.55}  # the largest share of dispatch's time
PLAIN_TARGET, TORCH_TARGET = 1.15, 0.7  # inductor's share of the plain compiled block's time, and of torch's


def plan(styles: Any) -> dict[str, Any]:
    """The same plan in either library's classes."""
    columns = [f"attention.{name}" for name in "qkv"] + ["mlp.gate", "mlp.up"]
    rows = ["attention.o", "mlp.down"]
    return {name: styles.ColwiseParallel() for name in columns} | {name: styles.RowwiseParallel() for name in rows}


def local_part(block: Block) -> Block:
    """A block of the shapes that a rank has."""
    part = copy.deepcopy(block)
    half = WIDTH // 2
    for name in "qkv":
        layer = getattr(part.attention, name)
        layer.weight = torch.nn.Parameter(layer.weight[:half].detach().clone())
    part.attention.o.weight = torch.nn.Parameter(part.attention.o.weight[:, :half].detach().clone())
    for layer in (part.mlp.gate, part.mlp.up):
        layer.weight = torch.nn.Parameter(layer.weight[: 2 * WIDTH].detach().clone())
    part.mlp.down.weight = torch.nn.Parameter(part.mlp.down.weight[:, : 2 * WIDTH].detach().clone())
    return part


def step_of(block: Any, x: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        block(x).sum().backward()
        for parameter in block.parameters():
            parameter.grad = None
        x.grad = None

    return step


def makers(with_peers: bool) -> dict[str, Callable[[], None]]:
    import torch.distributed.tensor.parallel as theirs

    import hyper_parallel as hp

    torch.manual_seed(0)
    block, x = Block(WIDTH), torch.randn(SHAPE, requires_grad=True)
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    steps = {}
    for name in ("dispatch", "local", "inductor"):
        made = hp.parallelize_module(copy.deepcopy(block), mesh, plan(hp))
        if name != "dispatch":
            hp.lower(made, "", backend=name)
        steps[name] = step_of(made, x)
    if with_peers:
        steps["plain compiled"] = step_of(torch.compile(local_part(block)), x)
        their_mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        other = theirs.parallelize_module(copy.deepcopy(block), their_mesh, plan(theirs))
        steps["torch compiled"] = step_of(torch.compile(other), x)
    return steps


def times_of(
    steps: dict[str, Callable[[], None]], num_rounds: int, clock: Callable[[], int] = time.perf_counter_ns
) -> dict[str, tuple[float, float]]:
    """The least and the median time of each in us, interleaved."""
    seen: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        for _ in range(5):
            step()
    gc.disable()
    for _ in range(num_rounds):
        for name, step in steps.items():
            start = clock()
            step()
            seen[name].append((clock() - start) / 1e3)
    return {name: (min(times), statistics.median(times)) for name, times in seen.items()}


def measure(rank: int, store_file: str, num_rounds: int, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store_file}", rank=rank, world_size=2)
    times = times_of(makers(with_peers=False), num_rounds)
    if rank == 0:
        results.put(times)
    dist.barrier()
    dist.destroy_process_group()


def real_ranks(num_rounds: int) -> dict[str, tuple[float, float]]:
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure, (os.path.join(folder, "store"), num_rounds, results), nprocs=2)
        return results.get()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--ranks", action="store_true", help="two real ranks over gloo")
    options = parser.parse_args()
    num_rounds = 60 if options.quick else 400
    if options.ranks:
        times = real_ranks(num_rounds)
    else:
        import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"

        torch.set_num_threads(1)
        dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
        times = times_of(
            makers(with_peers=True), num_rounds, time.thread_time_ns
        )  # which other programs hardly disturb
    place = 1 if options.ranks else 0
    base = times["dispatch"][place]
    table = Table("way", "least, us", "median, us", "of dispatch", "target", title=f"a block of width {WIDTH}")
    missed = []
    for name, (least, median) in times.items():
        limit = 1.0 if options.ranks else TARGETS.get(name, math.inf)
        share = times[name][place] / base
        if name in TARGETS and share > limit:
            missed.append(f"{name}: {share:.2f} of dispatch, target {limit}")
        shown = f"{limit:g}" if name in TARGETS else "-"
        table.add_row(name, f"{least:.0f}", f"{median:.0f}", f"{share:.2f}", shown)
    if not options.ranks:
        for other, limit in (("plain compiled", PLAIN_TARGET), ("torch compiled", TORCH_TARGET)):
            share = times["inductor"][0] / times[other][0]
            if share > limit:
                missed.append(f"inductor: {share:.2f} of {other}, target {limit}")
    Console(width=110).print(table)
    print("all targets met" if not missed else f"MISSED: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
