"""Attention modules on plain shards of the sequence, under the styles: the numbers of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.dtensor.comm_recorder import CommRecorder
from hyper_parallel.testing import threads
from tests.world import small_or_sweep

only_on = "torch"  # modules are PyTorch's here; on MindSpore: test_style_mindspore.py

BATCH, TOKENS, HEADS, KEY_HEADS, WIDTH = 2, 8, 4, 2, 3


class Core(torch.nn.Module):
    def forward(self, query: Any, key: Any, value: Any) -> Any:
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2)


class Attention(torch.nn.Module):
    def __init__(self, turned: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        dim = HEADS * WIDTH
        self.q = torch.nn.Linear(dim, dim, dtype=torch.float64)
        self.k = torch.nn.Linear(dim, KEY_HEADS * WIDTH, dtype=torch.float64)
        self.v = torch.nn.Linear(dim, KEY_HEADS * WIDTH, dtype=torch.float64)
        self.core, self.turned = Core(), turned

    def forward(self, x: torch.Tensor, named: bool = False) -> torch.Tensor:
        query, key, value = (one(x).unflatten(-1, (-1, WIDTH)) for one in (self.q, self.k, self.v))
        if self.turned:  # something between projection and attention
            query, key = query * 1.5, key * 0.5
        mixed = self.core(query=query, key=key, value=value) if named else self.core(query, key, value)
        return mixed.flatten(2)


def _input() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, TOKENS, HEADS * WIDTH, dtype=torch.float64, generator=generator)


def _on_a_rank(kind: str, options: dict[str, Any], turned: bool, named: bool) -> tuple[Any, ...]:
    world = hp.get_platform().get_world_size()
    mesh = hp.init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    model = Attention(turned)
    style = getattr(hp, kind)(**options)
    if kind == "ContextParallel":
        assert style.apply(model.core, mesh) is model.core
    else:
        style.apply(model.core, mesh, model.q, model.k, model.v)
    x = _input().chunk(world, 1)[mesh.get_local_rank()].clone().requires_grad_()
    model(x, named)  # learns which inputs are what left the projections
    launched: list[int] = []  # all-to-alls under way when each projection begins
    with CommRecorder() as recorder:
        for projection in (model.q, model.k, model.v):
            projection.register_forward_pre_hook(lambda *_: launched.append(len(recorder.records)))
        out = model(x, named)
        (out**2).sum().backward()
    grads = [hp.get_platform().all_reduce(one.grad.clone(), mesh.get_group()) for one in model.parameters()]
    return out.detach(), x.grad, grads, launched


CASES = [
    ("ContextParallel", {}, 2),
    ("ContextParallel", {"ulysses_degree": 1}, 2),
    ("ContextParallel", {"ulysses_degree": 2}, 4),
    ("ContextParallel", {"ulysses_degree": 1, "load_balance": True}, 4),
    ("ContextParallel", {}, 4),  # fewer key heads than ranks
    ("AsyncContextParallel", {}, 2),
    ("AsyncContextParallel", {}, 4),
    ("AsyncContextParallel", {"ulysses_degree": 1}, 2),
]


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("case", small_or_sweep(CASES, [CASES[2], CASES[3], CASES[5]]), ids=str)
def test_same_as_one_device(case: Any, turned: bool) -> None:
    kind, options, ranks = case
    plain = Attention(turned)
    x = _input().requires_grad_()
    want = plain(x)
    (want**2).sum().backward()
    named = bool(options) and kind == "ContextParallel"
    if named:
        options = {**options, "qkv_kwarg_names": ("query", "key", "value")}
    found = threads(ranks).run(_on_a_rank, kind, options, turned, named)
    torch.testing.assert_close(torch.cat([one[0] for one in found], 1), want.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.cat([one[1] for one in found], 1), x.grad, rtol=1e-12, atol=1e-12)
    for one in found:
        for got, parameter in zip(one[2], plain.parameters(), strict=True):
            torch.testing.assert_close(got, parameter.grad, rtol=1e-12, atol=1e-12)
    if kind == "AsyncContextParallel" and ranks == 2 and not options:
        assert found[0][3] == ([0, 0, 0] if turned else [0, 1, 2])


def test_mistakes_are_named() -> None:
    with pytest.raises(ValueError, match="two dims of query, key and value"):
        hp.ContextParallel(seq_dim=1, head_dim=1)
    with pytest.raises(ValueError, match="load_balance swaps queries where keys are gathered"):
        hp.ContextParallel(load_balance=True)
    with pytest.raises(ValueError, match="qkv_indices are those of query, key and value"):
        hp.ContextParallel(qkv_indices=(0, 1))
    mesh = hp.init_device_mesh("cpu", (4,), mesh_dim_names=("cp",), init_backend=False)
    with pytest.raises(ValueError, match="ulysses_degree=3 does not divide the 4 ranks"):
        hp.ContextParallel(ulysses_degree=3).apply(Core(), mesh)
