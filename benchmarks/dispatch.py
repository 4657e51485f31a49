"""What an operator on a distributed tensor costs over the plain one: ours and ``torch.distributed.tensor``, in turns.

Two processes, one thread each, 8 x 8 tensors cut by rows, layouts that need no communication: what is measured is the
dispatch. Overhead is the time of a call minus that of the plain operator on a tensor of the block's size. Times are
processor times, since nothing here waits and other work on the machine should not count, and the fastest of many rounds
that alternate between plain, ours and torch's, since everything that disturbs a call makes it slower.

``--quick`` takes fewer rounds; the exit status is 1 when a target is missed. With ``--platform=mindspore`` it is
MindSpore that is measured (``_dispatch_mindspore.py``).
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "--platform=mindspore" in sys.argv:  # before PyTorch is imported, which need not be there
    from _dispatch_mindspore import main as main_on_mindspore

    sys.exit(main_on_mindspore())

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

WORLD_SIZE = 2
NUM_PARAMETERS = 200
FORWARD, BLOCK = "forward", "forward and backward, 10 operators"
# The largest share of torch's overhead that ours may be; forward operators together, by their geometric mean.
TARGETS = {FORWARD: 0.5, BLOCK: 0.2, "AdamW default": 0.3, "AdamW foreach": 0.5, "AdamW fused": 0.5}

Call = Callable[[], object]
Maker = Callable[[torch.Tensor, bool], Any]  # a value, and whether it is cut by rows or whole


def makers() -> dict[str, Maker]:
    """How each of the three makes a tensor of a global value."""
    import torch.distributed.tensor as theirs

    import hyper_parallel as hp

    our_mesh = hp.init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("x",))
    their_mesh = dist.init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("x",))

    def plain(value: torch.Tensor, is_cut: bool) -> torch.Tensor:
        return value.chunk(WORLD_SIZE)[dist.get_rank()].clone() if is_cut else value.clone()

    def ours(value: torch.Tensor, is_cut: bool) -> Any:
        return hp.distribute_tensor(value, our_mesh, [hp.Shard(0) if is_cut else hp.Replicate()])

    def torchs(value: torch.Tensor, is_cut: bool) -> Any:
        placement = theirs.Shard(0) if is_cut else theirs.Replicate()
        return theirs.distribute_tensor(value, their_mesh, [placement])

    return {"plain": plain, "ours": ours, "torch": torchs}


def forward_calls(make: Maker) -> dict[str, Call]:
    torch.manual_seed(0)
    x, y = make(torch.randn(8, 8), True), make(torch.randn(8, 8), True)
    weight, bias = make(torch.randn(8, 8), False), make(torch.randn(8), False)
    rows = x.shape[0]
    return {
        "add": lambda: x + y,
        "relu": lambda: torch.relu(x),
        "mm": lambda: torch.mm(x, weight),
        "linear": lambda: F.linear(x, weight, bias),
        "layer_norm": lambda: F.layer_norm(x, (8,), bias, bias),
        "view": lambda: x.view(rows, 2, 4),
        "getitem": lambda: x[:, :4],
    }


def block_call(make: Maker) -> Call:
    torch.manual_seed(0)
    x = make(torch.randn(8, 8), True).requires_grad_()
    first, second = make(torch.randn(8, 8), False), make(torch.randn(8, 8), False)
    bias, gradient = make(torch.randn(8), False), make(torch.randn(8, 8), True)

    def run() -> None:
        x.grad = None
        hidden = torch.relu(F.linear(x, first, bias))
        hidden = torch.sigmoid(hidden) * hidden + x
        out = F.linear(hidden, second)
        out = torch.tanh(out) * hidden - x
        (out * 0.5).backward(gradient)

    return run


def optimizer_call(make: Maker, **mode: bool) -> Call:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(make(torch.randn(8, 8), True)) for _ in range(NUM_PARAMETERS)]
    for parameter in parameters:
        parameter.grad = make(torch.randn(8, 8), True)
    return torch.optim.AdamW(parameters, lr=1e-3, **mode).step


def fastest(calls: dict[str, Call], num_rounds: int, num_calls: int) -> dict[str, float]:
    """The least time of one call of each in us, over rounds that alternate between them."""
    best = dict.fromkeys(calls, math.inf)
    for turn in range(num_rounds + 1):
        for name, call in calls.items():
            start = time.process_time_ns()
            for _ in range(num_calls):
                call()
            taken = (time.process_time_ns() - start) / 1e3 / num_calls
            if turn > 0:  # the first round plans the calls
                best[name] = min(best[name], taken)
    return best


def is_gathering(call: Call) -> bool:
    """Whether the operator has no rule, so that its time would say nothing about the dispatch."""
    from hyper_parallel.core.shard.dispatching.strict_mode import strict

    try:
        with strict(implicit_redistribution=True):
            call()
    except RuntimeError:
        return True
    return False


def measure(rank: int, store_file: str, quick: bool, results: mp.SimpleQueue) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store_file}", rank=rank, world_size=WORLD_SIZE)
    made = makers()
    gc.disable()
    num_rounds = 30 if quick else 200

    def report(kind: str, name: str, calls: dict[str, Call], num_rounds: int, num_calls: int) -> None:
        dist.barrier()
        missing = kind == FORWARD and is_gathering(calls["ours"])
        times = None if missing else fastest(calls, num_rounds, num_calls)
        if rank == 0:
            results.put((kind, name, times))

    forward = {which: forward_calls(make) for which, make in made.items()}
    for name in forward["plain"]:
        report(FORWARD, name, {which: calls[name] for which, calls in forward.items()}, num_rounds, 50)
    report(BLOCK, BLOCK, {which: block_call(make) for which, make in made.items()}, num_rounds, 10)
    for name, mode in (("default", {}), ("foreach", {"foreach": True}), ("fused", {"fused": True})):
        steps = {which: optimizer_call(make, **mode) for which, make in made.items()}
        report(f"AdamW {name}", f"AdamW {name}, {NUM_PARAMETERS} parameters", steps, 10 if quick else 40, 1)
    dist.barrier()
    dist.destroy_process_group()


def overheads(times: dict[str, float]) -> tuple[float, float]:
    return times["ours"] - times["plain"], times["torch"] - times["plain"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    quick = parser.parse_args().quick
    rows: list[tuple[str, str, dict[str, float] | None]] = []
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        results = context.SimpleQueue()
        ranks = mp.spawn(measure, (os.path.join(folder, "store"), quick, results), nprocs=WORLD_SIZE, join=False)
        while not ranks.join(timeout=0.2) or not results.empty():
            while not results.empty():
                rows.append(results.get())
    table = Table("call", title="Time of a call and what it costs over the plain one", title_justify="left")
    for heading in ("plain, us", "torch DTensor, us", "ours, us", "overhead torch", "overhead ours", "ratio", "target"):
        table.add_column(heading, justify="right")
    ratios: dict[str, list[float]] = {kind: [] for kind in TARGETS}
    for kind, name, times in rows:
        if times is None:
            table.add_row(name, *("-",) * 3, "-", "no rule yet", "-", "")
            continue
        ours, theirs = overheads(times)
        ratio = max(ours, 0.01) / max(theirs, 0.01)
        ratios[kind].append(ratio)
        target = "" if kind == FORWARD else f"{TARGETS[kind]:g}"
        numbers = (times["plain"], times["torch"], times["ours"], theirs, ours)
        table.add_row(name, *(f"{number:.1f}" for number in numbers), f"{ratio:.2f}", target)
    means = {kind: math.exp(sum(map(math.log, found)) / len(found)) for kind, found in ratios.items() if found}
    table.add_section()
    table.add_row("forward, geometric mean", *("",) * 5, f"{means.get(FORWARD, math.nan):.2f}", f"{TARGETS[FORWARD]:g}")
    Console(width=130).print(table)
    missed = [kind for kind in TARGETS if not means.get(kind, math.inf) <= TARGETS[kind]]
    print("all targets met" if not missed else f"MISSED: {', '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
