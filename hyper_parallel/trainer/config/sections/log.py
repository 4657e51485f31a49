"""``[log]``: what is written down, where, and how often."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from hyper_parallel.trainer.config.section import STRICT, Count, Flag, Positive, Section, Text

__all__ = ["LogConfig"]


@dataclass(config=STRICT, kw_only=True, frozen=True)
class LogConfig(Section):
    """What is written down, where, and how often."""

    folder: Text = "run"
    """The folder of the run: metrics, logs of ranks, the report, and checkpoints unless they have their own."""
    every: Count = 10
    """Steps between lines of the terminal."""
    tensorboard: Flag = False
    """Also write for TensorBoard, which must be installed."""
    wandb: Text | None = None
    """Also send to this project of Weights & Biases, which must be installed."""
    trace_step: Count | None = None
    """Write a trace of this step for Perfetto or Chrome."""
    peak_flops: Positive | Literal["auto"] = "auto"
    """Of one device, in operations per second, to compare with; "auto": known or measured."""
