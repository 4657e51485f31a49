"""A training step of Hugging Face's Llama under ``hp.parallelize``, and under PyTorch's own parallelisms, in turns.

20 million parameters, one thread per process; a step is forward, backward and AdamW over two samples of 64 tokens for
each part of the batch. PyTorch's side is what its tutorials show: ``fully_shard`` of each block and of the model, and
``parallelize_module`` with sequence parallel styles, for which the positions must be given, since the model's code
sees local shapes. Both must have the same loss. Times are the fastest of rounds that alternate between the two, since
everything that disturbs a step makes it slower. ``forward_backward`` is compared with a loop that is written by hand
around the same split model: the count of targets, the model's loss, backward, the sum of the losses.

``--quick`` takes fewer rounds; the exit status is 1 when a target is missed.
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
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor import parallel as styles

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SIZES = {
    **{"vocab_size": 8192, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8},
    **{"num_attention_heads": 8, "num_key_value_heads": 8},
}
ROWS, LENGTH = 2, 64  # of each part of the batch
SPEED_TARGET = 1.3  # times torch's tokens per second
OVERHEAD_TARGET = 1.02  # of the hand-written loop's time
LAYOUTS = {"dp_shard=2": 2, "tp=2": 2, "dp_shard=4": 4, "tp=4": 4, "dp_shard=2, tp=2": 4}

Step = Callable[[], torch.Tensor]


def make() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES))


def plan() -> dict[str, styles.ParallelStyle]:
    """Tensor and sequence parallelism of the Llama, as PyTorch's tutorial has it."""
    cut, whole = Shard(1), Replicate()
    inside = {
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm"), "norm"),
        **{f"self_attn.{name}_proj": "columns" for name in "qkv"},
        **{"mlp.gate_proj": "columns", "mlp.up_proj": "columns", "self_attn.o_proj": "rows", "mlp.down_proj": "rows"},
    }
    made = {
        "norm": lambda: styles.SequenceParallel(use_local_output=True),
        "columns": styles.ColwiseParallel,
        "rows": lambda: styles.RowwiseParallel(output_layouts=cut),
    }
    found: dict[str, styles.ParallelStyle] = {
        "model.embed_tokens": styles.RowwiseParallel(input_layouts=whole, output_layouts=cut),
        "model.norm": styles.SequenceParallel(use_local_output=True),
        "lm_head": styles.ColwiseParallel(input_layouts=cut, output_layouts=whole),
        "model.layers.*.self_attn": styles.PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": cut}, desired_input_kwarg_layouts={"hidden_states": whole}
        ),
        "model.layers.*.mlp": styles.PrepareModuleInput(input_layouts=(cut,), desired_input_layouts=(whole,)),
    }
    return found | {f"model.layers.*.{name}": made[kind]() for name, kind in inside.items()}


