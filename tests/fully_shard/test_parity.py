"""Fully sharded training against one device: loss, gradients, their norm, weights after AdamW steps, in float64."""

import copy

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.fully_shard.parity import (
    Mlp,
    assert_all_sharded,
    batch,
    double,
    mesh_of,
    my_part,
    shard_blocks,
    trains_as_one_device,
    units,
)
from tests.tensor_parallel.small_modules import tp_plan
from tests.tensor_parallel.toy import Decoder
from tests.world import run_on_ranks

only_on = "torch"  # modules of PyTorch


@run_on_ranks(2, 3, 4)
@pytest.mark.parametrize("reshard", [True, False])
def test_one_shard_axis(reshard) -> None:
    mesh = mesh_of()
    ours = trains_as_one_device(double(Mlp), shard_blocks(mesh, reshard_after_forward=reshard), batch(12, 3), mesh)
    assert_all_sharded(ours)
    assert ours.first.weight.placements == (hp.Shard(0),)
    assert ours.scale.placements == (hp.Replicate(),)


@run_on_ranks(4)
@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1)])
def test_hybrid(shape) -> None:
    """Replicas of shards, and axes of one rank: where a wrong divisor or a collective with oneself would show."""
    mesh = mesh_of(*shape)
    ours = trains_as_one_device(double(Mlp), shard_blocks(mesh), batch(8, 3), mesh)
    assert_all_sharded(ours)
    assert ours.first.weight.placements == (hp.Replicate(), hp.Shard(0))


@run_on_ranks(4)
def test_two_shard_axes() -> None:
    """Data and context parallel ranks shard together: one ordered cut, one merged group."""
    mesh = mesh_of(2, 2, names=("dp", "cp"))
    shard = shard_blocks(mesh, shard_axes=("dp", "cp"))
    ours = trains_as_one_device(double(Mlp), shard, batch(8, 3), mesh)
    assert ours.first.weight._layout.shard_axes == ((0, 1), ())
    trains_as_one_device(double(Mlp), shard_blocks(mesh, shard_axes=("cp", "dp")), batch(8, 3), mesh)


@run_on_ranks(2)
def test_ranks_in_another_order() -> None:
    """The group's order is not the mesh's: parts must not be mixed up."""
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",), rank_list=(1, 0))
    trains_as_one_device(double(Mlp), shard_blocks(mesh), batch(8, 3), mesh)


@run_on_ranks(2, 4)
def test_other_dims() -> None:
    """torch's fully_shard refuses uneven shards of other dims than the first (NotImplementedError)."""
    mesh = mesh_of()
    shard = shard_blocks(mesh, shard_placement_fn=lambda p: hp.Shard(p.ndim - 1))
    ours = trains_as_one_device(double(Mlp), shard, batch(8, 3), mesh)
    assert ours.first.weight.placements == (hp.Shard(1),)


def _ids(rows: int, words: int) -> torch.Tensor:
    return torch.arange(rows * 5).reshape(rows, 5) * 7 % words


@run_on_ranks(4)
@pytest.mark.parametrize("tied", [False, True])
def test_tensor_parallelism_inside(tied) -> None:
    """Both cut the same dim: tensor parallelism first, then the data axis the block that is left."""
    mesh = mesh_of(2, 2, names=("dp", "tp"))

    def shard(model):
        hp.parallelize_module(model, mesh["tp"], tp_plan())
        shard_blocks(mesh["dp"])(model)

    model = double(Decoder, vocabulary=11, tied=tied)
    ours = trains_as_one_device(model, shard, _ids(4, 11), mesh["dp"])
    assert ours.blocks[0].mlp.up.weight._layout.described_dims() == "[tp*dp, -]"
    assert ours.blocks[0].mlp.down.weight._layout.described_dims() == "[dp, tp]"
    assert ours.blocks[0].norm1.weight._layout.described_dims() == "[dp]"
    assert_all_sharded(ours)


@run_on_ranks(2, 3)
@pytest.mark.parametrize("units", ["auto", None])
def test_replicate(units) -> None:
    mesh = mesh_of()
    ours = trains_as_one_device(double(Mlp), lambda m: hp.replicate(m, mesh, units=units), batch(12, 3), mesh)
    assert ours.first.weight.placements == (hp.Replicate(),)


@run_on_ranks(2)
@pytest.mark.parametrize("own_units", [False, True])
def test_tied_across_units(own_units) -> None:
    """torch's fully_shard refuses a parameter that two units have (ValueError since 2.13)."""
    mesh = mesh_of(2)

    def shard(model):
        if own_units:
            hp.fully_shard(model.embed, mesh=mesh)
            hp.fully_shard(model.head, mesh=mesh)
        shard_blocks(mesh)(model)

    ours = trains_as_one_device(double(Decoder, tied=True), shard, _ids(4, 12), mesh)
    assert ours.head.weight is ours.embed.weight
    assert_all_sharded(ours)


@run_on_ranks(2)
def test_automatic_units_and_lists() -> None:
    mesh = mesh_of(2)
    ours = trains_as_one_device(double(Mlp), lambda m: hp.fully_shard(m, mesh=mesh, units="auto"), batch(8, 3), mesh)
    assert isinstance(ours.blocks[1], hp.HSDPModule)
    assert len(units(ours)) == 2  # small blocks share a unit

    def shard(model):
        hp.fully_shard([model.blocks[0], model.blocks[2]], mesh=mesh)
        hp.fully_shard(model, mesh=mesh)

    trains_as_one_device(double(Mlp), shard, batch(8, 3), mesh)


@run_on_ranks(4)
def test_experts_on_another_mesh() -> None:
    """The divisor is the root's: torch's fully_shard gives gradients of experts that are too large without a knob."""
    mesh = mesh_of(2, 2, names=("edp", "ep"))
    data = hp.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    whole_batch = batch(8, 3)
    model = double(Mlp)

    def shard(ours):
        # The blocks stand for experts: equal on all ranks of "ep", whose gradients something else has summed.
        for block in ours.blocks:
            hp.fully_shard(block, mesh=mesh["edp"])
        hp.fully_shard(ours, mesh=data)

    ours = copy.deepcopy(model)
    shard(ours)
    mine = my_part(whole_batch, data)
    model(whole_batch).square().mean().backward()
    ours(mine).square().mean().backward()
    for name, parameter in model.named_parameters():
        got = dict(ours.named_parameters())[name].grad.full_tensor()
        if name.startswith("blocks"):
            get_platform().all_reduce(got, mesh.get_group("ep"))
        torch.testing.assert_close(got, parameter.grad, rtol=1e-9, atol=1e-9)
