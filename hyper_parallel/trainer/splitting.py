"""The model of a run, split as its config says: one call for the trainer, ``check`` and the forecast."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.parallel.parallelize import parallelize
from hyper_parallel.trainer.batches import aligned_loss, takes_labels
from hyper_parallel.trainer.precision import policy_of

if TYPE_CHECKING:
    from hyper_parallel.parallel.degrees import Degrees
    from hyper_parallel.parallel.parallel import Parallel
    from hyper_parallel.trainer.config.run_config import RunConfig

__all__ = ["split_model"]


def split_model(model: Any, config: RunConfig, degrees: Degrees | None = None, **more: Any) -> Parallel:
    """``model`` under the degrees of the config, or under others; ``more``: what only the trainer does."""
    return parallelize(
        model,
        degrees or config.parallel.degrees,
        sequence_parallel=config.parallel.sequence_parallel,
        attention=config.parallel.attention,
        order=config.parallel.order,
        keep_whole=config.parallel.keep_whole,
        offload=config.parallel.offload,
        microbatches=config.train.microbatches,
        schedule=config.parallel.schedule,
        stages_per_rank=config.parallel.stages_per_rank,
        precision=policy_of(config.precision),
        recompute=None if config.recompute.mode == "none" else config.recompute.mode,
        loss=None if takes_labels(model) else aligned_loss,
        **more,
    )
