"""Layouts by the paths of parameters and activations, against one device."""

from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.frameworks import assert_close, backward, dist, grad_of, ours
from tests.frameworks.functions import relu
from tests.frameworks.models import TABLE, Module, fill, linear
from tests.tensor_parallel.small_modules import Decoder, Mlp, same_as_one_device
from tests.world import run_on_ranks


class Relu(Module):
    def forward(self, x: Any) -> Any:
        return relu(x)


class Net(Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.mlp = linear(width, hidden)
        self.relu = Relu()
        self.out = linear(hidden, width)

    def forward(self, x: Any, scale: Any = None) -> Any:
        x = self.out(self.relu(self.mlp(x)))
        return x if scale is None else x * scale


def _mesh(*shape: int) -> hp.DeviceMesh:
    world = dist.get_world_size()
    return hp.init_device_mesh("cpu", shape or (world,), mesh_dim_names=("tp",) if not shape else ("dp", "tp"))


def _x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


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
            cut = same_as_one_device(
                lambda hidden=hidden: Net(4, hidden), lambda m, p=plan: hp.shard_module(m, mesh, p), _x(2, 3, 4)
            )
            assert cut.mlp.weight.placements == (hp.Shard(0),)
            assert isinstance(cut.mlp.bias, hp.DTensor)  # of a module in the plan, so it is there too


@run_on_ranks(4)
def test_two_axes_and_keywords() -> None:
    mesh = _mesh(2, 2)
    plan = hp.ShardingPlan(
        {"mlp.weight": ("tp", "None"), "out.weight": ("None", "tp")},
        {"input": {"x": ("dp", "None", "None"), "scale": [hp.Replicate(), hp.Replicate()]}},
        {"output": [hp.Shard(0), hp.Replicate()]},
    )
    model, x, scale = fill(Net(4, 6)), _x(4, 3, 4), _x(4)
    want = model(ours(x), ours(scale))
    cut = hp.shard_module(fill(Net(4, 6)), mesh, plan)
    half = x.chunk(2)[mesh.get_local_rank("dp")]
    got = cut(x=ours(half), scale=ours(scale))
    assert got.placements == (hp.Shard(0), hp.Replicate())
    assert_close(got.detach().full_tensor(), want, rtol=1e-4, atol=1e-5)
    backward((want**2).sum())
    backward((got**2).sum())
    plain, mine = (get_platform().parameters_dict(one) for one in (model, cut))
    for name, parameter in plain.items():
        assert_close(mine[name].grad.full_tensor(), grad_of(parameter), rtol=1e-4, atol=1e-4, msg=name)


@run_on_ranks(2)
def test_tied_parameters_stay_one() -> None:
    mesh = _mesh()
    whole = hp.Replicate()
    table = f"embed.{TABLE}"
    plan = hp.ShardingPlan({table: [hp.Shard(0)], "**": [whole]}, {"input": whole}, {"output": whole}, [""])
    ids = torch.arange(6, dtype=torch.int32).reshape(2, 3)
    cut = same_as_one_device(lambda: Decoder(7, tied=True, num_blocks=1), lambda m: hp.shard_module(m, mesh, plan), ids)
    assert cut.head.weight is getattr(cut.embed, TABLE)
    assert cut.head.weight.placements == (hp.Shard(0),)
    other = hp.ShardingPlan({table: [hp.Shard(0)], "head.weight": [hp.Shard(1)]})
    with pytest.raises(ValueError, match=rf"'head.weight' and '{table}' are one parameter"):
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
        shard(input_plan={"input": [whole, None]})(ours(_x(2, 4)))


def test_a_world_of_one_process_changes_nothing() -> None:
    mesh = hp.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",), rank_list=(0,), init_backend=False)
    model = Mlp(4, 4)
    parameters_of = get_platform().parameters_dict
    before = list(parameters_of(model).values())
    assert hp.shard_module(model, mesh, hp.ShardingPlan({"up.weight": [hp.Shard(0)]}, {"input": ("None",)})) is model
    assert all(one is other for one, other in zip(parameters_of(model).values(), before, strict=True))
    assert type(model(ours(torch.ones(2, 4)))) is get_platform().Tensor
