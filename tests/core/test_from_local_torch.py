"""``from_local`` with blocks of sizes that no cut gives: an error on every rank at the first communication."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel import DTensor, Replicate, Shard
from tests.core.test_from_local import SIZES_DIFFER, raised_by_all, rank_and_mesh
from tests.world import run_on_ranks

UNEVEN = {"first": [1, 3], "gaps": [0, 2], "reversed": [2, 3]}


@run_on_ranks(2)
@pytest.mark.parametrize("rows", list(UNEVEN.values()), ids=list(UNEVEN))
def test_sizes_that_no_cut_gives_are_errors_at_the_first_communication(rows):
    rank, mesh = rank_and_mesh()
    uses = {
        "full_tensor": lambda made: made.full_tensor(),
        "redistribute": lambda made: made.redistribute(placements=[Shard(1)]),
        "async": lambda made: made.redistribute(async_op=True),
        "op": lambda made: (made * 2).full_tensor(),
        "ops": lambda made: (made.relu() + 1).exp().redistribute(placements=[Replicate()]),
        "sum": lambda made: made.sum().full_tensor(),
        "item": lambda made: made.sum().item(),
    }
    for name, use in uses.items():
        made = DTensor.from_local(torch.ones(rows[rank], 2), mesh, [Shard(0)])
        text = raised_by_all(lambda made=made, use=use: use(made), SIZES_DIFFER)
        assert f"rank 0: ({rows[0]}, 2), rank 1: ({rows[1]}, 2)" in text, name
