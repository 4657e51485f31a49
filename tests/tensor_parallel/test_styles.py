"""Every style against one device: values, all gradients, the step after; even, uneven and empty shards."""

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from tests.tensor_parallel.toy import Decoder, Mlp, same_as_one_device, sp_plan, tp_plan
from tests.world import run_on_ranks


def _mesh() -> hp.DeviceMesh:
    return hp.init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))


def _x(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _double(make, *args, **kwargs) -> nn.Module:
    torch.manual_seed(1)
    return make(*args, **kwargs).double()


@run_on_ranks(2, 4)
def test_linear_styles() -> None:
    """Sizes that divide, that do not, and that leave ranks without rows."""
    mesh = _mesh()
    outs = (hp.Replicate(), hp.Shard(-1), hp.Shard(0), hp.Shard(1))
    for features_in, features_out, bias in ((4, 8, True), (5, 7, True), (3, 2, False), (1, 1, True)):
        for style in (hp.ColwiseParallel, hp.RowwiseParallel):
            for out in outs:
                model = _double(nn.Linear, features_in, features_out, bias=bias)
                plan = style(input_layouts=hp.Replicate(), output_layouts=out, use_local_output=out == hp.Replicate())
                same_as_one_device(
                    model,
                    lambda m, plan=plan: hp.parallelize_module(m, mesh, plan),
                    (_x(2, 3, features_in),),
                    num_steps=1,
                )


@run_on_ranks(2, 4)
def test_pair_of_linears_on_plain_blocks() -> None:
    mesh = _mesh()
    for hidden in (8, 6, 3, 1):
        model = _double(Mlp, 4, hidden)
        plan = {"up": hp.ColwiseParallel(), "down": hp.RowwiseParallel()}
        ours = same_as_one_device(model, lambda m, p=plan: hp.parallelize_module(m, mesh, p), (_x(2, 3, 4),))
        assert ours.up.weight.placements == (hp.Shard(0),)
        assert ours.down.weight.placements == (hp.Shard(1),)


@run_on_ranks(2, 4)
def test_embedding_styles() -> None:
    mesh = _mesh()
    ids = torch.tensor([[0, 2, 2, 1], [1, 0, 4, 2]])
    for words, width in ((8, 4), (5, 3), (6, 1)):
        for padding in (None, 2):
            for plan in (
                hp.ColwiseParallel(output_layouts=hp.Replicate()),
                hp.ColwiseParallel(use_local_output=False),
                hp.RowwiseParallel(),
                hp.RowwiseParallel(output_layouts=hp.Shard(1), use_local_output=False),
            ):
                model = _double(nn.Embedding, words, width, padding_idx=padding)
                same_as_one_device(model, lambda m, p=plan: hp.parallelize_module(m, mesh, p), (ids,), num_steps=1)


@run_on_ranks(2, 4)
@pytest.mark.parametrize("plan", ["tp", "sp", "sp_local"])
def test_decoder(plan: str) -> None:
    mesh = _mesh()
    plans = {"tp": tp_plan, "sp": sp_plan, "sp_local": lambda: sp_plan(local=True)}
    for vocabulary, length, tied in ((12, 8, False), (9, 5 if plan != "sp_local" else 4, True)):
        model = _double(Decoder, vocabulary, tied=tied)
        ids = torch.randint(vocabulary, (2, length), generator=torch.Generator().manual_seed(0))
        ours = same_as_one_device(model, lambda m: hp.parallelize_module(m, mesh, plans[plan]()), (ids,))
        assert (ours.head.weight is ours.embed.weight) == tied


@run_on_ranks(2)
def test_repr_and_contract() -> None:
    assert repr(hp.ColwiseParallel()) == (
        "ColwiseParallel(input_layouts=Replicate(), output_layouts=Shard(-1), use_local_output=True)"
    )
    assert "RowwiseParallel(input_layouts=Shard(-1)" in repr(hp.RowwiseParallel())
    assert repr(hp.SequenceParallel()) == "SequenceParallel(sequence_dim=1, use_local_output=False)"
    both = hp.PrepareModuleInputOutput(
        input_layouts=hp.Shard(0),
        desired_input_layouts=hp.Replicate(),
        output_layouts=hp.Replicate(),
        desired_output_layouts=hp.Shard(0),
    )
    assert "desired_output_layouts=(Shard(0),)" in repr(both)
    with pytest.raises(NotImplementedError, match="not a Conv2d"):
        hp.parallelize_module(nn.Conv2d(2, 2, 1), _mesh(), hp.ColwiseParallel())
