"""Loggers beside ``metrics.jsonl``: TensorBoard and Weights & Biases, imported only where they are asked for."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hyper_parallel.trainer.config.sections.log import LogConfig

__all__ = ["open_loggers"]


class _TensorBoard:
    def __init__(self, folder: Path) -> None:
        module = _imported("torch.utils.tensorboard", "log.tensorboard", "tensorboard")
        self._writer = module.SummaryWriter(str(folder / "tensorboard"))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, project: str, folder: Path) -> None:
        self._run = _imported("wandb", "log.wandb", "wandb").init(project=project, dir=str(folder))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def open_loggers(config: LogConfig, folder: Path) -> list[Any]:
    """What the config asks for, objects with ``log(step, values)`` and ``close()``."""
    loggers: list[Any] = []
    if config.tensorboard:
        loggers.append(_TensorBoard(folder))
    if config.wandb is not None:
        loggers.append(_WeightsAndBiases(config.wandb, folder))
    return loggers


def _imported(name: str, key: str, package: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"{key}: {package} is not installed ({error}); pip install {package}, or leave it out"
        ) from None
