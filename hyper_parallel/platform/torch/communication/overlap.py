"""Communication that runs while the device computes, on PyTorch; what it does is in ``platform/shared/overlap.py``."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from hyper_parallel.platform.shared.overlap import GradReduction, HandleBox, OverlapFunctions
from hyper_parallel.platform.torch.communication import collectives, groups
from hyper_parallel.platform.torch.private_api import is_in_backward

__all__ = [
    "GradReduction",
    "HandleBox",
    "differentiable_async_a2a_wait",
    "differentiable_sync_hook",
    "launch_async_all_to_all",
]


def _runs_in_backward() -> bool:
    # Private: the public API does not tell whether autograd's backward is running. torch.utils.checkpoint asks in the
    # same way.
    return is_in_backward()


_overlap = OverlapFunctions(
    torch.autograd.Function,
    once_differentiable,
    collectives,
    groups.unwrap_group,
    lambda x: x.view_as(x),
    _runs_in_backward,
)

differentiable_async_a2a_wait = _overlap.differentiable_async_a2a_wait
differentiable_sync_hook = _overlap.differentiable_sync_hook
launch_async_all_to_all = _overlap.launch_async_all_to_all
