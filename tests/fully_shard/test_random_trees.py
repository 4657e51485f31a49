"""Random trees of modules against one device: tied, frozen, unused, reused parameters, of any size and dtype."""

import copy
import random

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.fully_shard.parity import assert_all_sharded, batch, whole
from tests.world import run_on_ranks, small_or_sweep

only_on = "torch"  # modules of PyTorch


class Leaf(nn.Module):
    """A few parameters; which of them a rank uses is written in ``uses``, by name and rank."""

    def __init__(self, draw: random.Random, num_ranks: int) -> None:
        super().__init__()
        self.uses = {}
        for number in range(draw.randint(0, 3)):
            shape = [draw.choice((0, 1, 2, 3, 5, 9)) for _ in range(draw.randint(0, 3))]
            dtype = draw.choice((torch.float64, torch.float64, torch.float32))
            parameter = nn.Parameter(torch.randn(shape, dtype=dtype), requires_grad=draw.random() > 0.2)
            self.register_parameter(f"p{number}", parameter)
            kind = draw.random()
            used = [True] * num_ranks if kind < 0.7 else [False] * num_ranks
            self.uses[f"p{number}"] = used if kind < 0.8 else [draw.random() < 0.5 for _ in range(num_ranks)]

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        for name, used in self.uses.items():
            if used[rank]:
                x = torch.tanh(x * (1 + getattr(self, name).double().sin().sum() / 10))
        return x


class Node(nn.Module):
    """Calls the modules inside, some of them twice; the result of a call may not count on a rank."""

    def __init__(self, draw: random.Random, num_ranks: int, depth: int) -> None:
        super().__init__()
        made = [
            Node(draw, num_ranks, depth - 1) if depth and draw.random() < 0.6 else Leaf(draw, num_ranks)
            for _ in range(draw.randint(1, 3))
        ]
        self.inner = nn.ModuleList(made)
        self.weight = nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        self.calls = [draw.randrange(len(made)) for _ in range(draw.randint(1, 4))]
        self.counts = [
            [draw.random() < 0.8 for _ in range(num_ranks)] if draw.random() < 0.3 else [True] * num_ranks
            for _ in self.calls
        ]

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        total = x @ self.weight
        for call, counts in zip(self.calls, self.counts, strict=True):
            out = self.inner[call](x, rank)
            total = total + (out if counts[rank] else out.detach())
        return total


def _tie(model: nn.Module, draw: random.Random) -> None:
    """Let some modules share a parameter of another one of that dtype."""
    places = [(m, name, p) for m in model.modules() for name, p in m.named_parameters(recurse=False)]
    leaves = [place for place in places if isinstance(place[0], Leaf)]
    for _ in range(draw.randint(0, 3)):
        if len(leaves) > 1:
            (_, _, first), (other, name, second) = draw.sample(leaves, 2)
            if first.dtype is second.dtype:
                setattr(other, name, first)


def _shard(model: nn.Module, mesh: hp.DeviceMesh, draw: random.Random) -> None:
    def dim_of(parameter):
        return hp.Shard(draw_dim % parameter.ndim)

    draw_dim = draw.randint(0, 2)
    modules = [m for m in model.modules() if isinstance(m, (Node, Leaf)) and m is not model]
    for module in reversed(modules):
        if draw.random() < 0.6:
            hp.fully_shard(module, mesh=mesh, reshard_after_forward=draw.random() < 0.7, shard_placement_fn=dim_of)
    hp.fully_shard(model, mesh=mesh, shard_placement_fn=dim_of)


def _compare(seed: int, mesh: hp.DeviceMesh) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    size, rank = mesh.size(), mesh.get_rank()
    model = Node(draw, size, depth=3)
    _tie(model, draw)
    ours = copy.deepcopy(model)
    _shard(ours, mesh, draw)
    assert [n for n, _ in ours.named_parameters()] == [n for n, _ in model.named_parameters()]
    has_float32 = any(parameter.dtype is torch.float32 for parameter in model.parameters())
    for step in range(2):
        x = batch(2 * size, 4, seed=step)
        parts = [model(x[2 * r : 2 * r + 2], r) for r in range(size)]
        torch.cat(parts).sin().mean().backward()
        ours(x[2 * rank : 2 * rank + 2], rank).sin().mean().backward()
        for (name, parameter), mine in zip(model.named_parameters(), ours.named_parameters(), strict=True):
            assert (parameter.grad is None) == (mine[1].grad is None), f"seed {seed}: {name}"
            if parameter.grad is not None:
                # After the first step the rounding of float32 parameters is in everything.
                is_exact = parameter.dtype is torch.float64 and (step == 0 or not has_float32)
                tolerance = 1e-9 if is_exact else 1e-5
                torch.testing.assert_close(
                    whole(mine[1].grad),
                    parameter.grad,
                    rtol=tolerance,
                    atol=tolerance,
                    msg=lambda text, n=name: f"seed {seed}, {n}: {text}",
                )
        assert_all_sharded(ours)
        with torch.no_grad():
            for parameter, mine in zip(model.parameters(), ours.parameters(), strict=True):
                if parameter.grad is not None:
                    parameter -= 0.1 * parameter.grad
                    mine -= 0.1 * mine.grad
        model.zero_grad()
        ours.zero_grad()


@run_on_ranks(2, sweep=(3, 4))
@pytest.mark.parametrize("start", small_or_sweep(range(0, 400, 50), (0,)))
def test_random_trees(start) -> None:
    mesh = hp.init_device_mesh("cpu", (get_platform().get_world_size(),), mesh_dim_names=("dp",))
    for seed in range(start, start + 50):
        _compare(seed, mesh)
