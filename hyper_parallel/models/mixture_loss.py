"""The loss of a model that has auxiliary losses beside that of its targets."""

from __future__ import annotations

from typing import Any, NamedTuple

__all__ = ["MixtureLoss"]


class MixtureLoss(NamedTuple):
    """``loss`` is what is trained on: the mean over targets and the auxiliary losses, which ``auxiliary`` has alone.

    The two weigh differently where a batch is in parts: the one by targets, the other by rows.
    """

    loss: Any
    auxiliary: Any
