"""Peak memory of starting a cut model: deferred initialisation against building the whole model first.

One process stands for one rank of many (no other is needed: deferred initialisation communicates nothing): a stack of
linear layers is cut over ``--ranks`` ranks, and this process makes the part of rank 0. Each way runs in a process of
its own; memory is the largest resident size above that of the imports, as the operating system counts it. "blocks" is
what this rank's parameters occupy.

The exit status is 1 when deferred initialisation needs more than the blocks and a few temporaries of the largest block.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

LARGEST_BLOCKS = 8  # temporaries of the random numbers of one block, in sizes of the largest block
MIB = 2**20


def peak() -> int:
    """The largest resident size of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def build(way: str, width: int, num_layers: int, num_ranks: int) -> dict[str, Any]:
    """Make rank 0's part of the model and say what it took."""
    import torch
    from torch import nn

    import hyper_parallel as hp

    torch.set_num_threads(1)
    mesh = hp.init_device_mesh(
        "cpu", (num_ranks,), mesh_dim_names=("tp",), rank_list=range(num_ranks), init_backend=False
    )
    plan = {"*": hp.ColwiseParallel()}

    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_layers)))

    hp.parallelize_module(
        hp.materialize(deferred(hp, lambda: nn.Sequential(nn.Linear(8, 8)))), mesh, plan, src_data_rank=None
    )
    before, start = peak(), time.perf_counter()
    if way == "deferred":
        made = hp.parallelize_module(deferred(hp, model), mesh, plan)
        hp.materialize(made)
    else:
        made = hp.parallelize_module(model(), mesh, plan, src_data_rank=None)
    taken = time.perf_counter() - start
    blocks = [hp.get_platform().get_tensor_storage_size(parameter.to_local()) for parameter in made.parameters()]
    return {"peak": peak() - before, "blocks": sum(blocks), "largest": max(blocks), "seconds": taken}


def deferred(hp: Any, make: Any) -> Any:
    with hp.deferred_init():
        return make()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--way", choices=("deferred", "whole first"), help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="a smaller model")
    options = parser.parse_args()
    if options.quick:
        options.width, options.layers = 1024, 8
    sizes = (options.width, options.layers, options.ranks)
    if options.way:
        print(json.dumps(build(options.way, *sizes)))
        return 0

    from rich.console import Console
    from rich.table import Table

    whole = options.width**2 * options.layers * 4
    size = f"{options.layers} layers of {options.width} x {options.width}"
    title = f"{size}, {whole / MIB:.0f} MiB, over {options.ranks} ranks"
    table = Table("way", title=title, title_justify="left")
    for heading in ("blocks, MiB", "peak, MiB", "peak / blocks", "seconds"):
        table.add_column(heading, justify="right")
    found = {}
    for way in ("whole first", "deferred"):
        names = ("--width", "--layers", "--ranks")
        arguments = [text for name, size in zip(names, sizes, strict=True) for text in (name, str(size))]
        command = [sys.executable, __file__, "--way", way, *arguments]
        answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout
        found[way] = one = json.loads(answer.splitlines()[-1])
        ratio = one["peak"] / one["blocks"]
        table.add_row(
            way, f"{one['blocks'] / MIB:.1f}", f"{one['peak'] / MIB:.1f}", f"{ratio:.2f}", f"{one['seconds']:.2f}"
        )
    Console(width=100).print(table)
    allowed = found["deferred"]["blocks"] + LARGEST_BLOCKS * found["deferred"]["largest"]
    is_met = found["deferred"]["peak"] <= allowed
    print("all targets met" if is_met else f"MISSED: deferred initialisation may take {allowed / MIB:.1f} MiB")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
