"""``[recompute]``: what backward computes again instead of keeping it."""

from __future__ import annotations

from typing import Literal

from pydantic.dataclasses import dataclass

from hyper_parallel.trainer.config.section import STRICT, Section

__all__ = ["RecomputeConfig"]


@dataclass(config=STRICT, kw_only=True, frozen=True)
class RecomputeConfig(Section):
    """What backward computes again instead of keeping it."""

    mode: Literal["none", "full"] = "none"
    """full: each block keeps its input only and is computed again in backward."""
