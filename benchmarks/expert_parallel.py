"""A layer of experts over ranks, forward and backward: ours and transformers' ``ep_dispatch_experts``, in turns.

One thread per process, Mixtral's experts. A round is each of the two once; times are the fastest of all rounds, since
everything that disturbs one makes it slower, and the ratio is of these; beside it that of the processor time, which a
busy machine disturbs less. Bytes are what a rank puts on the wire for the
same routing: rows whose expert is elsewhere, in both passes, and counts.

``--quick`` takes fewer rounds; the exit status is 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import os
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

TIME_TARGET, BYTES_TARGET = 0.9, 1.0
# experts, choices, features, inner features, tokens of a rank
CASES = {"8 large experts": (8, 2, 256, 512, 256), "64 small experts": (64, 8, 128, 64, 256)}


def _experts(num_experts: int, features: int, inner: int) -> Any:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(num_local_experts=num_experts, hidden_size=features, intermediate_size=inner)
    config._experts_implementation = "grouped_mm"
    return MixtralExperts(config)


def _ours(whole: Any, ranks: int) -> Any:
    import hyper_parallel as hp

    mesh = hp.init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    return hp.parallelize_module(whole, mesh, hp.ExpertParallel())


def _theirs(whole: Any, sizes: tuple[int, ...], ranks: int, rank: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from transformers.distributed.expert_parallel import EpDispatchExpertsParallel

    num_experts, _, features, inner, _ = sizes
    local = _experts(num_experts // ranks, features, inner)
    own = slice(rank * num_experts // ranks, (rank + 1) * num_experts // ranks)
    with torch.no_grad():
        for name, parameter in local.named_parameters():
            parameter.copy_(dict(whole.named_parameters())[name][own])
    return EpDispatchExpertsParallel().install_forward(local, init_device_mesh("cpu", (ranks,)))


def _step(module: Any, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> Callable[[], torch.Tensor]:
    def run() -> torch.Tensor:
        for parameter in module.parameters():
            parameter.grad = None
        out = module(tokens, chosen, weights)
        (out * out).sum().backward()
        return out.detach()

    return run


def _measure(rank: int, ranks: int, store: str, name: str, rounds: int, results: Any) -> None:
    os.environ |= {"HYPER_PARALLEL_PLATFORM": "torch", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    import hyper_parallel as hp

    hp.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    sizes = CASES[name]
    num_experts, choices, features, inner, num_tokens = sizes
    torch.manual_seed(0)
    whole = _experts(num_experts, features, inner)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.normal_(std=0.05)
    theirs = _theirs(whole, sizes, ranks, rank)
    ours = _ours(whole, ranks)
    torch.manual_seed(1 + rank)
    tokens = torch.randn(num_tokens, features, requires_grad=True)
    chosen = torch.rand(num_tokens, num_experts).topk(choices).indices
    weights = torch.rand(num_tokens, choices)
    steps = {"ours": _step(ours, tokens, chosen, weights), "theirs": _step(theirs, tokens, chosen, weights)}
    assert torch.allclose(steps["ours"](), steps["theirs"](), rtol=1e-4, atol=1e-5)
    times = {name: float("inf") for side in steps for name in (side, f"{side}, cpu")}
    for _ in range(rounds):
        for side, step in steps.items():
            dist.barrier()
            begin, begin_cpu = time.perf_counter(), time.process_time()
            step()
            times[side] = min(times[side], time.perf_counter() - begin)
            times[f"{side}, cpu"] = min(times[f"{side}, cpu"], time.process_time() - begin_cpu)
    rows = int((chosen // (num_experts // ranks) != rank).sum()) * features * 4
    counts = 8 * num_experts * (ranks - 1)
    results[rank] = {**times, "our bytes": 4 * rows + counts, "their bytes": 4 * rows + counts // ranks}
    hp.destroy_process_group()


def _run(name: str, ranks: int, rounds: int) -> dict[str, float]:
    with mp.Manager() as manager, tempfile.TemporaryDirectory() as folder:
        results = manager.dict()
        mp.spawn(_measure, (ranks, f"{folder}/store", name, rounds, results), nprocs=ranks)
        seen = dict(results)
    return {key: max(one[key] for one in seen.values()) for key in seen[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    options = parser.parse_args()
    table = Table("layer", "ranks", "ours, ms", "transformers, ms", "ratio", "of CPU", "bytes, ratio")
    missed = False
    for name in CASES:
        for ranks in (2,) if options.quick else (2, 4):
            seen = _run(name, ranks, 20 if options.quick else 100)
            ratio, sent = seen["ours"] / seen["theirs"], seen["our bytes"] / seen["their bytes"]
            missed |= ratio > TIME_TARGET or round(sent, 2) > BYTES_TARGET
            times = [f"{1e3 * seen[side]:.2f}" for side in ("ours", "theirs")]
            cpu = seen["ours, cpu"] / seen["theirs, cpu"]
            table.add_row(name, str(ranks), *times, f"{ratio:.2f}", f"{cpu:.2f}", f"{sent:.4f}")
    Console().print(table)
    Console().print(f"targets: time at most {TIME_TARGET}, bytes at most {BYTES_TARGET}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
