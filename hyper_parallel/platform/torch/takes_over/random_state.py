"""Repeating random numbers: PyTorch's saved random state carries that of distributed tensors along.

Note [Recomputation draws the same numbers]
Random DTensors come from a counter of the library. ``torch.utils.checkpoint`` and ``torch.random.fork_rng`` save and
restore PyTorch's generators only: a dropout would draw another mask when it is recomputed, and the gradients would be
wrong without an error. Both go through ``torch.get_rng_state`` and ``torch.set_rng_state``, so these are wrapped: the
state that the first returns has the library's state attached, and the second restores it when it is there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_ATTACHED = "_hyper_parallel_random_state"

_plain_get, _plain_set = torch.get_rng_state, torch.set_rng_state


def carry_random_state(get_state: Callable[[], Any], set_state: Callable[[Any], None]) -> None:
    """Let PyTorch's random state carry what ``get_state`` gives, for ``set_state`` to restore."""

    def get_rng_state() -> torch.Tensor:
        state = _plain_get()
        setattr(state, _ATTACHED, get_state())
        return state

    def set_rng_state(new_state: torch.Tensor) -> None:
        _plain_set(new_state)
        attached = getattr(new_state, _ATTACHED, None)
        if attached is not None:
            set_state(attached)

    for wrapper, plain in ((get_rng_state, _plain_get), (set_rng_state, _plain_set)):
        wrapper.__doc__ = plain.__doc__
        for module in (torch, torch.random):
            setattr(module, wrapper.__name__, wrapper)
