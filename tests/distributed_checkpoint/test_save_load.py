"""Saving and loading on real ranks: any layout to any layout, plain tensors, objects, differing ranks."""

from __future__ import annotations

import torch

from hyper_parallel import DTensor, Replicate, Shard, checkpoint, distribute_tensor, init_device_mesh
from hyper_parallel.platform import get_platform
from tests.world import run_on_ranks


@run_on_ranks(2, 4)
def test_a_cut_tensor_loads_under_another_layout(tmp_path):
    size = get_platform().get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(35.0).reshape(7, 5)
    state = {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole, mesh, [Shard(1)]),
        "copies": distribute_tensor(whole, mesh, [Replicate()]),
        "plain": whole.clone(),
        "step": 7,
    }
    checkpoint.save(state, checkpoint_id=tmp_path / "step-7")
    for placement in (Shard(0), Shard(1), Replicate()):
        target = {
            name: distribute_tensor(torch.zeros(7, 5), mesh, [placement]) for name in ("rows", "columns", "copies")
        }
        target |= {"plain": torch.zeros(7, 5), "step": None}
        checkpoint.load(target, checkpoint_id=tmp_path / "step-7")
        for name in ("rows", "columns", "copies"):
            assert isinstance(target[name], DTensor)
            assert torch.equal(target[name].full_tensor(), whole), name
        assert torch.equal(target["plain"], whole)
        assert target["step"] == 7


def test_a_url_that_fsspec_knows():
    state = {"w": torch.arange(6.0), "none": None}
    checkpoint.save(state, checkpoint_id="memory://runs/step-1")
    checkpoint.save({"w": torch.arange(6.0) + 1, "none": None}, checkpoint_id="memory://runs/step-1")
    target = {"w": torch.zeros(6), "none": 1}
    checkpoint.load(target, checkpoint_id="memory://runs/step-1")
    assert torch.equal(target["w"], torch.arange(6.0) + 1)
    assert target["none"] is None
