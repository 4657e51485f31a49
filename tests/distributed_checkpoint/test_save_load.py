"""Saving and loading on real ranks: any layout to any layout, plain tensors, objects, differing ranks."""

from __future__ import annotations

import pytest
import torch

from hyper_parallel import DTensor, Replicate, Shard, checkpoint, init_device_mesh
from hyper_parallel.platform import get_platform
from tests.frameworks import distribute_tensor, equal, ours
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
        "plain": ours(whole.clone()),
        "step": 7,
    }
    checkpoint.save(state, checkpoint_id=tmp_path / "step-7")
    for placement in (Shard(0), Shard(1), Replicate()):
        target = {
            name: distribute_tensor(torch.zeros(7, 5), mesh, [placement]) for name in ("rows", "columns", "copies")
        }
        target |= {"plain": ours(torch.zeros(7, 5)), "step": None}
        checkpoint.load(target, checkpoint_id=tmp_path / "step-7")
        for name in ("rows", "columns", "copies"):
            assert isinstance(target[name], DTensor)
            assert equal(target[name].full_tensor(), whole), name
        assert equal(target["plain"], whole)
        assert target["step"] == 7


def test_a_url_that_fsspec_knows():
    state = {"w": ours(torch.arange(6.0)), "none": None}
    checkpoint.save(state, checkpoint_id="memory://runs/step-1")
    checkpoint.save({"w": ours(torch.arange(6.0) + 1), "none": None}, checkpoint_id="memory://runs/step-1")
    target = {"w": ours(torch.zeros(6)), "none": 1}
    checkpoint.load(target, checkpoint_id="memory://runs/step-1")
    assert equal(target["w"], torch.arange(6.0) + 1)
    assert target["none"] is None


@run_on_ranks(4)
def test_replicas_are_read_once_where_reading_is_dear(tmp_path):
    rank = get_platform().get_rank()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    whole = torch.arange(60.0).reshape(6, 10)
    state = {f"w{i}": whole + i for i in range(8)} | {"plain": whole}
    checkpoint.save(ours(state), checkpoint_id=tmp_path / "a")
    uneven = {"only": ours(torch.ones(2))} if rank == 1 else {}
    checkpoint.save({"plain": ours(whole)} | uneven, checkpoint_id=tmp_path / "b")

    layouts = [[Replicate(), Shard(0)], [Shard(1), Replicate()], [Shard(0), Shard(1)], [Replicate(), Replicate()]]
    state = {f"w{i}": distribute_tensor(torch.zeros(6, 10), mesh, layouts[i % 4]) for i in range(8)}
    state["plain"] = ours(torch.zeros(6, 10))
    reader = checkpoint.FileSystemReader(reads_are_dear=True)
    checkpoint.load(state, checkpoint_id=tmp_path / "a", storage_reader=reader)
    for i in range(8):
        assert equal(state[f"w{i}"].full_tensor(), whole + i), i
    assert equal(state["plain"], whole)
    num_read = [None] * 4
    get_platform().all_gather_object(num_read, reader.bytes_read)
    assert sum(num_read) == 9 * 60 * 4  # every byte once
    assert max(num_read) < 0.5 * sum(num_read)

    state = {"plain": ours(torch.zeros(6, 10))} | ({"only": ours(torch.zeros(2))} if rank == 1 else {})
    checkpoint.load(
        state, checkpoint_id=tmp_path / "b", storage_reader=checkpoint.FileSystemReader(reads_are_dear=True)
    )
    assert equal(state["plain"], whole)
    if rank == 1:
        assert equal(state["only"], torch.ones(2))
    with pytest.raises(
        checkpoint.CheckpointError, match=r"failed on rank 3: ValueError: the checkpoint lacks 1 of the"
    ):
        checkpoint.load(
            {"plain": ours(torch.zeros(6, 10))} | ({"other": ours(torch.zeros(2))} if rank == 3 else {}),
            checkpoint_id=tmp_path / "b",
            storage_reader=checkpoint.FileSystemReader(reads_are_dear=True),
        )


@run_on_ranks(3)
def test_ranks_agree_through_files(tmp_path):
    mesh = init_device_mesh("cpu", (3,))
    whole = torch.arange(10.0)
    for version in range(3):
        state = {"w": distribute_tensor(whole + version, mesh, [Shard(0)]), "step": version}
        checkpoint.save(state, checkpoint_id=tmp_path / "a", use_collectives=False)
        target = {"w": distribute_tensor(torch.zeros(10), mesh, [Replicate()]), "step": None}
        checkpoint.load(target, checkpoint_id=tmp_path / "a", use_collectives=False)
        assert equal(target["w"].to_local(), whole + version)
        assert target["step"] == version
    bad = {"bad": object()} if get_platform().get_rank() == 2 else {}
    with pytest.raises(checkpoint.CheckpointError, match="rank 2: TypeError: 'bad' holds"):
        checkpoint.save(bad, checkpoint_id=tmp_path / "b", use_collectives=False)
    get_platform().barrier()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a"]
    with pytest.raises(ValueError, match=r"use_collectives=False .* is not in a file system"):
        checkpoint.save({}, checkpoint_id="memory://x", use_collectives=False)
