"""``[eval]``: the loss on other samples, while training."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from hyper_parallel.trainer.config.section import STRICT, Count, Data, Section, Whole

__all__ = ["EvalConfig"]


@dataclass(config=STRICT, kw_only=True, frozen=True)
class EvalConfig(Section):
    """The loss on other samples, while training."""

    every: Whole = 0
    """Steps between evaluations; 0: none."""
    samples: Count = 256
    """How many samples are evaluated each time, always the same ones."""
    data: Data | None = None
    """Where they come from; without it, from what data.validation or data.validation_path set apart."""
