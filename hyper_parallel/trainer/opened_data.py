"""The data of a run: what it is trained on, and what it is evaluated on; preparing it ends where a rank is to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.data.opening import open_data, open_validation

if TYPE_CHECKING:
    from hyper_parallel.data.dataset import Dataset
    from hyper_parallel.launch.signals import StopRequest
    from hyper_parallel.trainer.config.run_config import RunConfig

__all__ = ["Asked", "open_evaluation", "open_training"]


class Asked(Exception):
    """This process is to stop."""


def open_training(config: RunConfig, stop: StopRequest) -> Dataset:
    """The samples that are trained on."""
    return open_data(config.data, seed=config.train.seed, progress=_ending(stop))


def open_evaluation(config: RunConfig, stop: StopRequest) -> Dataset | None:
    """The samples that are evaluated on, if there are any."""
    return open_validation(config.eval.data or config.data, seed=config.train.seed, progress=_ending(stop))


def _ending(stop: StopRequest) -> Any:
    def progress(*done: Any) -> None:
        if stop.flag:
            raise Asked

    return progress
