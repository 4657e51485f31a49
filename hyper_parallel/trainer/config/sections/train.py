"""``[train]``: how long, and in which batches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from hyper_parallel.trainer.config.section import STRICT, Count, Positive, Problem, Section, Whole

__all__ = ["TrainConfig"]


@dataclass(config=STRICT, kw_only=True, frozen=True)
class TrainConfig(Section):
    """How long is trained, and in which batches: one of `steps` and `epochs`."""

    ALTERNATIVES: ClassVar[tuple[str, ...]] = ("steps", "epochs")

    steps: Count | None = None
    """Steps of the whole run, those before a resume included."""
    epochs: Annotated[float, Field(strict=True, gt=0, le=1e9, allow_inf_nan=False)] | None = None
    """Passes over the data; a part of one is allowed."""
    batch: Count
    """Samples of one step on all ranks together, never per device; need not divide evenly."""
    microbatches: Count | None = None
    """Parts in which a rank computes its samples of a step, one after the other. None: 1; with pp twice pp, and at
    most its samples."""
    seed: Whole = 0
    """Of the first weights, the order of samples and dropout."""
    clip_norm: Positive | Literal["none"] = 1.0
    """Gradients of a larger norm, over all parameters, are scaled down to it."""
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    """Of the parameters and of what the optimizer keeps."""

    def problems(self) -> Iterator[Problem]:
        if self.steps is not None and self.epochs is not None:
            yield Problem(("epochs", "steps"), "is given beside steps; keep one of them")
        if self.steps is None and self.epochs is None:
            yield Problem(("steps", "epochs"), "is missing: give steps = 1000 or epochs = 1")
        if self.microbatches is not None and self.microbatches > self.batch:
            yield Problem(
                ("microbatches", "batch"),
                f"must be at most the samples of a step, batch = {self.batch}, got {self.microbatches}",
            )
