"""Gradients of sharded modules: when they are reduced, who sees them, and those that are asked for by themselves."""

import threading
import warnings

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from tests.fully_shard.parity import (
    Mlp,
    assert_all_sharded,
    assert_same_gradients,
    assert_same_weights,
    batch,
    loss_of,
    mesh_of,
    my_part,
    pair,
    whole,
)
from tests.world import run_on_ranks

only_on = "torch"  # modules of PyTorch


@run_on_ranks(4)
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@pytest.mark.parametrize("mode", ["reduce", "keep", "all_reduce_last"])
def test_accumulation(shape, mode) -> None:
    """B6. Micro-batches of one step: reduced each time, kept whole, or between replicas at the last.

    A parameter used first in the last micro-batch, or only before it: torch's fully_shard fails on the first with mixed
    precision (AssertionError).
    """
    mesh = mesh_of(*shape)

    class Gated(Mlp):
        def forward(self, x, gate=True):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            x = self.last(x)
            return x * self.scale if gate else x

    model, ours = pair(mesh, Gated)
    for gates in ((True, True, True), (False, False, True), (True, False, False)):
        model.zero_grad()
        ours.zero_grad()
        for number, gate in enumerate(gates):
            x = batch(8, 3, seed=number)
            is_last = number == len(gates) - 1
            if mode == "keep":
                ours.set_requires_gradient_sync(is_last)
            elif mode == "all_reduce_last":
                ours.set_requires_all_reduce(is_last)
            (loss_of(model(x, gate)) / 3).backward()
            (loss_of(ours(my_part(x, mesh), gate)) / 3).backward()
            if mode != "reduce" and not is_last:
                assert all(parameter.grad is None for parameter in ours.parameters())
        assert_same_gradients(model, ours)
        assert_all_sharded(ours)


@run_on_ranks(2)
def test_reduce_gradients() -> None:
    """Gradients kept over several backwards are reduced when the program says that they are complete."""
    mesh = mesh_of()
    model, ours = pair(mesh)
    ours.set_requires_gradient_sync(False)
    for number in range(3):
        x = batch(8, 3, seed=number)
        loss_of(model(x)).backward()
        loss_of(ours(my_part(x, mesh))).backward()
    assert ours.first.weight.grad is None
    ours.reduce_gradients()
    assert_same_gradients(model, ours)
    ours.reduce_gradients()  # nothing is left
    assert_same_gradients(model, ours)


def _with_gradients_of_inputs(one, data):
    """The loss, whose graph is kept, and the gradient of the batch: the first half of a pipeline's backward."""
    data = data.clone().requires_grad_()
    loss = loss_of(one(data))
    (slope,) = torch.autograd.grad(loss, data, retain_graph=True)
    return loss, slope


@run_on_ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("keeps", [False, True])
def test_split_backward(keeps, reshard) -> None:
    """Gradients of inputs first, of all micro-batches, and those of weights later: as a pipeline fills its bubbles.

    ``keeps``: micro-batches add up without communication, and the schedule says when the gradients are complete.
    """
    mesh = mesh_of()
    model, ours = pair(mesh, reshard_after_forward=reshard)
    ours.set_requires_gradient_sync(not keeps)
    losses = []
    for number in range(2):
        x = batch(8, 3, seed=number)
        (want, want_slope), (got, got_slope) = (
            _with_gradients_of_inputs(one, data) for one, data in ((model, x), (ours, my_part(x, mesh)))
        )
        torch.testing.assert_close(got_slope / mesh.size(), my_part(want_slope, mesh))
        losses.append((want, got))
    assert all(parameter.grad is None for parameter in ours.parameters())  # none was computed, and none reduced
    for want, got in losses:
        want.backward(inputs=list(model.parameters()))
        if keeps:
            got.backward(inputs=list(ours.parameters()))
            assert all(parameter.grad is None for parameter in ours.parameters())
            continue
        for parameter, slope in zip(ours.parameters(), torch.autograd.grad(got, list(ours.parameters())), strict=True):
            parameter.grad = slope if parameter.grad is None else parameter.grad + slope
    ours.reduce_gradients()
    assert_same_gradients(model, ours)
    assert_all_sharded(ours)


_later = threading.local()  # what is left to do for the weights, of this rank


