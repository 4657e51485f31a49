"""Attention over a sharded sequence, forward and backward: ours and torch's ring driver, in turns in one run.

torch's ``context_parallel`` does not run on CPUs, but the driver of its ring does once the CPU kernel is given to it:
that is the opponent, with both of its ways to rotate and with and without its balance. Causal, 8 heads,
width 64, one thread per process. Times are the fastest of rounds that alternate between the two. Bytes are those that
all ranks put on the wire. Peaks of memory are those of a layer's tensors that live at once, on
the rank that needs most, counted by allocations. One process is compared with two on the same sequence.

``--quick`` takes fewer lengths and rounds; the exit status is 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import functools
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

HEADS, KEY_HEADS, WIDTH = 8, 8, 64
TIME_TARGET, BYTES_TARGET, MEMORY_TARGET, ONE_PROCESS_TARGET = 0.9, 0.85, 0.4, 0.65


def _inputs(tokens: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, heads, tokens, WIDTH, generator=generator) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]


# ---------------------------------------------------------------- the opponent


def _torch_ring(rotation: str, balanced: bool) -> Callable[..., torch.Tensor]:
    """torch's driver with the CPU kernel, which lets heads share keys as ours does."""
    from torch.distributed.tensor.experimental._context_parallel import _attention as driver

    aten, group = torch.ops.aten, dist.group.WORLD
    forward_kernel = aten._scaled_dot_product_flash_attention_for_cpu
    backward_kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

    class Ring(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
            blocks = (query, key, value)
            output, sums = driver._templated_ring_attention(
                group, 2, forward_kernel, *blocks, is_causal=True, dropout_p=0.0
            )[:2]
            ctx.save_for_backward(*blocks, output, sums)
            return output

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return driver._templated_ring_attention_backward(
                group, 2, backward_kernel, gradient, "grad_out", *ctx.saved_tensors, True, dropout_p=0.0
            )[:3]

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        driver._cp_options.enable_load_balance = balanced
        driver.set_rotate_method(rotation)
        return Ring.apply(query, key, value)

    return run


class _WireBytes:
    """Bytes that torch's driver sends, told by the functions that it calls."""

    def __init__(self) -> None:
        self.total = 0

    def counting(self) -> Any:
        outer = self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                name = str(func)
                if "all_gather_into_tensor" in name:
                    outer.total += args[0].numel() * args[0].element_size() * (dist.get_world_size() - 1)
                elif "all_to_all_single" in name:
                    outer.total += args[0].numel() * args[0].element_size()
                return func(*args, **(kwargs or {}))

        return Mode()


# ---------------------------------------------------------------- what is measured


def _step(attend: Callable[..., Any], leaves: list[Any], gradient: Any) -> None:
    for leaf in leaves:
        leaf.grad = None
    attend(*leaves).backward(gradient)


def _our_step(scheme: str, balance: bool | None, visible: Any, leaves: list[Any], gradient: Any) -> None:
    import hyper_parallel as hp

    with hp.attention_scheme(scheme, balance=balance):
        _step(functools.partial(hp.attention, visible=visible), leaves, gradient)


def _fastest(steps: dict[str, Callable[[], None]], rounds: int, is_alone: bool = False) -> dict[str, float]:
    """Seconds of the fastest round of each; rounds alternate, and all ranks begin each together."""
    best = dict.fromkeys(steps, float("inf"))
    for _ in range(rounds):
        for name, step in steps.items():
            if not is_alone:
                dist.barrier()
            begin = time.perf_counter()
            step()
            if not is_alone:
                dist.barrier()
            best[name] = min(best[name], time.perf_counter() - begin)
    return best


def _of_rank(whole: torch.Tensor, rank: int, world: int, balanced: bool) -> torch.Tensor:
    if not balanced:
        return whole.chunk(world, 2)[rank].contiguous()
    chunks = whole.chunk(2 * world, 2)
    return torch.cat([chunks[rank], chunks[2 * world - 1 - rank]], 2)


def _compare(rank: int, world: int, port: int, lengths: list[int], rounds: int, results: Any) -> None:
    import hyper_parallel as hp
    from hyper_parallel.core.context_parallel.batch import token_order

    _join(rank, world, port)
    mesh = hp.init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    causal = hp.Visibility(causal=True)
    for tokens in lengths:
        whole = _inputs(tokens)
        ours = [hp.distribute_tensor(tensor, mesh, [hp.Shard(2)]) for tensor in whole]
        leaves = [tensor.requires_grad_() for tensor in ours[:3]]
        steps: dict[str, Callable[[], None]] = {}
        # The tokens of a rank need not be other numbers for this: their positions are.
        zigzag = hp.Visibility(causal=True, positions=token_order("zigzag", tokens, world))
        steps["ours: ring, zigzag"] = functools.partial(_our_step, "ring", False, zigzag, leaves, ours[3])
        for name, scheme, balance in (
            ("ours: ring", "ring", False),
            ("ours: ring, swapped", "ring", True),
            ("ours: ulysses", "ulysses", False),
            ("ours: gather, swapped", "gather", True),
            ("ours: auto", "auto", None),
        ):
            steps[name] = functools.partial(_our_step, scheme, balance, causal, leaves, ours[3])
        for rotation, balanced in (("allgather", False), ("alltoall", False), ("allgather", True), ("alltoall", True)):
            parts = [_of_rank(tensor, rank, world, balanced) for tensor in whole]
            theirs = [part.requires_grad_() for part in parts[:3]]
            ring = _torch_ring(rotation, balanced)
            name = f"torch: {rotation}{', balanced' if balanced else ''}"
            steps[name] = functools.partial(_step, ring, theirs, parts[3])
        sent = {}
        for name, run in steps.items():
            run()  # warm
            recorder, wire = hp.CommRecorder(), _WireBytes()
            if name.startswith("ours"):
                with recorder:
                    run()
                sent[name] = recorder.total_bytes
            else:
                with wire.counting():
                    run()
                sent[name] = wire.total
        total = torch.tensor([float(sent[name]) for name in steps])
        dist.all_reduce(total)
        best = _fastest(steps, rounds)
        if rank == 0:
            for name, num_bytes in zip(steps, total.tolist(), strict=True):
                results[world, tokens, name] = (best[name], num_bytes)
    dist.barrier()
    hp.destroy_process_group()


def _join(rank: int, world: int, port: int) -> None:
    import hyper_parallel as hp

    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world))
    os.environ["LOCAL_RANK"] = str(rank)
    hp.init_process_group()


