"""Several forwards and backwards, accumulation, hooks, errors in the middle, and gradients that are asked for."""

import copy
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.fully_shard.parity import (
    Mlp,
    assert_all_sharded,
    assert_same_gradients,
    assert_same_weights,
    batch,
    double,
    loss_of,
    my_part,
    shard_blocks,
    units,
    whole,
)
from tests.world import run_on_ranks

only_on = "torch"  # modules of PyTorch


def _mesh(*shape: int) -> hp.DeviceMesh:
    shape = shape or (get_platform().get_world_size(),)
    return hp.init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "dp")[-len(shape) :])


def _pair(mesh: hp.DeviceMesh, make=Mlp, names=("blocks",), **options) -> tuple[nn.Module, nn.Module]:
    """A model on one device and its sharded copy."""
    model = double(make)
    ours = copy.deepcopy(model)
    shard_blocks(mesh, names, **options)(ours)
    return model, ours


@run_on_ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_several_forwards_then_backward(reshard) -> None:
    """B5. Also a second backward of one graph, and a backward of a part of the outputs."""
    mesh = _mesh()
    model, ours = _pair(mesh, reshard_after_forward=reshard)
    x, y = batch(8, 3), batch(8, 3, seed=1)
    for one, (a, b) in ((model, (x, y)), (ours, (my_part(x, mesh), my_part(y, mesh)))):
        (loss_of(one(a)) + loss_of(one(b))).backward()
    assert_same_gradients(model, ours)
    for one, (a, b) in ((model, (x, y)), (ours, (my_part(x, mesh), my_part(y, mesh)))):
        first, second = one(a), one(b)
        loss_of(second).backward()
        loss_of(first).backward(retain_graph=True)
        loss_of(first * 2).backward()
    assert_same_gradients(model, ours)
    for one, data in ((model, x), (ours, my_part(x, mesh))):
        one.zero_grad()
        out = one(data)
        out[:, 0].mean().backward(retain_graph=True)
        out[:, 1].square().mean().backward()
    assert_same_gradients(model, ours)
    assert_all_sharded(ours)


@run_on_ranks(4)
@pytest.mark.parametrize("shape", [(4,), (2, 2)])
@pytest.mark.parametrize("mode", ["reduce", "keep", "all_reduce_last"])
def test_accumulation(shape, mode) -> None:
    """B6. Micro-batches of one step: reduced each time, kept whole, or between replicas at the last.

    A parameter used first in the last micro-batch, or only before it: torch's fully_shard fails on the first with mixed
    precision (AssertionError).
    """
    mesh = _mesh(*shape)

    class Gated(Mlp):
        def forward(self, x, gate=True):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            x = self.last(x)
            return x * self.scale if gate else x

    model, ours = _pair(mesh, Gated)
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
    mesh = _mesh()
    model, ours = _pair(mesh)
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


@run_on_ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_step_between_forward_and_backward_is_an_error(reshard) -> None:
    """B7. As on one device; torch's fully_shard computes other gradients without a word."""
    mesh = _mesh()
    _, ours = _pair(mesh, reshard_after_forward=reshard)
    x = my_part(batch(8, 3), mesh)
    loss_of(ours(x)).backward()
    loss = loss_of(ours(x))
    with torch.no_grad():
        ours.blocks[1].up.weight.add_(1)
    with pytest.raises(
        RuntimeError, match=r"'blocks\.1\.up\.weight' of unit 'blocks\.1' changed between forward and back"
    ):
        loss.backward()
    ours.zero_grad()
    loss_of(ours(x)).backward()  # and it goes on
    assert_all_sharded(ours)


