"""Platform collectives against the raw torch.distributed calls, both in turns in one run.

Two tables. *Between two processes*: both calls on the same gloo group from 4 B to 64 MiB, one after the other in turns;
the time is the fastest of many, since everything that disturbs a call makes it slower. Gloo alone varies by more than
the few microseconds in question, so the second table, *the call alone*, runs both on torch's "fake" backend, which does
everything of a process group except communicate: the difference is what our side of the call costs, with the comparison
that ranks on one host make over gloo. Both sides include the allocation of the result where there is one, because the
platform's calls return a new tensor.

``--quick`` measures fewer sizes; the exit status is 1 when a call alone costs over 3 us more than the raw one.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hyper_parallel.platform.checks.call_ledger import CallLedger
from hyper_parallel.platform.checks.ledger_pages import Pages
from hyper_parallel.platform.checks.message_ledger import MessageLedger
from hyper_parallel.platform.torch.communication import collectives, group_facts, groups

LIMIT_US = 3.0
WORLD_SIZE = 2
SIZES = [4, 64, 1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20]
QUICK_SIZES = [4, 1 << 10, 256 << 10, 4 << 20]
Pair = tuple[Callable[[], object], Callable[[], object]]


def calls(data: torch.Tensor) -> dict[str, Pair]:
    """For each collective the raw call and ours, on a vector whose length is a multiple of the group's size or 1."""
    group = dist.group.WORLD
    size, peer = dist.get_world_size(), (dist.get_rank() + 1) % dist.get_world_size()
    even = data if data.numel() % size == 0 else data.repeat(size)
    splits = [even.numel() // size] * size
    received = torch.empty_like(data)

    def raw_gather() -> None:
        dist.all_gather_single(torch.empty(size * data.numel()), data, group)

    def raw_scatter() -> None:
        dist.reduce_scatter_single(torch.empty(even.numel() // size), even, dist.ReduceOp.SUM, group)

    def raw_exchange() -> None:
        dist.all_to_all_single(torch.empty(even.shape), even, group=group)

    def raw_splits() -> None:
        dist.all_to_all_single(torch.empty(even.shape), even, splits, splits, group=group)

    def raw_async() -> None:
        dist.all_reduce(data, group=group, async_op=True).wait()

    def our_async() -> None:
        collectives.all_reduce(data, group, async_op=True)[1].wait()

    def raw_messages() -> None:
        sending, receiving = dist.isend(data, peer, group), dist.irecv(received, peer, group)
        sending.wait()
        receiving.wait()

    def our_messages() -> None:
        sending, receiving = collectives.isend(data, peer, group), collectives.irecv(received, peer, group)
        sending.wait()
        receiving.wait()

    return {
        "all_reduce": (lambda: dist.all_reduce(data, group=group), lambda: collectives.all_reduce(data, group)),
        "all_reduce, async": (raw_async, our_async),
        "all_gather": (raw_gather, lambda: collectives.all_gather_into_tensor(data, group)),
        "reduce_scatter": (raw_scatter, lambda: collectives.reduce_scatter_tensor(even, group)),
        "broadcast": (lambda: dist.broadcast(data, 0, group), lambda: collectives.broadcast(data, 0, group)),
        "all_to_all": (raw_exchange, lambda: collectives.all_to_all_single(even, even.shape, group)),
        "all_to_all, splits": (
            raw_splits,
            lambda: collectives.all_to_all_single(even, even.shape, group, False, splits, splits),
        ),
        "isend and irecv": (raw_messages, our_messages),
    }


def fastest(pair: Pair, num_rounds: int, num_calls: int, in_step: bool) -> tuple[float, float]:
    """The least time of one call of each, in us, over rounds that alternate between the two."""
    best = [float("inf"), float("inf")]
    for turn in range(num_rounds + 2):
        for which in (0, 1) if turn % 2 else (1, 0):
            call = pair[which]
            if in_step:
                dist.barrier()
            for _ in range(num_calls):
                start = time.perf_counter_ns()
                call()
                taken = (time.perf_counter_ns() - start) / 1e3
                if turn >= 2:
                    best[which] = min(best[which], taken)
    return best[0], best[1]


def measure_between_processes(rank: int, store_file: str, sizes: list[int], results: mp.SimpleQueue) -> None:
    torch.set_num_threads(1)
    groups.init_process_group("gloo", init_method=f"file://{store_file}", rank=rank, world_size=WORLD_SIZE)
    gc.disable()
    for num_bytes in sizes:
        data = torch.zeros(num_bytes // 4)
        num_rounds = 40 if num_bytes <= 1 << 20 else 8
        num_calls = max(1, min(30, (1 << 20) // num_bytes))
        for name, pair in calls(data).items():
            raw, ours = fastest(pair, num_rounds, num_calls, in_step=True)
            if rank == 0:
                results.put((name, num_bytes, raw, ours))
    groups.destroy_process_group()


def measure_call_alone() -> dict[str, tuple[float, float]]:
    torch.set_num_threads(1)
    # Registered by torch's testing package; there is no other backend that communicates nothing.
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=WORLD_SIZE)
    _, facts = group_facts.find_facts(dist.group.WORLD)
    facts.ledger = ledger_of_ranks_in_step()
    gc.disable()
    try:
        return {name: fastest(pair, 200, 100, in_step=False) for name, pair in calls(torch.zeros(1)).items()}
    finally:
        gc.enable()
        groups.destroy_process_group()


def ledger_of_ranks_in_step() -> SimpleNamespace:
    """What each call is compared in: the other rank's page is this rank's own, so it always has begun the same call."""
    pages = Pages(range(WORLD_SIZE), 0, lambda place: ([], True), lambda text: None)
    pages.others[1] = pages.mine
    pages.rings.append(pages.mine.ring)
    calls, messages = CallLedger(pages), MessageLedger(pages)
    return SimpleNamespace(
        enter=calls.enter, exchange=calls.exchange, send=messages.send, receive=messages.receive, close=pages.close
    )


def readable(num_bytes: int) -> str:
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes // size} {unit}"
    return f"{num_bytes} B"


def show(title: str, rows: list[tuple[str, str, float, float]]) -> None:
    table = Table("collective", "size", title=title, title_justify="left")
    for heading in ("torch.distributed, us", "hyper_parallel, us", "difference, us"):
        table.add_column(heading, justify="right")
    for name, size, raw, ours in rows:
        table.add_row(name, size, f"{raw:.1f}", f"{ours:.1f}", f"{ours - raw:+.1f}")
    Console(width=110).print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    arguments = parser.parse_args()
    sizes = QUICK_SIZES if arguments.quick else SIZES
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        results = context.SimpleQueue()
        store_file = os.path.join(folder, "store")
        ranks = mp.spawn(measure_between_processes, (store_file, sizes, results), nprocs=WORLD_SIZE, join=False)
        while len(rows) < len(sizes) * 8:
            if not results.empty():
                rows.append(results.get())
            elif ranks.join(timeout=0.2) and results.empty():
                break
        ranks.join()
    order = list(dict.fromkeys(name for name, *_ in rows))
    rows.sort(key=lambda row: (order.index(row[0]), row[1]))
    show("Between two processes over gloo", [(name, readable(size), raw, ours) for name, size, raw, ours in rows])
    alone = measure_call_alone()
    show("The call alone, nothing communicated", [(name, "4 B", *times) for name, times in alone.items()])
    worst = max(alone, key=lambda name: alone[name][1] - alone[name][0])
    overhead = alone[worst][1] - alone[worst][0]
    verdict = "within" if overhead < LIMIT_US else "OVER"
    print(f"largest overhead of a call: {overhead:+.1f} us ({worst}), {verdict} the limit of {LIMIT_US:g} us")
    return 0 if overhead < LIMIT_US else 1


if __name__ == "__main__":
    sys.exit(main())
