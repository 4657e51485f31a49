"""Parameters of every shape and kind: small, empty, without dims, of several dtypes, frozen, shared, unused."""

import copy
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.fully_shard.parity import (
    Mlp,
    assert_all_sharded,
    assert_same_gradients,
    batch,
    double,
    mesh_of,
    my_part,
    pair,
    shard_blocks,
    trains_as_one_device,
)
from tests.world import run_on_ranks

only_on = "torch"  # modules of PyTorch


class Shapes(nn.Module):
    """One parameter of each shape, each of them in the result."""

    def __init__(self, *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)
        self.turned = nn.Parameter(torch.randn(4, 3).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = sum((part.sin().sum() if part.numel() else part.sum()) for part in self.parts)
        return x @ self.turned * total


@run_on_ranks(2, 3, 4)
@pytest.mark.parametrize("dim", [0, -1])
def test_shapes(dim) -> None:
    """B1. torch's fully_shard raises for parameters without dims, for uneven last dims, and for strided parameters."""
    mesh = mesh_of()
    shapes = ((), (1,), (0,), (7,), (2, 3), (3, 2, 5), (1, 9), (9, 1), (0, 4), (4, 0), (300, 260))
    ours = trains_as_one_device(
        double(Shapes, *shapes),
        lambda m: hp.fully_shard(m, mesh=mesh, shard_placement_fn=lambda p: hp.Shard(dim)),
        batch(12, 3),
        mesh,
    )
    assert_all_sharded(ours)
    for parameter, shape in zip(ours.parts, shapes, strict=True):
        assert tuple(parameter.shape) == shape


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(3, 5)
        self.b = nn.Linear(5, 2).to(torch.float64)
        self.table = nn.Parameter(torch.arange(6), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).double()) + self.table.sum()


@run_on_ranks(2)
def test_dtypes() -> None:
    """B1. Several dtypes in a unit, integers among them: torch's fully_shard fails with an AssertionError."""
    torch.manual_seed(0)
    mesh = mesh_of()
    trains_as_one_device(
        Mixed(), lambda m: hp.fully_shard(m, mesh=mesh), batch(8, 3).float(), mesh, tolerance=2e-6, num_steps=2
    )


_computed = Counter()  # gradients of weights, by rank


class _CountsWeightGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            _computed[get_platform().get_rank()] += 1
        return gradient @ weight, gradient.t() @ x if ctx.needs_input_grad[1] else None


class Adapted(nn.Module):
    """A frozen layer with a small one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(5, 5), requires_grad=False)
        self.small = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _CountsWeightGradients.apply(x, self.frozen) + _CountsWeightGradients.apply(x, self.small)


@run_on_ranks(2)
@pytest.mark.parametrize("all_frozen", [False, True])
def test_frozen(all_frozen) -> None:
    """B2. Frozen parameters are gathered and never reduced, and nobody computes their gradient."""
    mesh = mesh_of()
    model = double(nn.Sequential, nn.Linear(3, 5), Adapted(), Adapted())
    if all_frozen:
        model[1].requires_grad_(False)
    rank = get_platform().get_rank()
    _computed[rank] = 0

    def shard(ours):
        for one in ours:
            hp.fully_shard(one, mesh=mesh)
        hp.fully_shard(ours, mesh=mesh)

    with hp.CommRecorder() as recorder:
        ours = trains_as_one_device(model, shard, batch(8, 3), mesh, num_steps=1)
    assert _computed[rank] == 2 * (1 if all_frozen else 2)  # on one device and here
    assert_all_sharded(ours)
    reduced = [record for record in recorder.records if record.op == "reduce_scatter_tensor"]
    # For each of two ranks 3 of 5 rows and a flag for each parameter: a linear layer, and what is trained beside it.
    assert sum(record.num_bytes for record in reduced) == 8 * 2 * (14 + 16 * (1 if all_frozen else 2))
    assert {record.asked_by for record in reduced} == {f"reduce unit '{n}'" for n in ("0", "2")} | (
        set() if all_frozen else {"reduce unit '1'"}
    )


@run_on_ranks(2)
def test_frozen_later() -> None:
    """A parameter may be frozen, or thawed, between steps."""
    mesh = mesh_of()
    model, ours = pair(mesh)
    x = batch(8, 3)
    for frozen in ((), ("blocks.0.up.weight", "first.bias"), ("last.weight",)):
        for one, data in ((model, x), (ours, my_part(x, mesh))):
            one.zero_grad()
            for name, parameter in one.named_parameters():
                parameter.requires_grad_(name not in frozen)
            one(data).square().mean().backward()
        assert_same_gradients(model, ours)


class Shared(nn.Module):
    """One weight in two layers of a module, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3) for _ in range(3))
        self.b.weight = self.a.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.c(self.b(torch.tanh(self.a(x))))))


