"""A rank that is killed between dispatch and combine: the others raise, and say over which ranks and who is gone."""

import os
import signal

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.world import RanksFailed

only_on = "torch"  # kills of processes are tried there
pytestmark = pytest.mark.processes("ranks are killed")

TOLD = 3  # the exit code of a rank that was told who is gone


def _lose_rank_2() -> None:
    mesh = hp.init_device_mesh("cpu", (3,), mesh_dim_names=("ep",))
    torch.manual_seed(0)
    weight = hp.distribute_tensor(torch.randn(6, 8, 8), mesh, [hp.Shard(0)])
    tokens, chosen, weights = (
        torch.randn(5, 8),
        torch.tensor([[0, 3], [1, 4], [2, 5], [0, 5], [3, 4]]),
        torch.rand(5, 2),
    )
    hp.experts(tokens, chosen, weights, weight, weight, activation=torch.relu)
    pids = [None] * 3
    get_platform().all_gather_object(pids, os.getpid())

    def dies(rows: torch.Tensor) -> torch.Tensor:  # behind dispatch, before combine
        if get_platform().get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return rows

    gone = rf"rank 2 \(process {pids[2]}\) has ended"
    if get_platform().get_rank() == 1:  # Rank 0, where ranks look who is gone, may have been told and ended before.
        gone = f"({gone}|rank 0, or whichever process holds the store of the world, has ended)"
    text = rf"experts, [\w' ]+ over ep=3 \(ranks 0, 1, 2\): communication failed on rank \d: {gone}"
    with pytest.raises(RuntimeError, match=text):
        for _ in range(3):
            hp.experts(tokens, chosen, weights, weight, weight, activation=dies, beside=lambda: None)
    os._exit(TOLD)


def test_a_rank_that_is_killed_is_named(worlds) -> None:
    with pytest.raises(RanksFailed) as caught:
        worlds(3).run(_lose_rank_2)
    outcome = caught.value.outcome
    assert outcome.died == {0: TOLD, 1: TOLD, 2: -signal.SIGKILL}, str(caught.value)
