"""Distributed tensors of PyTorch on ranks outside of their mesh."""

from __future__ import annotations

import torch

from hyper_parallel import Shard, distribute_tensor
from tests.core.test_distribute import make_mesh
from tests.world import run_on_ranks


@run_on_ranks(4)
def test_ranks_outside_hold_an_empty_block():
    mesh = make_mesh(2, rank_list=[3, 1])
    start = torch.arange(6.0, requires_grad=True)
    for made in (distribute_tensor(start, mesh, [Shard(0)]), distribute_tensor(start * 2, mesh, [Shard(0)])):
        assert made.shape == (6,) and made.requires_grad and made.placements == (Shard(0),)
        assert made.local_shape == ((0,), (3,), (0,), (3,))[torch.distributed.get_rank()]