def theirs(dp: int, tp: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    model = make()
    if tp > 1:
        styles.parallelize_module(model, mesh["tp"], plan())
    if dp > 1:
        for block in model.model.layers:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return model


def batch_of(part: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(SIZES["vocab_size"], (ROWS, LENGTH), generator=torch.Generator().manual_seed(part))
    return {"input_ids": ids, "labels": ids}


def steps_of(degrees: str, hand: bool) -> dict[str, Step]:
    """A step of ours and one of theirs, or one of ours by ``forward_backward`` and one by hand."""
    import hyper_parallel as hp

    run = hp.parallelize(make(), degrees)
    dp, tp = run.degrees.sizes["dp_shard"], run.degrees.sizes["tp"]
    given = batch_of(dist.get_rank() // tp)
    mine = torch.optim.AdamW(run.parameters(), lr=1e-4)

    def ours() -> torch.Tensor:
        loss = run.forward_backward(**given)
        mine.step()
        mine.zero_grad()
        return loss

    def by_hand() -> torch.Tensor:
        number = (given["labels"][:, 1:] != -100).sum()
        if dp > 1:
            dist.all_reduce(number)
        loss = run.model(**given, num_items_in_batch=number, use_cache=False).loss
        loss.backward()
        loss = loss.detach()
        if dp > 1:
            dist.all_reduce(loss)
        mine.step()
        mine.zero_grad()
        return loss

    if hand:
        return {"forward_backward": ours, "by hand": by_hand}

    model = theirs(dp, tp)
    other = torch.optim.AdamW(model.parameters(), lr=1e-4)
    positions = torch.arange(LENGTH)[None]

    def torchs() -> torch.Tensor:
        loss = model(**given, position_ids=positions, use_cache=False).loss
        loss.backward()
        other.step()
        other.zero_grad()
        return loss.detach()

    return {"ours": ours, "torch": torchs}


def measure(rank: int, ranks: int, store: str, degrees: str, hand: bool, rounds: int, results: Any) -> None:
    os.environ["HYPER_PARALLEL_PLATFORM"] = "torch"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    steps = steps_of(degrees, hand)
    wall, cpu = (dict.fromkeys(steps, float("inf")) for _ in range(2))
    losses = {}
    gc.disable()
    for number in range(rounds + 2):
        for name, step in steps.items():
            dist.barrier()
            before, used = time.perf_counter(), time.thread_time()
            loss = step()
            used = time.thread_time() - used
            dist.barrier()
            took = time.perf_counter() - before
            if number >= 2:
                wall[name], cpu[name] = min(wall[name], took), min(cpu[name], used)
            elif number == 0:
                losses[name] = loss
    if not hand:
        dist.all_reduce(losses["torch"])  # All ranks have the mean over as many tokens.
        losses["torch"] /= ranks
        torch.testing.assert_close(losses["ours"], losses["torch"], rtol=1e-5, atol=1e-5)
    if rank == 0:
        results.put({"wall": wall, "cpu": cpu})
    dist.barrier()
    dist.destroy_process_group()


def run(ranks: int, *args: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        results = mp.get_context("spawn").SimpleQueue()
        mp.spawn(measure, (ranks, f"{folder}/store", *args, results), nprocs=ranks)
        return results.get()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("speed", "overhead"))
    options = parser.parse_args()
    rounds = 4 if options.quick else 15
    missed = 0
    speed = Table("degrees", "ranks", "ours, tokens/s", "torch, tokens/s", "times torch", "target", "CPU of torch's")
    for degrees, ranks in LAYOUTS.items() if options.only != "overhead" else ():
        found = run(ranks, degrees, False, rounds)
        tokens = ROWS * LENGTH * int(degrees[9] if degrees.startswith("dp_shard") else 1)
        per_second = {name: tokens / took for name, took in found["wall"].items()}
        ratio, cpu = per_second["ours"] / per_second["torch"], found["cpu"]["ours"] / found["cpu"]["torch"]
        missed += ratio < SPEED_TARGET
        mark = "" if ratio >= SPEED_TARGET else " missed"
        cells = [f"{per_second[name]:.0f}" for name in ("ours", "torch")]
        speed.add_row(degrees, str(ranks), *cells, f"{ratio:.2f}", f"{SPEED_TARGET}{mark}", f"{cpu:.2f}")
    overhead = Table("degrees", "forward_backward, ms", "by hand, ms", "ratio", "CPU ratio", "target")
    for degrees, ranks in {"dp_shard=1": 1, "dp_shard=2": 2}.items() if options.only != "speed" else ():
        found = run(ranks, degrees, True, rounds * 2)
        ratios = [found[kind]["forward_backward"] / found[kind]["by hand"] for kind in ("wall", "cpu")]
        missed += max(ratios) > OVERHEAD_TARGET
        mark = "" if max(ratios) <= OVERHEAD_TARGET else " missed"
        cells = [f"{found['wall'][name] * 1e3:.1f}" for name in ("forward_backward", "by hand")]
        overhead.add_row(degrees, *cells, *(f"{one:.3f}" for one in ratios), f"{OVERHEAD_TARGET}{mark}")
    console = Console(width=120)
    for table in (speed, overhead):
        if table.row_count:
            console.print(table)
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