class Raises(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.error = None

    def forward(self, x):
        x = self.inner(x)
        if self.error is not None:
            raise self.error
        return x


class RaisesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if ctx.module.error_in_backward is not None:
            raise ctx.module.error_in_backward
        return gradient, None


class WithTraps(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.error_in_backward = None
        self.blocks.append(Raises())
        self.blocks.append(nn.Linear(5, 5))

    def forward(self, x):
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            x = block(x)
            if number == 1:
                x = RaisesInBackward.apply(x, self)
        return self.last(x)


@run_on_ranks(2)
@pytest.mark.parametrize("error", [ValueError("no"), MemoryError("none left"), KeyboardInterrupt()])
def test_errors_leave_a_module_that_works(error) -> None:
    """B8. In forward and in backward: memory is given back, the next step is right, nothing has to be called.

    torch's fully_shard leaves whole parameters behind.
    """
    mesh = _mesh()
    model, ours = _pair(mesh, WithTraps)
    x = batch(8, 3)
    mine = my_part(x, mesh)
    for _ in range(2):
        ours.blocks[3].error = error
        with pytest.raises(type(error)):
            ours(mine)
        ours.blocks[3].error = None
        assert_all_sharded(ours)
        ours.error_in_backward = error
        loss = loss_of(ours(mine))
        with pytest.raises(type(error)):
            loss.backward()
        ours.error_in_backward = None
        ours.zero_grad()
        model.zero_grad()
        loss_of(model(x)).backward()
        loss_of(ours(mine)).backward()
        assert_same_gradients(model, ours)
        assert_all_sharded(ours)


@run_on_ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_without_gradients_and_parts_first(reshard) -> None:
    """B9. no_grad, eval, inference mode, and a module inside before the root, which torch's fully_shard refuses."""
    mesh = _mesh()
    model, ours = _pair(mesh, reshard_after_forward=reshard)
    x, inner = batch(8, 3), batch(8, 5)
    mine, my_inner = my_part(x, mesh), my_part(inner, mesh)
    loss_of(model.blocks[1](inner)).backward()
    loss_of(ours.blocks[1](my_inner)).backward()
    assert_same_gradients(model, ours)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            torch.testing.assert_close(ours(mine), my_part(model(x), mesh))
            torch.testing.assert_close(ours.blocks[0](my_inner), my_part(model.blocks[0](inner), mesh))
        with torch.no_grad():
            for parameter, other in zip(model.parameters(), ours.parameters(), strict=True):
                parameter.add_(0.25)
                other.add_(0.25)
        with context:  # whole values that were kept are not used after a write
            torch.testing.assert_close(ours(mine), my_part(model(x), mesh))
    ours.eval()
    ours(mine)  # recorded, and no backward comes
    ours.train()
    ours(mine)
    model.zero_grad()
    ours.zero_grad()
    loss_of(model(x)).backward()
    loss_of(ours(mine)).backward()
    assert_same_gradients(model, ours)


@run_on_ranks(2)
def test_hooks_see_finished_gradients() -> None:
    """B10. Hooks of parameters, and an optimizer that steps inside of backward."""
    mesh = _mesh()
    model, ours = _pair(mesh)
    seen = []
    for one in (model, ours):
        one.blocks[0].up.weight.register_hook(lambda gradient: gradient * 2)
        one.blocks[1].up.weight.register_post_accumulate_grad_hook(lambda p: seen.append(whole(p.grad.clone())))
    x = batch(8, 3)
    loss_of(model(x)).backward()
    loss_of(ours(my_part(x, mesh))).backward()
    assert_same_gradients(model, ours)
    torch.testing.assert_close(seen[0], seen[1])

    model, ours = _pair(mesh)
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
    mesh = _mesh()
    model, ours = _pair(mesh)
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
    mesh = _mesh()
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


@dataclass
class Record:
    values: torch.Tensor
    note: str = ""


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.form = "tensor"

    def forward(self, x):
        y = self.b(torch.tanh(self.a(x)))
        if self.form == "tensor":
            return y
        if self.form == "dict":
            return {"deep": [{"y": y}, None], "x": x}
        if self.form == "dataclass":
            return Record(y, "note")
        if self.form == "view":
            return y.view(-1)
        if self.form == "object":
            holder = type("Holder", (), {})()
            holder.y = y
            return holder
        if self.form == "hidden":
            return lambda: y
        return (y, x)


def _found(out):
    if isinstance(out, dict):
        return out["deep"][0]["y"]
    if isinstance(out, Record):
        return out.values
    if hasattr(out, "y"):
        return out.y
    if callable(out) and not isinstance(out, torch.Tensor):
        return out()
    return out[0] if isinstance(out, tuple) else out


@run_on_ranks(2)
@pytest.mark.parametrize("form", ["tensor", "dict", "dataclass", "view", "object", "hidden", "tuple"])
def test_outputs_in_any_container(form) -> None:
    """B16. Where no tensor is found the values stay until backward has ended, with one warning.

    A view that is written to in place: torch's fully_shard crashes ("storage of size 0").
    """
    mesh = _mesh()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Outputs()).double()
    ours = copy.deepcopy(model)
    hp.fully_shard(ours[1], mesh=mesh)
    hp.fully_shard(ours, mesh=mesh)
    x = batch(8, 3)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for one, data in ((model, x), (ours, my_part(x, mesh))):
            one[1].form = form
            for _ in range(2):
                out = _found(one(data))
                if form == "view":
                    out.mul_(2)
                out.sin().mean().backward()
    assert_same_gradients(model, ours)
    ours_told = [str(w.message) for w in told if "stay whole until backward has ended" in str(w.message)]
    assert len(ours_told) == (2 if form == "hidden" else 0), ours_told  # the inner unit and the root
    assert_all_sharded(ours)


class Experts(nn.Module):
    """A loss on the side, computed last and left in an attribute, as routers of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.router = nn.Linear(5, 5), nn.Linear(5, 5)
        self.losses = []

    def forward(self, x):
        out = x + torch.tanh(self.layer(x))
        self.losses = [self.router(x).square().mean()]
        return out


class WithExperts(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Experts() for _ in range(3))


@run_on_ranks(2)
def test_losses_on_the_side() -> None:
    """Backward comes to them before it comes to what the module gave."""
    mesh = _mesh()
    model, ours = _pair(mesh, WithExperts)
    x = batch(8, 3)
    for _ in range(3):
        for one, data in ((model, x), (ours, my_part(x, mesh))):
            out = one(data)
            side = sum(block.losses[0] for block in one.blocks)
            (loss_of(out) + side).backward()
    assert_same_gradients(model, ours)
    assert_all_sharded(ours)


@run_on_ranks(2)
def test_deep_copy_says_what_to_do() -> None:
    _, ours = _pair(_mesh())
    with pytest.raises(TypeError, match=r"Mlp cannot be deep-copied.*set_model_state_dict"):
        copy.deepcopy(ours)


@run_on_ranks(2)
def test_whole_parameters_by_hand() -> None:
    mesh = _mesh()
    model, ours = _pair(mesh)
    x = batch(8, 3)
    handle = ours.blocks[0].unshard(async_op=True)
    handle.wait()
    ours.unshard()
    assert units(ours)[0].state == "whole"
    loss_of(model(x)).backward()
    loss_of(ours(my_part(x, mesh))).backward()
    assert_same_gradients(model, ours)
    assert units(ours)[0].state == "whole"
    ours.reshard()
    ours.blocks[0].reshard()
    assert_all_sharded(ours)
