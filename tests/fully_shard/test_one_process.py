"""A fully sharded step without devices: one process as any rank of a silent world, on tensors without memory."""

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.membership import Member, as_member
from tests.fully_shard.parity import Mlp, assert_all_sharded, loss_of, shard_blocks

only_on = "torch"  # modules of PyTorch


@pytest.mark.parametrize(("rank", "shape"), [(0, (8,)), (7, (8,)), (3, (2, 4))])
@pytest.mark.parametrize("kind", ["shard", "replicate"])
def test_a_step_of_any_rank(rank, shape, kind) -> None:
    """Sizes, layouts and collectives of a step are known before anything runs."""
    with as_member(Member(rank, 8, get_platform().silent_group)), torch.device("meta"):
        mesh = hp.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "dp")[-len(shape) :])
        model = Mlp(width=16, hidden=32)
        if kind == "shard":
            shard_blocks(mesh, mp_policy=hp.MixedPrecisionPolicy(torch.bfloat16, torch.float32))(model)
        else:
            hp.replicate(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        with hp.CommRecorder() as recorder:
            for number in range(2):
                model.set_requires_gradient_sync(number == 1)
                loss_of(model(torch.empty(4, 3))).backward()
        if kind == "shard":
            assert recorder.counts["reduce_scatter_tensor"] == 4
            assert model.blocks[0].up.weight.grad.to_local().shape == (32 // shape[-1], 16)
        else:
            assert recorder.counts == {"all_reduce": 2}  # small blocks share a unit
        assert model.blocks[0].up.weight.grad.is_meta
        hp.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        assert_all_sharded(model)
