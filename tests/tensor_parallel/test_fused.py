"""Heads that do not divide the ranks, and weights that hold several projections, against one device."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyper_parallel as hp
from tests.tensor_parallel.toy import Attention, same_as_one_device, whole
from tests.world import run_on_ranks


def _mesh() -> hp.DeviceMesh:
    return hp.init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))


def _x(width: int) -> torch.Tensor:
    return torch.randn(2, 5, width, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@run_on_ranks(2, 4)
def test_heads_that_do_not_divide() -> None:
    """Grouped-query, multi-query and plain attention; ranks with fewer heads than others, and with none."""
    mesh = _mesh()
    for num_heads, num_kv_heads in ((4, 2), (4, 1), (6, 3), (6, 2), (3, 3), (1, 1), (5, 1)):
        heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
        plan = {
            "q": hp.HeadParallel("query", **heads),
            "[kv]": hp.HeadParallel("key_value", **heads),
            "o": hp.HeadParallel("output", **heads),
        }
        torch.manual_seed(1)
        model = Attention(4 * num_heads, num_heads, num_kv_heads).double()
        x = _x(4 * num_heads)
        ours = same_as_one_device(model, lambda m, p=plan: hp.parallelize_module(m, mesh, p), (x,))
        if num_heads % mesh.size() == 0:
            assert ours.q.weight.placements == (hp.Shard(0),)
        with hp.CommRecorder() as recorder:
            ours(x)
        assert recorder.counts == {"all_reduce": 1}, recorder.table()


@run_on_ranks(2)
def test_query_key_and_value_share_one_backward_sum() -> None:
    mesh = _mesh()
    heads = {"num_heads": 3, "num_kv_heads": 1}
    plan = {"q": hp.HeadParallel("query", **heads), "[kv]": hp.HeadParallel("key_value", **heads)}
    plan["o"] = hp.HeadParallel("output", **heads)
    ours = hp.parallelize_module(Attention(12, 3, 1).double(), mesh, plan)
    out = ours(_x(12).requires_grad_() * 1)
    with hp.CommRecorder() as recorder:
        out.sum().backward()
    sums = [record.shape for record in recorder.records if len(record.shape) == 3]
    assert sums == [(2, 5, 12)], recorder.table()


class FusedAttention(nn.Module):
    def __init__(self, num_heads: int, num_kv_heads: int, bias: bool) -> None:
        super().__init__()
        width = 4 * num_heads
        self.local_query_width: int | None = None
        self.widths = (width, 4 * num_kv_heads, 4 * num_kv_heads)
        self.qkv = nn.Linear(width, sum(self.widths), bias=bias)
        self.o = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fused = self.qkv(x)
        q, k, v = fused.split(self._widths(fused.shape[-1]), dim=-1)
        q, k, v = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1])
        return self.o(mixed.transpose(1, 2).flatten(-2))

    def _widths(self, total: int) -> tuple[int, int, int]:
        query = self.local_query_width
        if query is None:
            return self.widths
        return query, (total - query) // 2, (total - query) // 2


class GateUp(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(width, 2 * hidden)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def _fused_like_one_device(model: nn.Module, mesh: Any, plan: dict, x: torch.Tensor, path: str, parts: tuple) -> None:
    """As ``same_as_one_device``; the fused layer's parameters are compared part by part."""
    ours = copy.deepcopy(model)
    hp.parallelize_module(ours, mesh, plan)
    if isinstance(ours, FusedAttention):
        ours.local_query_width = 4 * len(range(model.o.in_features // 4)[_block(model.o.in_features // 4, mesh)])
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, ours)]

    def fused(name: str, gradient: bool) -> torch.Tensor:
        found = [getattr(ours.get_submodule(path), f"{name}_{part}") for part in parts]
        return torch.cat([whole(one.grad if gradient else one.detach()) for one in found])

    for step in range(2):
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        outputs = [m(one) for m, one in zip((model, ours), inputs, strict=True)]
        torch.testing.assert_close(outputs[1], outputs[0])
        for out in outputs:
            (out.sin() * torch.arange(1, out.shape[-1] + 1)).sum().backward()
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
        for gradient in (True, False):
            for name, parameter in model.named_parameters():
                owner, _, own = name.rpartition(".")
                mine = fused(own, gradient) if owner == path else whole(_grad_or_value(ours, name, gradient))
                want = parameter.grad if gradient else parameter.detach()
                torch.testing.assert_close(mine, want, msg=lambda text, n=name, s=step: f"{n}, step {s}: {text}")
            for optimizer in optimizers if gradient else ():
                optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


