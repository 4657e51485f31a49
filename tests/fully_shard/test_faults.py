"""A rank that is killed in the middle of a step: the others raise, and say in which unit, over what and who is gone."""

import os
import signal

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.fully_shard.parity import Mlp, batch, loss_of, my_part, shard_blocks
from tests.world import RanksFailed

only_on = "torch"  # modules of PyTorch
pytestmark = pytest.mark.processes("ranks are killed")


TOLD = 3  # the exit code of a rank that was told who is gone


class Dies(torch.autograd.Function):
    """In backward of one rank the process is killed."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        _die()
        return gradient


def _die() -> None:
    if get_platform().get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)


def _lose_rank_2(moment: str) -> None:
    mesh = hp.init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = Mlp()
    shard_blocks(mesh)(model)
    x = my_part(batch(12, 3).float(), mesh)
    for _ in range(2):
        loss_of(model(x)).backward()
    pids = [None] * 3
    get_platform().all_gather_object(pids, os.getpid())
    if moment == "forward":
        model.blocks[1].register_forward_pre_hook(lambda module, args: _die())
    elif moment == "gather":
        model.blocks[0].up.register_forward_hook(lambda module, args, out: _die())  # that of block 1 is in flight
    elif moment == "reduction":
        model.blocks[1].register_forward_hook(lambda module, args, out: Dies.apply(out))
    else:
        model.first.register_forward_hook(lambda module, args, out: Dies.apply(out))  # reductions are in flight
    text = r"fully_shard, (gather|reduction) of the \w+ of (unit 'blocks\.\d'|the unit of Mlp) over shard over dp=3: "
    gone = rf"rank 2 \(process {pids[2]}\) has ended"
    if get_platform().get_rank() == 1:  # Rank 0, where ranks look who is gone, may have been told and ended before.
        gone = f"({gone}|rank 0, or whichever process holds the store of the world, has ended)"
    text += rf"communication failed on rank \d: {gone}"
    with pytest.raises(RuntimeError, match=text):
        for _ in range(3):
            loss_of(model(x)).backward()
    # As a program does. One that stayed would not have sent what the other still waits for.
    os._exit(TOLD)


@pytest.mark.parametrize("moment", ["forward", "gather", "reduction", "end of backward"])
def test_a_rank_that_is_killed_is_named(worlds, moment) -> None:
    with pytest.raises(RanksFailed) as caught:
        worlds(3).run(_lose_rank_2, moment)
    outcome = caught.value.outcome
    assert outcome.died == {0: TOLD, 1: TOLD, 2: -signal.SIGKILL}, str(caught.value)


def _call_other_units() -> None:
    # The group cannot be used afterwards: it is one that no other test has.
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",), rank_list=(0, 2))
    if mesh.get_coordinate() is None:
        return
    model = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 8)])
    for layer in model:
        hp.fully_shard(layer, mesh=mesh)
    with pytest.raises(RuntimeError, match=r"(?s)of the unit of Linear over .*disagree: not the same shape"):
        for _ in range(3):
            model[mesh.get_local_rank()](torch.randn(2, 4))


def test_ranks_that_call_different_units_are_told(worlds) -> None:
    """Before anything is sent, by the ledger of the group; torch's fully_shard hangs or mixes the values up."""
    worlds(3).run(_call_other_units)
