"""Several forwards and backwards, passes without gradients, errors in the middle, and whole parameters by hand."""

import copy

import pytest
import torch
from torch import nn

from tests.fully_shard.parity import (
    Mlp,
    assert_all_sharded,
    assert_same_gradients,
    batch,
    loss_of,
    mesh_of,
    my_part,
    pair,
    units,
)
from tests.world import run_on_ranks

only_on = "torch"  # modules of PyTorch


@run_on_ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_several_forwards_then_backward(reshard) -> None:
    """B5. Also a second backward of one graph, and a backward of a part of the outputs."""
    mesh = mesh_of()
    model, ours = pair(mesh, reshard_after_forward=reshard)
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


@run_on_ranks(2)
@pytest.mark.parametrize("reshard", [True, False])
def test_step_between_forward_and_backward_is_an_error(reshard) -> None:
    """B7. As on one device; torch's fully_shard computes other gradients without a word."""
    mesh = mesh_of()
    _, ours = pair(mesh, reshard_after_forward=reshard)
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
    mesh = mesh_of()
    model, ours = pair(mesh, WithTraps)
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
    mesh = mesh_of()
    model, ours = pair(mesh, reshard_after_forward=reshard)
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
def test_deep_copy_says_what_to_do() -> None:
    _, ours = pair(mesh_of())
    with pytest.raises(TypeError, match=r"Mlp cannot be deep-copied.*set_model_state_dict"):
        copy.deepcopy(ours)


@run_on_ranks(2)
def test_whole_parameters_by_hand() -> None:
    mesh = mesh_of()
    model, ours = pair(mesh)
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
