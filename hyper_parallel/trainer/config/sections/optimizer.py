"""``[optimizer]``: how gradients change weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field
from pydantic.dataclasses import dataclass

from hyper_parallel.trainer.config.section import STRICT, Fraction, Positive, Problem, Section, Text

__all__ = ["OptimizerConfig"]

_Beta = Annotated[float, Field(strict=True, ge=0, lt=1)]
_NotNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
_DEFAULT_BETAS, _DEFAULT_EPS = (0.9, 0.95), 1e-8


@dataclass(config=STRICT, kw_only=True, frozen=True)
class OptimizerConfig(Section):
    """How gradients change weights."""

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    """adamw and adam use betas and eps, sgd uses momentum."""
    lr: Positive = 3e-4
    """The learning rate; [schedule] says how it changes."""
    betas: tuple[_Beta, _Beta] = _DEFAULT_BETAS
    """How slowly the means of gradients and of their squares move."""
    eps: Positive = _DEFAULT_EPS
    """Added to the root of the mean square."""
    weight_decay: _NotNegative = 0.1
    """How much weights shrink per step, times the learning rate."""
    momentum: Fraction = 0.0
    """Of sgd: how much of the last step is repeated."""
    no_decay: tuple[Text, ...] = ("*norm*", "*bias", "*embed*")
    """Patterns of the names of parameters that do not shrink."""

    def problems(self) -> Iterator[Problem]:
        if self.name != "sgd" and self.momentum:
            yield Problem(("momentum", "name"), f"is of sgd; {self.name} has betas, got {self.momentum}")
        if self.name == "sgd":
            for key, usual in (("betas", _DEFAULT_BETAS), ("eps", _DEFAULT_EPS)):
                if getattr(self, key) != usual:
                    yield Problem((key, "name"), f"is of adamw and adam; sgd has momentum, got {getattr(self, key)}")
