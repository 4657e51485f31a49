"""A few steps of a shrunk run on one rank: what it computes, and where that is not what one process computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.random.random_state import manual_seed
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.batches import Feeder
from hyper_parallel.trainer.building import build_model
from hyper_parallel.trainer.check.verdict import Difference, ratio_of
from hyper_parallel.trainer.optimizers import make_optimizer
from hyper_parallel.trainer.proofs import find_spelling
from hyper_parallel.trainer.splitting import split_model

if TYPE_CHECKING:
    from hyper_parallel.data.dataset import Dataset
    from hyper_parallel.parallel.parallel import Parallel
    from hyper_parallel.trainer.config.run_config import RunConfig

__all__ = ["Found", "Reference", "compare", "reference"]

Reference = dict[str, np.ndarray]  # "1/loss", "1/norm", "1/gradient/blocks.0...", "weight/..."
Found = Iterator[tuple[str, Any]]


def _steps(config: RunConfig, data: Dataset, num_steps: int, tamper: Callable[[Parallel], None] | None) -> Found:
    """What the steps give, by name, as they give it."""
    platform = get_platform()
    manual_seed(config.train.seed)
    model = build_model(config.model, config.train.dtype)
    run = split_model(model, config)
    run.materialize(seed=config.train.seed)
    optimizer = make_optimizer(config.optimizer, run.named_parameters())
    feeder = Feeder(run, data, find_spelling(run, data))
    order = iter(data.order(batch=config.train.batch, seed=config.train.seed))
    clip = config.train.clip_norm
    for step in range(1, num_steps + 1):
        numbers, batch = feeder.load(next(order))
        run.mine(numbers)
        yield f"{step}/loss", run.forward_backward(**feeder.arguments(batch))
        if tamper is not None:
            tamper(run)
        for name, parameter in run.named_parameters():
            gradient = platform.get_grad(parameter)
            if gradient is not None:
                yield f"{step}/gradient/{name}", gradient
        yield f"{step}/norm", run.clip_grad_norm_(math.inf if clip == "none" else clip)
        platform.step_optimizer(optimizer)
        run.zero_grad()
    for name, parameter in run.named_parameters():
        yield f"weight/{name}", parameter


def reference(config: RunConfig, data: Dataset, num_steps: int) -> Reference:
    """The numbers of one process, whole."""
    return {name: _array(value).copy() for name, value in _steps(config, data, num_steps, None)}


def compare(
    config: RunConfig,
    data: Dataset,
    num_steps: int,
    expected: Reference,
    tolerance: float,
    tamper: Callable[[Parallel], None] | None = None,
) -> dict[str, Any]:
    """This rank's part of each number beside one process's: differences, and the largest of them all."""
    differences: list[Difference] = []
    largest, seen = 0.0, set()
    scale = max(
        (float(np.abs(one).max(initial=0)) for name, one in expected.items() if "/gradient/" in name), default=1
    )
    for name, value in _steps(config, data, num_steps, tamper):
        seen.add(name)
        if name not in expected:
            differences.append(Difference(name, get_platform().get_rank(), math.inf))
            continue
        whole = expected[name]
        mine, there = _array(value), _part_of(whole, value)
        allowed = float(np.abs(whole).max(initial=0))
        if name.startswith("weight/"):  # weights may be large beside their steps, which are what is compared
            allowed = config.optimizer.lr * num_steps
        elif "/gradient/" in name:
            allowed = max(allowed, 1e-3 * scale)
        if mine.shape != there.shape:
            raise AssertionError(f"{name}: {mine.shape} here, {there.shape} expected")
        error = float(np.abs(mine - there).max(initial=0)) / max(allowed, 1e-30)
        error = error if math.isfinite(error) else math.inf
        largest = max(largest, error)
        if error > tolerance:
            differences.append(Difference(name, get_platform().get_rank(), error, ratio_of(mine, there)))
    missing = [name for name in expected if name not in seen]
    return {
        "differences": [one.as_data() for one in differences],
        "largest": largest,
        "compared": len(seen),
        "missing": missing,
        "rank": get_platform().get_rank(),
    }


def _array(value: Any) -> np.ndarray:
    local = value.to_local() if isinstance(value, DTensor) else value
    return np.asarray(get_platform().tensor_to_numpy(get_platform().detached(local)))


def _part_of(whole: np.ndarray, value: Any) -> np.ndarray:
    """Where the rank's block of ``value`` lies in the whole."""
    if not isinstance(value, DTensor):
        return whole
    region = value._layout.local_region(tuple(value.shape))
    return whole[tuple(slice(start, start + size) for start, size in zip(region.offsets, region.sizes, strict=True))]
