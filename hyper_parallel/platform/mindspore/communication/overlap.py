"""Communication that runs while the device computes, on MindSpore; what it does: ``shared/overlap.py``."""

from __future__ import annotations

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.communication import collectives, groups
from hyper_parallel.platform.shared.overlap import GradReduction, OverlapFunctions

__all__ = [
    "GradReduction",
    "differentiable_async_a2a_wait",
    "differentiable_sync_hook",
    "launch_async_all_to_all",
]

_overlap = OverlapFunctions(
    private_api.Function,
    lambda backward: backward,
    collectives,
    groups.unwrap_group,
    lambda x: x.view(x.shape),
    private_api.runs_in_backward,
)

differentiable_async_a2a_wait = _overlap.differentiable_async_a2a_wait
differentiable_sync_hook = _overlap.differentiable_sync_hook
launch_async_all_to_all = _overlap.launch_async_all_to_all