class _InputsFirst(torch.autograd.Function):
    """A product whose backward leaves the gradient of the weight for later, as zero-bubble schedules have it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        _later.work.append((ctx.weight, gradient, x))
        return gradient @ weight, None


class _LaterLinear(nn.Linear):
    def forward(self, x):
        return torch.tanh(_InputsFirst.apply(x, self.weight) + self.bias)


class _Later(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_LaterLinear(5, 5) for _ in range(3))


@run_on_ranks(2)
def test_gradients_that_others_write() -> None:
    """Written into ``grad`` of what forward has seen, after backward: reduced like any other."""
    mesh = mesh_of()
    model, ours = pair(mesh, _Later)
    ours.set_requires_gradient_sync(False)
    for number in range(2):
        x = batch(8, 3, seed=number)
        for one, data in ((model, x), (ours, my_part(x, mesh))):
            _later.work = []
            loss_of(one(data)).backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch on ``grad`` of a tensor that is no leaf
                for weight, gradient, data_then in _later.work:
                    slope = gradient.t() @ data_then
                    weight.grad = slope if weight.grad is None else weight.grad + slope
    assert all(parameter.grad is None for parameter in ours.parameters())
    ours.reduce_gradients()
    assert_same_gradients(model, ours)
    ours.reduce_gradients()  # nothing is left
    assert_same_gradients(model, ours)


@run_on_ranks(2)
def test_hooks_see_finished_gradients() -> None:
    """B10. Hooks of parameters, and an optimizer that steps inside of backward."""
    mesh = mesh_of()
    model, ours = pair(mesh)
    seen = []
    for one in (model, ours):
        one.blocks[0].up.weight.register_hook(lambda gradient: gradient * 2)
        one.blocks[1].up.weight.register_post_accumulate_grad_hook(lambda p: seen.append(whole(p.grad.clone())))
    x = batch(8, 3)
    loss_of(model(x)).backward()
    loss_of(ours(my_part(x, mesh))).backward()
    assert_same_gradients(model, ours)
    torch.testing.assert_close(seen[0], seen[1])

    model, ours = pair(mesh)
    for one in (model, ours):
        for parameter in one.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def step(p, optimizer=optimizer):
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
    for number in range(3):
        x = batch(8, 3, seed=number)
        loss_of(model(x)).backward()
        loss_of(ours(my_part(x, mesh))).backward()
    assert_same_weights(model, ours)


@run_on_ranks(2)
def test_gradients_that_are_asked_for() -> None:
    """B11. autograd.grad, to which torch's fully_shard gives None; backward(inputs=...), hp.value_and_grad."""
    mesh = mesh_of()
    model, ours = pair(mesh)
    x = batch(8, 3)
    mine = my_part(x, mesh)
    want = torch.autograd.grad(loss_of(model(x)), list(model.parameters()))
    got = torch.autograd.grad(loss_of(ours(mine)), list(ours.parameters()))
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(whole(b), a)
    assert all(parameter.grad is None for parameter in ours.parameters())
    _, got = hp.value_and_grad(lambda data: loss_of(ours(data)), list(ours.parameters()))(mine)
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(whole(b), a)
    loss_of(ours(mine)).backward(inputs=[ours.blocks[1].up.weight])
    torch.testing.assert_close(
        whole(ours.blocks[1].up.weight.grad), dict(zip(_names(model), want, strict=True))["blocks.1.up.weight"]
    )
    assert ours.first.weight.grad is None
    ours.zero_grad()
    # A penalty on the gradient of the input: a gradient of a gradient through the sharded module.
    for one, data in ((model, x), (ours, mine)):
        data = data.clone().requires_grad_()
        (slope,) = torch.autograd.grad(one(data).sum(), data, create_graph=True)
        slope.square().sum(-1).mean().backward()
    assert_same_gradients(model, ours)
    with pytest.raises(RuntimeError, match="cannot be differentiated"):
        torch.autograd.grad(loss_of(ours(mine)), list(ours.parameters()), create_graph=True)


def _names(model):
    return [name for name, _ in model.named_parameters()]


@run_on_ranks(2)
def test_infinities_are_found_on_all_ranks() -> None:
    """B14. A gradient scaler skips the step everywhere when one rank has an infinity."""
    mesh = mesh_of()
    model = nn.Linear(3, 4)
    torch.manual_seed(0)
    hp.fully_shard(model, mesh=mesh)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = whole(model.weight.detach()).clone()
    for is_bad in (True, False):
        x = torch.ones(2, 3)
        loss = model(x)[:, 0].sum()  # only rows of rank 0 have a gradient
        if is_bad:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == 2.0
        assert torch.equal(whole(model.weight.detach()), before) == is_bad
