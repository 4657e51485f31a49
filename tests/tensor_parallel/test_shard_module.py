"""Layouts by the paths of parameters and activations, against one device."""

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from tests.tensor_parallel.toy import Decoder, Mlp, same_as_one_device
from tests.world import run_on_ranks


class Net(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.mlp = nn.Linear(width, hidden)
        self.relu = nn.ReLU()
        self.out = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        x = self.out(self.relu(self.mlp(x)))
        return x if scale is None else x * scale


def _mesh(*shape: int) -> hp.DeviceMesh:
    world = torch.distributed.get_world_size()
    return hp.init_device_mesh("cpu", shape or (world,), mesh_dim_names=("tp",) if not shape else ("dp", "tp"))


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def _net(*sizes: int) -> Net:
    torch.manual_seed(1)
    return Net(*sizes).double()


@run_on_ranks(2, 4)
def test_plans_in_both_spellings() -> None:
    mesh = _mesh()
    whole, rows, last = [hp.Replicate()], [hp.Shard(0)], [hp.Shard(-1)]
    plans = [
        hp.ShardingPlan(
            {"mlp.weight": rows, "mlp.bias": rows, "out.weight": [hp.Shard(1)]},
            {"input": whole},
            {"relu.output": last, "output": whole},
            [""],
        ),
        hp.ShardingPlan(
            {"mlp.weight": ("tp", "None"), "out.weight": ("None", "tp")},
            {"input": ("None", "None", "None"), "relu.input": ("None", "None", "tp")},
            {"output": ("None", "None", "None")},
        ),
        hp.ShardingPlan({"**": whole, "mlp.weight": rows}, {"mlp.input": [whole], "out.input": whole}, None, ["out"]),
    ]
    for hidden in (8, 5, 1):
        for plan in plans:
            ours = same_as_one_device(
                _net(4, hidden), lambda m, p=plan: hp.shard_module(m, mesh, p), (_x(2, 3, 4),), num_steps=1
            )
            assert ours.mlp.weight.placements == (hp.Shard(0),)
            assert isinstance(ours.mlp.bias, hp.DTensor)  # of a module in the plan, so it is there too


@run_on_ranks(4)
def test_two_axes_and_keywords() -> None:
    mesh = _mesh(2, 2)
    plan = hp.ShardingPlan(
        {"mlp.weight": ("tp", "None"), "out.weight": ("None", "tp")},
        {"input": {"x": ("dp", "None", "None"), "scale": [hp.Replicate(), hp.Replicate()]}},
        {"output": [hp.Shard(0), hp.Replicate()]},
    )
    model, x, scale = _net(4, 6), _x(4, 3, 4), _x(4)
    want = model(x, scale)
    ours = hp.shard_module(_net(4, 6), mesh, plan)
    half = x.chunk(2)[mesh.get_local_rank("dp")]
    got = ours(x=half, scale=scale)
    assert got.placements == (hp.Shard(0), hp.Replicate())
    torch.testing.assert_close(got.full_tensor(), want)
    want.square().sum().backward()
    got.square().sum().backward()
    for (name, parameter), mine in zip(model.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), parameter.grad, msg=name)


@run_on_ranks(2)
def test_tied_parameters_stay_one() -> None:
    mesh = _mesh()
    whole = hp.Replicate()
    plan = hp.ShardingPlan({"embed.weight": [hp.Shard(0)], "**": [whole]}, {"input": whole}, {"output": whole}, [""])
    torch.manual_seed(0)
    model = Decoder(7, tied=True, num_blocks=1).double()
    ids = torch.arange(6).reshape(2, 3)
    ours = same_as_one_device(model, lambda m: hp.shard_module(m, mesh, plan), (ids,), num_steps=1)
    assert ours.head.weight is ours.embed.weight
    assert ours.head.weight.placements == (hp.Shard(0),)
    other = hp.ShardingPlan({"embed.weight": [hp.Shard(0)], "head.weight": [hp.Shard(1)]})
    with pytest.raises(ValueError, match=r"'head.weight' and 'embed.weight' are one parameter"):
        hp.shard_module(Decoder(7, tied=True), mesh, other)


@run_on_ranks(2)
def test_refusals() -> None:
    mesh = _mesh()

    def shard(**plan):
        return hp.shard_module(Mlp(4, 4), mesh, hp.ShardingPlan(**plan))

    with pytest.raises(ValueError, match=r"no parameter matches the path 'up.wieght'; did you mean 'up.weight'"):
        shard(plan={"up.wieght": [hp.Shard(0)]})
    with pytest.raises(ValueError, match=r"the parameter 'up.bias' of shape \(4,\): .*the tensor has 1 dims"):
        shard(plan={"up.bias": [hp.Shard(1)]})
    with pytest.raises(ValueError, match="'up' in input_plan does not end in 'input'"):
        shard(input_plan={"up": [hp.Replicate()]})
    with pytest.raises(ValueError, match="no module matches the path 'upp'"):
        shard(output_plan={"upp.output": [hp.Replicate()]})
    with pytest.raises(ValueError, match="return_local_tensor: no module matches the path 'gate'"):
        shard(return_local_tensor=["gate"])
    with pytest.raises(TypeError, match="shard_module takes a ShardingPlan, got dict"):
        hp.shard_module(Mlp(4, 4), mesh, {"up.weight": [hp.Shard(0)]})
    whole = [hp.Replicate()]
    with pytest.raises(ValueError, match="the plan has layouts for 2 inputs, but there are 1"):
        shard(input_plan={"input": [whole, None]})(_x(2, 4).float())


def test_a_world_of_one_process_changes_nothing() -> None:
    mesh = hp.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",), rank_list=(0,), init_backend=False)
    model = Mlp(4, 4)
    before = list(model.parameters())
    assert hp.shard_module(model, mesh, hp.ShardingPlan({"up.weight": [hp.Shard(0)]}, {"input": ("None",)})) is model
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))
    assert type(model(torch.ones(2, 4))) is torch.Tensor