def _grad_or_value(model: nn.Module, name: str, gradient: bool) -> torch.Tensor:
    parameter = model.get_parameter(name)
    return parameter.grad if gradient else parameter.detach()


def _block(size: int, mesh: Any) -> slice:
    length = -(-size // mesh.size())
    start = min(length * mesh.get_local_rank(), size)
    return slice(start, min(start + length, size))


@run_on_ranks(2, 4)
def test_gate_and_up_in_one_weight() -> None:
    mesh = _mesh()
    for hidden in (8, 6, 3):
        torch.manual_seed(1)
        model = GateUp(4, hidden).double()
        plan = {
            "gate_up": hp.FusedColwiseParallel({"gate": hidden, "up": hidden}),
            "down": hp.RowwiseParallel(),
        }
        _fused_like_one_device(model, mesh, plan, _x(4), "gate_up", ("gate", "up"))


@run_on_ranks(2, 4)
def test_query_key_value_in_one_weight() -> None:
    mesh = _mesh()
    for num_heads, num_kv_heads, bias in ((4, 4, True), (4, 2, False), (4, 1, True), (6, 3, True)):
        torch.manual_seed(1)
        model = FusedAttention(num_heads, num_kv_heads, bias).double()
        width, kv_width = 4 * num_heads, 4 * num_kv_heads
        heads = {"num_heads": num_heads, "num_kv_heads": num_kv_heads}
        plan = {
            "qkv": hp.FusedColwiseParallel({"q": width, "k": kv_width, "v": kv_width}, **heads),
            "o": hp.HeadParallel("output", **heads),
        }
        _fused_like_one_device(model, mesh, plan, _x(width), "qkv", ("q", "k", "v"))


@run_on_ranks(2)
def test_refusals() -> None:
    mesh = _mesh()
    with pytest.raises(ValueError, match="the parts have 7 features together, but the layer gives 8"):
        hp.parallelize_module(nn.Linear(4, 8), mesh, hp.FusedColwiseParallel({"a": 3, "b": 4}))
    with pytest.raises(ValueError, match="4 query heads cannot share 3 key heads"):
        hp.HeadParallel("query", num_heads=4, num_kv_heads=3)
    with pytest.raises(ValueError, match="8 features cannot be divided over 3 heads"):
        hp.parallelize_module(nn.Linear(4, 8), mesh, hp.HeadParallel("query", num_heads=3))
    with pytest.raises(ValueError, match="the role 'q' is none of"):
        hp.HeadParallel("q", num_heads=3)
    with pytest.raises(ValueError, match="use ColwiseParallel to keep it distributed"):
        hp.HeadParallel("query", num_heads=3, use_local_output=False)
    with pytest.raises(NotImplementedError, match="only linear layers have rows"):
        hp.parallelize_module(nn.LayerNorm(3), mesh, hp.HeadParallel("query", num_heads=3))
    output = hp.parallelize_module(nn.Linear(6, 4), mesh, hp.HeadParallel("output", num_heads=3))
    with pytest.raises(TypeError, match="come as plain blocks, got a distributed tensor"):
        output(hp.distribute_tensor(torch.ones(1, 6), mesh, [hp.Shard(1)]))
