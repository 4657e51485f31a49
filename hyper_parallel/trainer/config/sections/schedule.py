"""``[schedule]``: the learning rate over the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic.dataclasses import dataclass

from hyper_parallel.trainer.config.section import STRICT, Fraction, Problem, Section, Whole

__all__ = ["ScheduleConfig"]


@dataclass(config=STRICT, kw_only=True, frozen=True)
class ScheduleConfig(Section):
    """The learning rate over the run."""

    name: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """After the warm-up: constant; down to min_ratio as a line or a cosine; wsd: constant, and down at the end."""
    warmup: Whole = 0
    """Steps over which the rate rises to optimizer.lr."""
    min_ratio: Fraction = 0.1
    """The last rate, as a part of optimizer.lr."""
    decay: Fraction = 0.2
    """Of wsd: the part of the run in which the rate goes down."""

    def problems(self) -> Iterator[Problem]:
        if self.name == "wsd" and self.decay == 0:
            yield Problem(("decay", "name"), 'must be above 0 for wsd, got 0.0; without decay it is name = "constant"')
