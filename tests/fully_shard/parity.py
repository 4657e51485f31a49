"""Models for the tests of fully sharded data parallelism, and the comparison with one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.platform import get_platform


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Mlp(nn.Module):
    """Blocks between two linear layers; sizes that divide by nothing."""

    def __init__(self, width: int = 5, hidden: int = 7, num_blocks: int = 3, num_in: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(num_in, width)
        self.blocks = nn.ModuleList(Block(width, hidden) for _ in range(num_blocks))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.scale


def double(make: Callable[..., nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
    torch.manual_seed(1)
    return make(*args, **kwargs).double()


def batch(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def my_part(whole: torch.Tensor, mesh: hp.DeviceMesh) -> torch.Tensor:
    """This rank's rows of a batch that the ranks of the mesh share."""
    rows = whole.shape[0] // mesh.size()
    place = mesh.rank_list.index(get_platform().get_rank())
    return whole[place * rows : (place + 1) * rows]


def mesh_of(*shape: int, names: tuple[str, ...] = ("replicate", "dp")) -> hp.DeviceMesh:
    """A mesh of all ranks, or of this shape; one axis is called dp."""
    shape = shape or (get_platform().get_world_size(),)
    return hp.init_device_mesh("cpu", shape, mesh_dim_names=names[-len(shape) :])


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return (out.sin() * torch.arange(1, out.shape[-1] + 1, dtype=out.dtype)).mean()


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, hp.DTensor) else value


def assert_same_gradients(model: nn.Module, ours: nn.Module, tolerance: float = 1e-9) -> None:
    """Every gradient, and whether there is one."""
    for (name, parameter), (other, mine) in zip(model.named_parameters(), ours.named_parameters(), strict=True):
        assert name == other
        assert (parameter.grad is None) == (mine.grad is None), f"{name}: {parameter.grad} {mine.grad}"
        if parameter.grad is not None:
            torch.testing.assert_close(
                whole(mine.grad), parameter.grad, rtol=tolerance, atol=tolerance, msg=lambda t, n=name: f"{n}: {t}"
            )


def assert_same_weights(model: nn.Module, ours: nn.Module, tolerance: float = 1e-9) -> None:
    for (name, parameter), mine in zip(model.named_parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(
            whole(mine.detach()), parameter.detach(), rtol=tolerance, atol=tolerance, msg=lambda t, n=name: f"{n}: {t}"
        )


def trains_as_one_device(
    model: nn.Module,
    shard: Callable[[nn.Module], Any],
    x: torch.Tensor,
    mesh: hp.DeviceMesh,
    num_steps: int = 3,
    tolerance: float = 1e-9,
    run: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda model, x: loss_of(model(x)),
) -> nn.Module:
    """Loss, gradients, their norm, and weights after AdamW steps equal those of one device; the sharded copy."""
    ours = copy.deepcopy(model)
    shard(ours)
    names = [name for name, _ in model.named_parameters()]
    assert [name for name, _ in ours.named_parameters()] == names
    theirs_step, our_step = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, ours))
    mine = my_part(x, mesh)
    for _ in range(num_steps):
        want, got = run(model, x), run(ours, mine)
        want.backward()
        got.backward()
        mean = got.detach().clone()
        get_platform().all_reduce(mean, mesh.get_group(tuple(range(mesh.ndim))), op="avg")
        torch.testing.assert_close(mean, want.detach(), rtol=tolerance, atol=tolerance)
        assert_same_gradients(model, ours, tolerance)
        want_norm = torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 0.1)
        got_norm = hp.clip_grad_norm_([p for p in ours.parameters() if p.grad is not None], 0.1)
        torch.testing.assert_close(whole(got_norm), want_norm, rtol=tolerance, atol=tolerance)
        for optimizer in (theirs_step, our_step):
            optimizer.step()
            optimizer.zero_grad()
    assert_same_weights(model, ours, tolerance)
    return ours


def shard_blocks(mesh: hp.DeviceMesh, names: Sequence[str] = ("blocks",), **options: Any) -> Callable[[Any], Any]:
    """Each item of these lists a unit, and the rest one."""

    def shard(model: nn.Module) -> nn.Module:
        for name in names:
            for block in getattr(model, name):
                hp.fully_shard(block, mesh=mesh, **options)
        return hp.fully_shard(model, mesh=mesh, **options)

    return shard


def pair(
    mesh: hp.DeviceMesh, make: Callable[..., nn.Module] = Mlp, names: Sequence[str] = ("blocks",), **options: Any
) -> tuple[nn.Module, nn.Module]:
    """A model on one device and its sharded copy."""
    model = double(make)
    ours = copy.deepcopy(model)
    shard_blocks(mesh, names, **options)(ours)
    return model, ours


def units(model: nn.Module) -> list[Any]:
    from hyper_parallel.core.fully_shard.hsdp_module import units_in

    return list(units_in(model))


def assert_all_sharded(model: nn.Module) -> None:
    """No whole value is left in memory, and modules see their own parameters."""
    for unit in units(model):
        assert unit.state == "sharded", f"{unit}: {unit.state}"
        for p in unit.parameters:
            for module, name in p.places:
                assert getattr(module, name) is p.parameter
