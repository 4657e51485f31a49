"""Collectives with gradients on PyTorch; what they do and check is in ``platform/shared/differentiable.py``."""

from __future__ import annotations

import torch
import torch.distributed as dist

from hyper_parallel.platform.shared.differentiable import DifferentiableCollectives
from hyper_parallel.platform.torch.communication import group_facts, groups
from hyper_parallel.platform.torch.communication.collective_gradients import functions

__all__ = [
    "differentiable_all_gather_concat",
    "differentiable_all_reduce",
    "differentiable_all_to_all",
    "differentiable_all_to_all_single",
    "differentiable_all_to_all_single_async",
    "differentiable_reduce_scatter",
    "p2p_exchange",
    "vary",
]


def _check_peer(function: str, tensor: torch.Tensor, peer_rank: int, group: dist.ProcessGroup) -> bool:
    group, facts = group_facts.find_facts(group)
    group_facts.find_movable(function, tensor, facts)
    group_facts.group_rank_of(function, peer_rank, "peer_rank", facts)
    return peer_rank == groups.get_rank()


_collectives = DifferentiableCollectives(functions, torch.Tensor, "torch.Tensor", groups.unwrap_group, _check_peer)

differentiable_all_gather_concat = _collectives.differentiable_all_gather_concat
differentiable_all_reduce = _collectives.differentiable_all_reduce
differentiable_reduce_scatter = _collectives.differentiable_reduce_scatter
differentiable_all_to_all = _collectives.differentiable_all_to_all
differentiable_all_to_all_single = _collectives.differentiable_all_to_all_single
differentiable_all_to_all_single_async = _collectives.differentiable_all_to_all_single_async
p2p_exchange = _collectives.p2p_exchange
vary = _collectives.vary
