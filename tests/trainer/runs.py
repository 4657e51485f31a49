"""Small runs of the trainer for tests, and the same by hand on one device in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyper_parallel.launch import StopRequest
from hyper_parallel.trainer.config.run_config import RunConfig
from hyper_parallel.trainer.metrics import read_metrics

SIZES = {
    "dim": 16,
    "num_blocks": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "hidden_dim": 24,
    "vocab_size": 256,
    "max_length": 32,
}
DEGREES: dict[str, tuple[int, dict[str, int]]] = {
    "one": (1, {}),
    "dp_shard": (2, {"dp_shard": 2}),
    "dp_replicate": (2, {"dp_replicate": 2}),
    "tp": (2, {"tp": 2}),
    "cp": (2, {"cp": 2}),
    "pp": (2, {"pp": 2}),
    "pp x tp": (4, {"pp": 2, "tp": 2}),
    "tp 4": (4, {"tp": 4}),
    "dp_shard x tp": (4, {"dp_shard": 2, "tp": 2}),
    "dp_shard x cp": (4, {"dp_shard": 2, "cp": 2}),
}
RATE, WARMUP, MIN_RATIO, DECAY, CLIP = 3e-3, 2, 0.1, 0.1, 1.0


def run_config(folder: Path, degrees: str = "one", **sections: Mapping[str, Any]) -> RunConfig:
    """A run of a tiny Llama in float64; ``sections`` add to what is said here."""
    size, parallel = DEGREES[degrees]
    usual: dict[str, dict[str, Any]] = {
        "model": {"name": "llama", "args": SIZES},
        "data": {"kind": "corpus", "length": 16, "isolate": False},
        "train": {"steps": 6, "batch": 5, "dtype": "float64"},
        "optimizer": {"lr": RATE, "eps": 1e-6},
        "schedule": {"warmup": WARMUP},
        "parallel": parallel,
        "checkpoint": {"every": 0, "background": False},
        "log": {"folder": str(folder)},
        "launch": {"nproc": size},
    }
    for name, values in sections.items():
        usual[name] = {**usual.get(name, {}), **values}
    return RunConfig(**usual)


def train_on_threads(config: RunConfig, before: Any = None, asked: Any = StopRequest) -> Any:
    """The trainer's result on rank 0, of ranks that are threads; all ranks have the same losses.

    ``before(trainer)`` is called on each rank, and ``asked()`` is what it is asked to stop by.
    """
    from hyper_parallel.testing import threads
    from hyper_parallel.trainer.trainer import Trainer

    def program() -> Any:
        trainer = Trainer(config)
        if before is not None:
            before(trainer)
        return trainer.train(asked())

    results = threads(config.nproc).run(program)
    assert all(one.losses == results[0].losses for one in results)
    return results[0]


def steps_of(folder: Path) -> list[Mapping[str, Any]]:
    """The steps in the metrics of a run."""
    return [line for line in read_metrics(folder) if line["event"] == "step"]


def tiny_llama(dtype: Any = None) -> Any:
    """The model that ``run_config`` trains, with its first values; plain."""
    import torch

    import hyper_parallel as hp

    hp.manual_seed(0)
    with hp.deferred_init():
        model = hp.models.Llama(hp.models.LlamaConfig(**SIZES)).to(dtype or torch.float64)
    return hp.materialize(model)


def plain_losses(config: RunConfig, steps: int, model: Any = None, before: Any = None) -> dict[int, float]:
    """The losses of the run by a loop that is written by hand: one device, PyTorch, nothing of the trainer.

    ``before(step, optimizer)`` is called before each step.
    """
    import torch

    from hyper_parallel.data import open_data

    model = model or tiny_llama()
    data = open_data(config.data, seed=0)
    order = data.order(batch=config.train.batch, seed=0)
    decays, stays = [], []
    for name, one in model.named_parameters():
        (stays if one.ndim < 2 or "embed" in name else decays).append(one)
    groups = [{"params": decays, "weight_decay": DECAY}, {"params": stays, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-6)
    losses, position, total = {}, 0, config.train.steps or steps
    for step in range(1, steps + 1):
        batch = data.collate(order.numbers(position, config.train.batch))
        position += config.train.batch
        if before is not None:
            before(step, optimizer)
        optimizer.zero_grad()
        loss = model(torch.from_numpy(batch["input_ids"]), torch.from_numpy(batch["labels"]))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        for group in optimizer.param_groups:
            group["lr"] = RATE * cosine(step, total)
        optimizer.step()
        losses[step] = loss.item()
    return losses


def cosine(step: int, total: int) -> float:
    """The factor of the learning rate that ``run_config`` asks for."""
    if step <= WARMUP:
        return step / WARMUP
    done = (step - WARMUP) / (total - WARMUP)
    return MIN_RATIO + (1 - MIN_RATIO) * (1 + math.cos(math.pi * done)) / 2
