"""Do all ranks make the same collectives? PyTorch's operator database again, without a world and without waiting.

``python -m tests.shard.rank_agreement --mesh 4 --form second_gradients`` plays every rank of the mesh in a process of
its own. A collective answers at once, with what this rank has in place of the others' values, and is noted; afterwards
the notes are compared. A rank that would leave the others waiting is found in the time of one call, and so is what
depends on the order of a process's sets. Values are not real here: operators that refuse some are counted apart.
"""

from __future__ import annotations

import argparse
import importlib
import math
import multiprocessing
import random
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import hyper_parallel as hp
from tests.shard.op_trials import FORMS, Trial, full_name, op_infos, quick_seeds, trials_of

RANDOM_SAMPLES = ("meshgrid",)  # the database takes these from a set of tensors, in any order


@dataclass
class Notes:
    """What one rank did for one sample."""

    where: str
    error: str  # the kind of error that was raised, if any
    collectives: list[tuple[str, tuple[int, ...], Any]]  # what, among which ranks, of which shape and dtype


def play_rank(rank: int, trial: Trial, only: str) -> dict[str, list[Notes]]:
    """Runs in a process of its own: what this rank of the mesh does for the samples of each operator."""
    importlib.import_module("torch.testing._internal.distributed.fake_pg")  # adds the backend that answers at once
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    size = math.prod(trial.mesh_shape)
    dist.init_process_group("fake", rank=rank, world_size=size, store=dist.HashStore())
    mesh = hp.init_device_mesh("cpu", trial.mesh_shape)
    notes: dict[str, list[Notes]] = {}
    answers = {"all_gather_single": _gather, "reduce_scatter_single": _reduce_scatter, "all_to_all_single": _exchange}
    with mock.patch.multiple(dist.ProcessGroup, **answers), quick_seeds():
        for info in op_infos():
            name = full_name(info)
            if only in name and info.name not in RANDOM_SAMPLES:
                pick = random.Random(f"{trial.seed}{name}")
                notes[name] = [_noted(*one, pick) for one in trials_of(info, mesh, trial, pick)]
    return notes


def _noted(one: Any, layouts: list[Any], where: str, pick: random.Random) -> Notes:
    error = ""
    with hp.CommRecorder() as recorder:
        try:
            one.compare(layouts, pick)
        except Exception as raised:
            error = type(raised).__name__
    collectives = [
        (record.op, tuple(record.ranks), None if "all_to_all" in record.op else (tuple(record.shape), record.dtype))
        for record in recorder.records
    ]
    return Notes(where, error, collectives)


@torch.no_grad()
def _gather(group: Any, received: torch.Tensor, sent: torch.Tensor, *_: Any) -> Any:
    received.view(group.size(), -1).copy_(sent.reshape(1, -1))
    return group.allreduce([torch.zeros(1)])


@torch.no_grad()
def _reduce_scatter(group: Any, result: torch.Tensor, data: torch.Tensor, *_: Any) -> Any:
    result.view(-1).copy_(data.reshape(group.size(), -1)[group.rank()])
    return group.allreduce([torch.zeros(1)])


@torch.no_grad()
def _exchange(group: Any, received: torch.Tensor, *_: Any) -> Any:
    received.zero_()
    return group.allreduce([torch.zeros(1)])


def disagreements(notes: list[dict[str, list[Notes]]]) -> Iterator[tuple[str, str]]:
    """The operators of which ranks made different collectives, and how; ``notes`` are those of all ranks."""
    for name in notes[0]:
        for samples in zip(*(of_rank[name] for of_rank in notes), strict=True):
            if any(sample.error for sample in samples):
                continue
            for group in {group for sample in samples for _, group, _ in sample.collectives}:
                seen = [[note for note in samples[rank].collectives if note[1] == group] for rank in group]
                if any(one != seen[0] for one in seen):
                    yield (
                        name,
                        f"{samples[0].where}\n" + "\n".join(f"  {r}: {s}" for r, s in zip(group, seen, strict=True)),
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="operators whose name contains this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mesh", default="4", help="4, 2x2, ...")
    parser.add_argument("--samples", type=int, default=Trial.num_samples, help="how many of each operator")
    parser.add_argument("--form", choices=FORMS, default="second_gradients")
    parser.add_argument("--dtype", default="", help="bfloat16, int64, ...; without it each operator's most telling one")
    options = parser.parse_args()
    shape = tuple(int(size) for size in options.mesh.split("x"))
    trial = Trial(options.seed, shape, options.samples, options.form, options.dtype)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context, max_tasks_per_child=1) as ranks:
        played = [ranks.submit(play_rank, rank, trial, options.only) for rank in range(math.prod(shape))]
        notes = [one.result() for one in played]
    found = list(disagreements(notes))
    for name, what in found:
        print(f"--- {name} under {what}")
    samples = [sample for name in notes[0] for sample in zip(*(one[name] for one in notes), strict=True)]
    refused = sum(any(note.error for note in sample) for sample in samples)
    print(f"{len(samples)} samples, {refused} refused on some rank; ranks disagree in {len(found)}: ", end="")
    print(", ".join(sorted({name for name, _ in found})))


if __name__ == "__main__":
    from tests.shard.rank_agreement import main as run  # under its own name, which the processes can import

    run()
