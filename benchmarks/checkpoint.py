"""Checkpoints, ours against ``torch.distributed.checkpoint`` and against the bare writing and reading of the bytes.

Four ranks, in one run. Two states: many small tensors (2,000 of 16 KiB) and few large ones (32 of 32 MiB). Every round
does the same thing with all three, in another order each time; a time is from a common start to the end of the last
rank, and the smallest of all rounds. Everybody fsyncs its files: we do, torch does by default, and so does the bare
writing. Before each save the disk has finished what was written before. Loading is from files in the page cache for
all. *Stall* is how long ``async_save`` keeps its caller; torch's gets a process group of its own, without which its
thread would mix up its messages with those of the program. Its peer is the bare copy of the bytes to memory that is
there already, as ours is from the second save on; so the first round does not count. It is measured once more with no
more ranks than processors: what ranks say to each other before they copy, 2 ms of a processor for each, takes longer
where they wait for processors. Torch copies to new memory, and is quick in rounds in which the allocator has some at
hand from before, so the median is shown too. Memory is the largest growth of a rank's resident set while it saves or
loads. Planning is measured for 1,024 simulated ranks.

    python -m benchmarks.checkpoint [--quick] [--rounds N] [--only small|large] [--directory DIR]
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
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
from hyper_parallel.core.distributed_checkpoint.planning.chunks import TensorSpec, plan_chunks

NUM_RANKS = 4
SMALL, LARGE = "2,000 x 16 KiB", "32 x 32 MiB"
STATES = {SMALL: (2000, (64, 64)), LARGE: (32, (2048, 4096))}
QUICK_STATES = {SMALL: (200, (64, 64)), LARGE: (4, (1024, 2048))}
LIBRARIES = ("ours", "torch", "raw")
SAVE, LOAD, RESHARD = "save", "load", "load, other layout"
STALL, OWN_STALL = "async save, stall", "stall, a processor each"
# The largest ratio to the time of torch, or of the bare copy, that is wanted; None: shown only.
TARGETS = {
    SMALL: {SAVE: 0.1, LOAD: 0.1, RESHARD: 0.1, STALL: None, OWN_STALL: None},
    LARGE: {SAVE: 1.0, LOAD: 1.0, RESHARD: 0.7, STALL: None, OWN_STALL: 1.1},
}
PEERS = {SAVE: "torch", LOAD: "torch", RESHARD: "torch", STALL: "raw", OWN_STALL: "raw"}
PLANNING_SECONDS = 1.0
# Of each way to save and to load. Large states are at the mercy of the disk, and quick to save, so they get more.
ROUNDS = {SMALL: 3, LARGE: 9}


# ---------------------------------------------------------------- what is saved and loaded


def our_state(count: int, shape: tuple[int, ...], dim: int, fill: bool) -> dict[str, Any]:
    mesh = ours.init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        f"layer.{i}.weight": ours.DTensor.from_local(local(shape, dim, fill), mesh, [ours.Shard(dim)])
        for i in range(count)
    }


def their_state(count: int, shape: tuple[int, ...], dim: int, fill: bool) -> dict[str, Any]:
    mesh = theirs.init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        f"layer.{i}.weight": theirs.DTensor.from_local(
            local(shape, dim, fill), mesh, [theirs.Shard(dim)], run_check=False
        )
        for i in range(count)
    }


def bare_state(count: int, shape: tuple[int, ...], dim: int, fill: bool) -> list[torch.Tensor]:
    return [local(shape, dim, fill) for _ in range(count)]


def local(shape: tuple[int, ...], dim: int, fill: bool) -> torch.Tensor:
    sizes = [size // dist.get_world_size() if d == dim else size for d, size in enumerate(shape)]
    return torch.rand(sizes) if fill else torch.zeros(sizes)


def raw_write(directory: Path, tensors: list[torch.Tensor]) -> None:
    descriptor = os.open(directory / f"raw-{dist.get_rank()}", os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    for tensor in tensors:
        view = memoryview(tensor.numpy().reshape(-1)).cast("B")
        while len(view):
            view = view[os.write(descriptor, view) :]
    os.fsync(descriptor)
    os.close(descriptor)


def bare_copy(targets: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    for target, tensor in zip(targets, tensors, strict=True):
        target.copy_(tensor)


def raw_read(directory: Path, tensors: list[torch.Tensor]) -> None:
    with open(directory / f"raw-{dist.get_rank()}", "rb", buffering=0) as file:
        for tensor in tensors:
            view = memoryview(tensor.numpy().reshape(-1)).cast("B")
            while len(view):
                view = view[file.readinto(view) :]


# ---------------------------------------------------------------- measuring


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


class Measured:
    """Seconds of every round, from a common start to the end of the last rank; bytes of growth of the largest rank.

    There are more ranks than processors: by its own clock a rank that has to wait for another one's processor before it
    begins would look quick.
    """

    def __init__(self) -> None:
        self.seconds: dict[Any, list[float]] = {}
        self.growth: dict[Any, int] = {}

    def run(self, key: tuple[str, str, str], function: Callable[[], Any]) -> Any:
        memory = Memory()
        memory.start()
        start = _most(time.perf_counter()) + 0.01  # One host has one clock.
        time.sleep(max(0.0, start - time.perf_counter()))
        result = function()
        self.seconds.setdefault(key, []).append(_most(time.perf_counter()) - start)
        self.growth[key] = max(self.growth.get(key, 0), int(_most(memory.growth())))
        return result


def _most(number: float) -> float:
    """The largest of all ranks'."""
    box = torch.tensor(number, dtype=torch.float64)
    dist.all_reduce(box, dist.ReduceOp.MAX)
    return float(box)