@run_on_ranks(2)
@pytest.mark.parametrize("own_unit", [False, True])
def test_tied_inside_and_called_twice(own_unit) -> None:
    """B3 and B5."""
    mesh = mesh_of()

    def shard(model):
        if own_unit:
            hp.fully_shard(model.c, mesh=mesh)
        hp.fully_shard(model, mesh=mesh)

    ours = trains_as_one_device(double(Shared), shard, batch(8, 3), mesh)
    assert ours.b.weight is ours.a.weight
    assert_all_sharded(ours)


class Branches(nn.Module):
    """Of three branches some are used, by flags; one parameter of a branch may be unused too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3, 4)
        self.branches = nn.ModuleList(Mlp(width=4, num_in=4, num_blocks=1) for _ in range(3))
        self.never = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor, used: tuple[bool, ...], counted: tuple[bool, ...]) -> torch.Tensor:
        x = self.stem(x)
        total = x[:, :2] * 0
        for branch, is_used, is_counted in zip(self.branches, used, counted, strict=True):
            if is_used:
                out = branch(x)
                total = total + (out if is_counted else out.detach())
        return total


@run_on_ranks(2, 3)
@pytest.mark.parametrize("units", [True, False])
def test_unused(units) -> None:
    """B4. Used by all, by some or by no rank: gradients of one device, and None where it has None.

    torch's fully_shard hangs or aborts when ranks use different parameters.
    """
    mesh = mesh_of()
    model = double(Branches)
    ours = copy.deepcopy(model)
    shard_blocks(mesh, ("branches",) if units else ())(ours)
    size, rank = mesh.size(), mesh.get_rank()
    x = batch(4 * size, 3)
    everywhere = (True, True, True)
    cases = [
        [(True, False, True)] * size,  # one branch by nobody
        [(rank_ == 0, True, False) for rank_ in range(size)],  # one by rank 0 only
        [(False, rank_ == 1, rank_ == 0) for rank_ in range(size)],
    ]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, ours)]
    for case in cases:
        for optimizer in optimizers:
            optimizer.zero_grad()
        # Outputs that are not used in the loss on this rank: every rank runs all units.
        parts = [model(x[4 * r : 4 * r + 4], everywhere, case[r]) for r in range(size)]
        torch.cat(parts).square().mean().backward()
        ours(x[4 * rank : 4 * rank + 4], everywhere, case[rank]).square().mean().backward()
        assert_same_gradients(model, ours)
        assert_all_sharded(ours)
        for optimizer in optimizers:
            optimizer.step()
        if not units:  # inside of one unit ranks may also run different code
            for optimizer in optimizers:
                optimizer.zero_grad()
            parts = [model(x[4 * r : 4 * r + 4], case[r], everywhere) for r in range(size)]
            torch.cat(parts).square().mean().backward()
            ours(x[4 * rank : 4 * rank + 4], case[rank], everywhere).square().mean().backward()
            assert_same_gradients(model, ours)


@run_on_ranks(2)
def test_modules_with_weights_of_their_own_kind() -> None:
    """Recurrent layers keep a second list of their weights; convolutions, attention and norms read attributes."""
    mesh = mesh_of()

    class Zoo(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(3, 4, 3, padding=1)
            self.group_norm = nn.GroupNorm(2, 4)
            self.lstm = nn.LSTM(4, 5, batch_first=True)
            self.attention = nn.MultiheadAttention(5, 1, batch_first=True)
            self.weighted = nn.utils.parametrizations.weight_norm(nn.Linear(5, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.group_norm(self.conv(x.transpose(1, 2))).transpose(1, 2)
            x, _ = self.lstm(x)
            return self.weighted(self.attention(x, x, x)[0])

    def shard(model):
        hp.fully_shard(model.lstm, mesh=mesh)
        hp.fully_shard(model.attention, mesh=mesh)
        hp.fully_shard(model, mesh=mesh)

    trains_as_one_device(double(Zoo), shard, batch(4, 6, 3), mesh, num_steps=2)


@run_on_ranks(2)
def test_ignored_and_replicated_parameters() -> None:
    mesh = mesh_of()
    model = double(Mlp)

    def shard(ours):
        hp.fully_shard(
            ours, mesh=mesh, ignored_params=[ours.scale], replicate_params=[ours.first.weight, ours.last.bias]
        )

    ours = copy.deepcopy(model)
    shard(ours)
    assert not isinstance(ours.scale, hp.DTensor)
    assert ours.first.weight.placements == (hp.Replicate(),)
    x = batch(8, 3)
    F.mse_loss(model(x), x[:, :2]).backward()
    mine = my_part(x, mesh)
    F.mse_loss(ours(mine), mine[:, :2]).backward()
    get_platform().all_reduce(ours.scale.grad, None, op="avg")  # what is ignored is the program's to reduce
    assert_same_gradients(model, ours)
