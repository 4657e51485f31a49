"""``[eval]``: the loss on other samples, while training."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic.dataclasses import dataclass

from hyper_parallel.trainer.config.section import STRICT, Count, Problem, Section, Whole
from hyper_parallel.trainer.config.sections.data import DataConfig

__all__ = ["EvalConfig"]


@dataclass(config=STRICT, kw_only=True, frozen=True)
class EvalConfig(Section):
    """The loss on other samples, while training."""

    every: Whole = 0
    """Steps between evaluations; 0: none."""
    samples: Count = 256
    """How many samples are evaluated each time, always the same ones."""
    data: DataConfig | None = None
    """Where they come from."""

    def problems(self) -> Iterator[Problem]:
        if self.every and self.data is None:
            yield Problem(("data", "every"), f"is missing: every = {self.every} evaluates on samples of [eval.data]")
