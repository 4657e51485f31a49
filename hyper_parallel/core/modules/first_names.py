"""The first names of tied parameters in a model of which only a part is left, such as a pipeline stage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NOTE = "_hyper_parallel_first_names"


def note_first_names(model: Any, first_names: Mapping[str, str]) -> None:
    """Remember on a part of a model which name of the whole one comes first for each of its parameters.

    States of optimizers are kept under it: a head that is tied to an embedding on another stage has the embedding's.
    """
    object.__setattr__(model, _NOTE, dict(first_names))


def noted_first_names(model: Any) -> Mapping[str, str]:
    """What :func:`note_first_names` was given; nothing for a whole model."""
    return getattr(model, _NOTE, {})
