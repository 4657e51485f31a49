"""Heads that do not divide the ranks, and weights that hold several projections, against one device."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyper_parallel as hp
from tests.tensor_parallel.small_modules import whole
from tests.tensor_parallel.toy import Attention, same_as_one_device
from tests.world import run_on_ranks

only_on = "torch"  # modules of PyTorch; cells: test_styles_on_mindspore.py


def _mesh() -> hp.DeviceMesh:
    return hp.init_device_mesh("cpu", (hp.get_platform().get_world_size(),), mesh_dim_names=("tp",))


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


@run_on_ranks(2, 4)
def test_a_fused_output_as_a_distributed_tensor() -> None:
    """Taken apart where its parts meet it stays where it is; anything else gathers it, and all is as on one device."""
    mesh = _mesh()
    widths = {"a": 6, "b": 3, "c": 7}
    ways = {
        "split": lambda y: y.split((6, 3, 7), dim=-1),
        "torch.split": lambda y: torch.split(y, [6, 3, 7], 2),
        "slices": lambda y: (y[..., :6], y[:, :, 6:9], y[..., -7:]),
        "narrow": lambda y: (y.narrow(-1, 0, 6), y.narrow(2, 6, 3), y.narrow(2, -7, 7)),
        "two at once": lambda y: (y.split([9, 7], -1)[0].split([6, 3], -1)[1], y[..., 6:][..., 3:]),
        # from here on with communication
        "across": lambda y: y.chunk(2, -1),
        "first dims": lambda y: (y[0], y[:, 1:3], y.split(1, 0)[1]),
        "steps": lambda y: (y[..., ::2], y[..., :6:3], y[..., [0, 8]]),
        "as a whole": lambda y: (y.sin(), y + y, y.flatten(1), torch.cat((y, y), -1)),
        "reshaped": lambda y: y.reshape(2, 5, 4, 4).unbind(2),
        "both ways": lambda y: (y * 2, *y.split([6, 3, 7], -1), y.detach() * 1),
    }
    torch.manual_seed(1)
    model = nn.Linear(4, 16).double()
    style = hp.FusedColwiseParallel(widths, use_local_output=False)
    for name, way in ways.items():
        ours = hp.parallelize_module(copy.deepcopy(model), mesh, style)
        inputs = [_x(4).requires_grad_() for _ in range(2)]
        with hp.CommRecorder() as recorder:
            parts = way(ours(inputs[1]))
        assert bool(recorder.records) == (list(ways).index(name) > list(ways).index("two at once")), (
            name,
            recorder.records,
        )
        expected = way(model(inputs[0]))
        assert [part.shape for part in parts] == [part.shape for part in expected], name
        for part, want in zip(parts, expected, strict=True):
            assert isinstance(part, hp.DTensor), name
            torch.testing.assert_close(part.full_tensor(), want, msg=lambda text, n=name: f"{n}: {text}")
        for values in (parts, expected):
            sum((value.sin() * value).sum() for value in values).backward()
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
        for kind in ("weight", "bias"):
            got = torch.cat([getattr(ours, f"{kind}_{part}").grad.full_tensor() for part in widths])
            torch.testing.assert_close(got, getattr(model, kind).grad, msg=lambda text, n=name: f"{n}: {text}")
        model.zero_grad()
    y = hp.parallelize_module(model, mesh, style)(_x(4))
    assert y.shape == (2, 5, 16) and y.ndim == 3 and y.dtype == torch.float64
    assert torch.equal(y.to_local(), y.full_tensor()[..., _block(16, mesh)])
    assert torch.equal(y.redistribute(mesh, [hp.Replicate()]).to_local(), y.full_tensor())
    with pytest.raises(RuntimeError, match="register the hook on its parts"):
        y.register_hook(lambda gradient: gradient)


@run_on_ranks(2)
def test_a_fused_weight_that_two_layers_share() -> None:
    mesh = _mesh()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = GateUp(4, 6), GateUp(4, 6)
            self.second.gate_up.weight = self.first.gate_up.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    torch.manual_seed(1)
    model = Twice().double()
    ours = copy.deepcopy(model)
    fused = hp.FusedColwiseParallel({"gate": 6, "up": 6})
    hp.parallelize_module(ours, mesh, {"*.gate_up": fused, "*.down": hp.RowwiseParallel()})
    assert ours.first.gate_up.weight_gate is ours.second.gate_up.weight_gate
    for one in (model, ours):
        one(_x(4)).sin().sum().backward()
    got = torch.cat([getattr(ours.first.gate_up, f"weight_{part}").grad.full_tensor() for part in ("gate", "up")])
    torch.testing.assert_close(got, model.first.gate_up.weight.grad)


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
    with pytest.raises(
        TypeError, match=r"only linear layers have rows to share out; use NoParallel\(\) to keep a LayerN"
    ):
        hp.parallelize_module(nn.LayerNorm(3), mesh, hp.HeadParallel("query", num_heads=3))

    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    for style in (hp.FusedColwiseParallel({"a": 4, "b": 4}), hp.HeadParallel("query", num_heads=1)):
        with pytest.raises(
            TypeError, match=r"computes in a way of its own \(an activation, .*; use ColwiseParallel\(\)"
        ):
            hp.parallelize_module(Doubled(4, 8), mesh, style)
    with pytest.raises(
        ValueError, match="sharded by heads become plain local tensors; leave out num_heads, or use_local_output"
    ):
        hp.FusedColwiseParallel({"q": 4, "k": 4}, num_heads=2, use_local_output=False)
    tied = nn.ModuleList([nn.Linear(4, 8), nn.Linear(4, 8)])
    tied[1].weight = tied[0].weight
    with pytest.raises(
        ValueError, match=r"'weight' of '1' is shared with FusedColwise.*give both modules the same style"
    ):
        hp.parallelize_module(tied, mesh, {"0": hp.FusedColwiseParallel({"a": 4, "b": 4})})
    with hp.deferred_init():
        deferred = nn.Linear(4, 8)
    with pytest.raises(ValueError, match=r"'weight' has no memory yet, .*call materialize before parallelize_module"):
        hp.parallelize_module(deferred, mesh, hp.FusedColwiseParallel({"a": 4, "b": 4}))
    output = hp.parallelize_module(nn.Linear(6, 4), mesh, hp.HeadParallel("output", num_heads=3))
    with pytest.raises(TypeError, match="come as plain local tensors, got a distributed tensor"):
        output(hp.distribute_tensor(torch.ones(1, 6), mesh, [hp.Shard(1)]))