def in_turn(number: int) -> Iterator[str]:
    """The libraries, in another order in each round, so that nobody always comes after the same one."""
    yield from LIBRARIES[number % 3 :] + LIBRARIES[: number % 3]


def settle() -> None:
    """Let the disk finish, and the ranks meet."""
    if dist.get_rank() == 0:
        os.sync()
    dist.barrier()


def run(
    rank: int, num_ranks: int, port: int, states: dict[str, Any], rounds: int | None, directory: str, answers: Any
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ours.get_platform().init_process_group()
    measured = Measured()
    for label, (count, shape) in states.items():
        measure = measure_state if num_ranks == NUM_RANKS else measure_stalls
        measure(label, count, shape, rounds or ROUNDS[label], Path(directory), measured)
    if rank == 0:
        answers.put((measured.seconds, measured.growth))
    dist.barrier()
    dist.destroy_process_group()


MAKE = {"ours": our_state, "torch": their_state, "raw": bare_state}


def place(directory: Path, library: str, number: int) -> Path:
    path = directory / f"{library}-{number}"
    if library == "raw":
        path.mkdir(exist_ok=True)
    return path


def remove(path: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(path)
    settle()


def measure_stalls(
    label: str, count: int, shape: tuple[int, ...], rounds: int, directory: Path, measured: Measured
) -> None:
    what = STALL if dist.get_world_size() == NUM_RANKS else OWN_STALL
    group = dist.new_group(backend="gloo")
    begin_save = {
        "ours": lambda state, path: checkpoint.async_save(state, checkpoint_id=path),
        "torch": lambda state, path: dcp.async_save(state, checkpoint_id=path, process_group=group),
        "raw": lambda state, path: bare_copy(copies, state),
    }
    states: dict[str, Any] = {library: MAKE[library](count, shape, 0, True) for library in ("ours", "torch")}
    states["raw"] = [
        tensor.to_local() for tensor in states["ours"].values()
    ]  # the same memory: not all is equally near
    copies = bare_state(count, shape, 0, True)
    for number in range(rounds + 1):
        for library in in_turn(number):
            path = place(directory, library, number)
            settle()
            handle = measured.run(
                (label, what, library), lambda s=states[library], p=path, f=begin_save[library]: f(s, p)
            )
            if library != "raw":
                handle.result()
            del handle
            remove(path)


def measure_state(
    label: str, count: int, shape: tuple[int, ...], rounds: int, directory: Path, measured: Measured
) -> None:
    save = {
        "ours": lambda state, path: checkpoint.save(state, checkpoint_id=path),
        "torch": lambda state, path: dcp.save(state, checkpoint_id=path),
        "raw": lambda state, path: raw_write(path, state),
    }
    load = {
        "ours": lambda state, path: checkpoint.load(state, checkpoint_id=path),
        "torch": lambda state, path: dcp.load(state, checkpoint_id=path),
        "raw": lambda state, path: raw_read(path, state),
    }
    states = {library: MAKE[library](count, shape, 0, True) for library in LIBRARIES}
    for number in range(rounds):
        for library in in_turn(number):
            path = place(directory, library, number)
            settle()
            measured.run((label, SAVE, library), lambda s=states[library], p=path, f=save[library]: f(s, p))
            if number < rounds - 1:
                remove(path)
    del states
    for number in range(rounds):
        for what, dim in ((LOAD, 0), (RESHARD, 1)):
            for library in in_turn(number):
                state: Any = MAKE[library](count, shape, dim, False)
                path = place(directory, library, rounds - 1)
                measured.run((label, what, library), lambda s=state, p=path, f=load[library]: f(s, p))
                del state
    for library in LIBRARIES:
        remove(place(directory, library, rounds - 1))
    measure_stalls(label, count, shape, rounds, directory, measured)


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


# ---------------------------------------------------------------- telling


def report(seconds: dict[Any, list[float]], growth: dict[Any, int], labels: list[str]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 130)
    table = Table("state", "what", "ours, s", "torch, s", "raw, s", "ratio", "to", "at most", "reached")
    memory = Table("state", "what", "our memory", "torch memory", "reached")
    firsts = {
        (label, what, library): seconds[label, what, library].pop(0)
        for label in labels
        for what in (STALL, OWN_STALL)
        for library in LIBRARIES
    }
    for label in labels:
        for what, target in TARGETS[label].items():
            least = {library: min(seconds[label, what, library]) for library in LIBRARIES}
            ratio = least["ours"] / least[PEERS[what]]
            cells = (*(f"{least[library]:.3f}" for library in LIBRARIES), f"{ratio:.3f}", PEERS[what])
            table.add_row(label, what, *cells, "" if target is None else f"{target}", yes(ratio, target))
            if label == LARGE:
                used = [round(growth[label, what, library] / 2**20) for library in ("ours", "torch")]
                memory.add_row(
                    label, what, *(f"{size} MiB" for size in used), "" if what in (STALL, OWN_STALL) else yes(*used)
                )
    console.print(table)
    if LARGE in labels:
        console.print(memory)
    for label in labels:
        for what in (SAVE, STALL, OWN_STALL):
            spread = "; ".join(
                f"{library} {min(times):.3f}, {statistics.median(times):.3f}, {max(times):.3f} s"
                for library in LIBRARIES
                for times in [seconds[label, what, library]]
            )
            console.print(f"{label}, {what}, least, median and most of all rounds: {spread}")
        console.print(f"{label}: our first stall, with the start of writers: {firsts[label, STALL, 'ours']:.2f} s")
    planning = time_planning()  # once: a second time would find its answers remembered
    console.print(
        f"planning for 1,024 ranks and 5,000 tensors: {planning:.2f} s on one rank (at most {PLANNING_SECONDS:g}: "
        f"{yes(planning, PLANNING_SECONDS)})"
    )


def yes(found: float, target: float | None) -> str:
    return "" if target is None else "yes" if found <= target else "no"


def measure_world(num_ranks: int, states: dict[str, Any], options: argparse.Namespace) -> tuple[Any, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        context = mp.get_context("spawn")
        answers = context.SimpleQueue()
        arguments = (num_ranks, port, states, options.rounds, directory, answers)
        processes = mp.spawn(run, args=arguments, nprocs=num_ranks, join=False)
        while not processes.join(timeout=0.1):
            if not answers.empty():
                break
        found = answers.get()
        processes.join()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small states; the ratios mean little then")
    parser.add_argument("--rounds", type=int, help=f"of everything; default: {ROUNDS[SMALL]} and {ROUNDS[LARGE]}")
    parser.add_argument("--only", choices=("small", "large"), help="one of the two states")
    parser.add_argument("--directory", help="where to write; default: a temporary directory")
    options = parser.parse_args()
    states = QUICK_STATES if options.quick else STATES
    if options.only:
        label = {"small": SMALL, "large": LARGE}[options.only]
        states = {label: states[label]}
    seconds, growth = measure_world(NUM_RANKS, states, options)
    own_seconds, own_growth = measure_world(min(NUM_RANKS - 1, len(os.sched_getaffinity(0))), states, options)
    seconds, growth = seconds | own_seconds, growth | own_growth
    report(seconds, growth, list(states))
    return 0


if __name__ == "__main__":
    sys.exit(main())
