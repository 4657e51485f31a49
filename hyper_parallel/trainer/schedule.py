"""How many steps a run has, and the learning rate of each, as a part of the config's: a warm-up, then a shape."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hyper_parallel.trainer.config.sections.schedule import ScheduleConfig
    from hyper_parallel.trainer.config.sections.train import TrainConfig

__all__ = ["num_steps", "rate_factor"]


def num_steps(config: TrainConfig, num_samples: int, done: int = 0, position: int = 0) -> int:
    """Steps of the whole run: as said, or those that are done and as many as the rest of the epochs needs.

    >>> from hyper_parallel.trainer.config.sections.train import TrainConfig
    >>> epochs = TrainConfig(epochs=2, batch=5)
    >>> num_steps(epochs, 100), num_steps(epochs, 100, done=10, position=100)  # which had batches of 10
    (40, 30)
    """
    if config.steps is not None:
        return config.steps
    return done + max(0, math.ceil((float(config.epochs or 1) * num_samples - position) / config.batch))


def rate_factor(config: ScheduleConfig, step: int, num_steps: int) -> float:
    """The factor of step ``step``, from 1, of a run of ``num_steps``.

    >>> from hyper_parallel.trainer.config.sections.schedule import ScheduleConfig
    >>> cosine = ScheduleConfig(name="cosine", warmup=2, min_ratio=0.0)
    >>> [round(rate_factor(cosine, step, 6), 3) for step in range(1, 7)]
    [0.5, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if step <= config.warmup:
        return step / config.warmup
    length = num_steps - config.warmup
    if config.name == "wsd":
        length = max(1, round(num_steps * config.decay))
    done = 1.0 - (num_steps - step) / max(1, length)
    if config.name == "constant" or done <= 0:
        return 1.0
    shape = 0.5 * (1 + math.cos(math.pi * done)) if config.name == "cosine" else 1.0 - done
    return config.min_ratio + (1.0 - config.min_ratio) * shape