class _Peak(TorchDispatchMode):
    """The most bytes of tensors that lived at once and were made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self._see(tensor)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        import weakref

        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if not address or address in self._known:
            return
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)

        def gone() -> None:
            self._known.pop(address, None)
            self.now -= size

        self._known[address] = weakref.finalize(storage, gone)


def _measure_memory(rank: int, world: int, port: int, tokens: int, results: Any) -> None:
    """Peaks of the rank that needs most."""
    import hyper_parallel as hp

    _join(rank, world, port)
    mesh = hp.init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    causal = hp.Visibility(causal=True)
    for scheme in ("gather", "ring", "ulysses"):
        leaves = [hp.distribute_tensor(tensor, mesh, [hp.Shard(2)]) for tensor in _inputs(tokens)]
        gradient = leaves.pop()
        leaves = [tensor.requires_grad_() for tensor in leaves]
        counter = _Peak()
        with counter:
            _our_step(scheme, False, causal, leaves, gradient)
        peak = torch.tensor([float(counter.peak)])
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        if rank == 0:
            results["peak", scheme] = peak.item()
    dist.barrier()
    hp.destroy_process_group()


def _one_process(rank: int, tokens: int, rounds: int, results: Any) -> None:
    torch.set_num_threads(1)
    query, key, value, gradient = _inputs(tokens)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]

    def attend(query: Any, key: Any, value: Any) -> Any:
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    steps = {"one process": lambda: _step(attend, leaves, gradient)}
    results[1, tokens, "one process"] = (_fastest(steps, rounds, is_alone=True)["one process"], 0.0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    rounds, lengths = (3, [1024, 4096]) if quick else (7, [1024, 2048, 4096, 8192])
    results = mp.Manager().dict()
    mp.spawn(_one_process, (4096, rounds, results))
    for world in (2, 4):
        mp.spawn(_compare, (world, _free_port(), lengths, rounds, results), nprocs=world)
    mp.spawn(_measure_memory, (4, _free_port(), 4096, results), nprocs=4)
    memory = {key[1]: value for key, value in results.items() if key[0] == "peak"}
    return _report(dict(results), lengths, memory)


def _report(results: dict[Any, Any], lengths: list[int], memory: dict[str, float]) -> int:
    console = Console(width=110)
    missed = []

    def judge(what: str, found: float, target: float) -> None:
        console.print(f"{what}: {found:.2f} (target {target})")
        if found > target:
            missed.append(what)

    for world in (2, 4):
        for tokens in lengths:
            table = Table(title=f"{tokens} tokens on {world} ranks, forward and backward")
            for column in ("", "ms", "MB on the wire"):
                table.add_column(column, justify="left" if not column else "right")
            rows = {key[2]: value for key, value in results.items() if key[:2] == (world, tokens)}
            for name, (seconds, num_bytes) in rows.items():
                table.add_row(name, f"{seconds * 1e3:.1f}", f"{num_bytes / 1e6:.2f}")
            console.print(table)
            for kinds, mine, theirs in (
                ("contiguous", "ours: ring", ("torch: allgather", "torch: alltoall")),
                ("contiguous, swapped", "ours: ring, swapped", ("torch: allgather", "torch: alltoall")),
                ("zigzag", "ours: ring, zigzag", ("torch: allgather, balanced", "torch: alltoall, balanced")),
            ):
                for index, what, target in ((0, "time", TIME_TARGET), (1, "bytes", BYTES_TARGET)):
                    best = rows[mine][index]
                    rival = min(rows[name][index] for name in theirs)
                    judge(f"{world} ranks, {tokens} tokens, {kinds}: {what} of ours / torch's", best / rival, target)
    one = results[1, 4096, "one process"][0]
    two = min(value[0] for key, value in results.items() if key[:2] == (2, 4096) and key[2].startswith("ours"))
    console.print(f"one process, 4096 tokens: {one * 1e3:.1f} ms")
    judge("2 ranks / one process, 4096 tokens: time", two / one, ONE_PROCESS_TARGET)
    console.print({name: f"{value / 1e6:.1f} MB" for name, value in memory.items()})
    judge("4 ranks, 4096 tokens: peak of ring / gather", memory["ring"] / memory["gather"], MEMORY_TARGET)
    console.print(f"missed: {missed}" if missed else "all targets met")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
