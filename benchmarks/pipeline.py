"""A step of a pipeline: ours and ``torch.distributed.pipelining``, in turns, on the same stages.

One thread per process. 8 blocks of width 64 and of width 256, cut for two ranks; a step is forward and backward of 8
micro-batches. Both libraries run the same modules, losses and splits. Times are the fastest of many rounds that
alternate between the libraries, since everything that disturbs a step makes it slower; beside them the processor time
of the main thread, which does not see who else uses the machine. Live bytes are those of all memory that a step makes
and holds at once, gradients included, on the rank that holds most.

``--width 256`` measures that width alone. ``--order`` compares schedules with each other instead: the fastest step of
each, what the simulator says with the processor times of its actions, to which waiting adds nothing, and whether both
have one order; simulated times within 3 % count as equal. ``--quick`` takes fewer rounds; the exit status
is 1 when a target is missed, or the orders differ.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
import weakref
from collections import Counter
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
ORDERED = ("gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_h2", "zb1p", "zbv", "v_half", "dual_pipe_v")
ALIKE = 0.03  # schedules whose simulated times differ by less have no order


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


def _run(schedule: str, width: int) -> Any:
    import hyper_parallel as hp
    from hyper_parallel.core.pipeline_parallel import make_table

    def loss(outputs: torch.Tensor, batch: Any) -> tuple[torch.Tensor, int]:
        return (outputs * outputs).sum(), outputs.numel()

    loss.count = lambda batch: torch.tensor(float(batch["x"].numel()))  # type: ignore[attr-defined]
    num_stages = make_table(schedule, RANKS, MICROBATCHES).stages.num_stages
    stages = [NUM_BLOCKS // num_stages] * num_stages
    return hp.parallelize(
        Model(width), pp=RANKS, schedule=schedule, microbatches=MICROBATCHES, loss=loss, stages=stages
    )


def _ours(schedule: str, width: int, x: torch.Tensor) -> Callable[[], Any]:
    run = _run(schedule, width)

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


def _best(steps: dict[str, Callable[[], Any]], rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """The fastest step of each, and the least processor time of this thread in it on the rank that needs most."""
    best, work = dict.fromkeys(steps, float("inf")), dict.fromkeys(steps, float("inf"))
    for step in steps.values():
        step()
        step()
    for _ in range(rounds):
        for name, step in steps.items():
            dist.barrier()
            begin, worked = time.perf_counter(), time.thread_time()
            step()
            work[name] = min(work[name], time.thread_time() - worked)
            dist.barrier()
            best[name] = min(best[name], time.perf_counter() - begin)
    most = torch.tensor([work[name] for name in steps])
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return best, dict(zip(steps, most.tolist(), strict=True))


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


class _ActionTimes:
    """Processor time of this thread in each kind of action."""

    def __init__(self, run: Any) -> None:
        self._seconds: Counter[str] = Counter()
        self._numbers: Counter[str] = Counter()
        self._at_work, self._since = "", 0.0
        run.pipeline.observe(lambda action: self.begins(action.kind.value))

    def begins(self, kind: str) -> None:
        now = time.thread_time()
        self._seconds[self._at_work] += now - self._since
        self._numbers[kind] += 1
        self._at_work, self._since = kind, now

    def forget(self) -> None:
        self._seconds.clear()
        self._numbers.clear()

    def mean(self, *kinds: str) -> float:
        return sum(self._seconds[kind] for kind in kinds) / max(1, sum(self._numbers[kind] for kind in kinds))

    def of_microbatch(self, stages_per_rank: int) -> list[float]:
        """Forward, input gradient and weight gradient of all stages of the rank, and a message."""
        inputs, weights = self.mean("I"), self.mean("W")
        if not self._numbers["I"]:
            inputs = weights = self.mean("B") / 2
        message = self.mean("SEND_F", "SEND_B") + self.mean("RECV_F", "RECV_B")
        return [stages_per_rank * one for one in (self.mean("F"), inputs, weights)] + [message]


def _orders(width: int, rounds: int, x: torch.Tensor) -> dict[str, tuple[float, float]]:
    """The fastest step of each schedule and what is simulated with the times of its actions."""
    from hyper_parallel.core.pipeline_parallel import Times, make_table, prepare, simulate

    runs = {schedule: _run(schedule, width) for schedule in ORDERED}
    times = {schedule: _ActionTimes(run) for schedule, run in runs.items()}

    def step_of(schedule: str) -> Callable[[], None]:
        def step() -> None:
            runs[schedule].forward_backward(x=x)
            times[schedule].begins("")
            runs[schedule].zero_grad()

        return step

    steps = {schedule: step_of(schedule) for schedule in ORDERED}
    for schedule, step in steps.items():
        step()
        step()
        times[schedule].forget()
    fastest, _ = _best(steps, rounds)
    found = {}
    for schedule in ORDERED:
        table = make_table(schedule, RANKS, MICROBATCHES)
        mine = torch.tensor(times[schedule].of_microbatch(table.stages.stages_per_rank), dtype=torch.float64)
        dist.all_reduce(mine)
        given = Times(*(mine[:3] / RANKS).tolist(), message=float(mine[3]) / RANKS)
        found[schedule] = (fastest[schedule], simulate(prepare(table), given).makespan)
    return found


def _on_a_rank(rank: int, port: int, width: int, rounds: int, folder: str, order: bool) -> None:
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(RANKS), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(RANKS), HYPER_PARALLEL_PLATFORM="torch")
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    x = torch.randn(ROWS, LENGTH, width)
    found: dict[str, Any] = _orders(width, rounds, x) if order else {}
    for schedule, (_, places, _, _) in {} if order else CASES.items():
        num_stages = RANKS * len(places[0])
        steps = {
            "ours": _ours(schedule, width, x),
            "theirs": _theirs(schedule, width, x, num_stages, rank),
        }
        times = _best(steps, rounds)
        live = torch.tensor([_live_bytes(step) for step in steps.values()])
        dist.all_reduce(live, dist.ReduceOp.MAX)
        found[schedule] = (*times, live.tolist())
    if rank == 0:
        torch.save(found, Path(folder) / "found")
    dist.destroy_process_group()


def _measure(width: int, rounds: int, order: bool = False) -> dict[str, Any]:
    import socket

    with socket.socket() as free, tempfile.TemporaryDirectory() as folder:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        mp.spawn(_on_a_rank, (port, width, rounds, folder, order), nprocs=RANKS)
        return dict(torch.load(Path(folder) / "found"))


def _compare_orders(console: Console, width: int, rounds: int) -> int:
    found = _measure(width, rounds, order=True)
    shown = Shown("schedule", "measured, ms", "simulated, ms", "measured / simulated", title=f"width {width}")
    for schedule, (measured, simulated) in sorted(found.items(), key=lambda one: one[1][1]):
        shown.add_row(schedule, f"{1e3 * measured:.2f}", f"{1e3 * simulated:.2f}", f"{measured / simulated:.2f}")
    console.print(shown)
    differ = 0
    for (one, (took, said)), (other, (other_took, other_said)) in itertools.combinations(found.items(), 2):
        if abs(said - other_said) > ALIKE * max(said, other_said) and (said < other_said) != (took < other_took):
            console.print(f"missed: {one} and {other} in the other order than simulated", style="red")
            differ += 1
    return 1 if differ else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--width", type=int, choices=(64, 256), action="append", help="this width alone")
    parser.add_argument("--order", action="store_true", help="measured and simulated order of schedules, at width 256")
    asked = parser.parse_args()
    rounds = 10 if asked.quick else 40
    console, missed = Console(width=120), []
    if asked.order:
        return max(_compare_orders(console, width, rounds) for width in asked.width or (256,))
    times = Shown(
        *("width", "schedule", "ours, ms", "torch, ms", "share", "target", "of its CPU time"),
        *("live, kB", "torch", "share", "target"),
    )
    for width in asked.width or (64, 256):
        found = _measure(width, rounds)
        for schedule, (fastest, work, (live, their_live)) in found.items():
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
                f"{work['ours'] / work['theirs']:.2f}",
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
