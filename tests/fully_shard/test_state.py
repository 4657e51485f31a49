"""State dicts, conversions, deferred initialisation and checkpoints of fully sharded models."""

import copy
import io

import pytest
import torch

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
    mesh_of,
    my_part,
    pair,
    shard_blocks,
    whole,
)
from tests.world import run_on_ranks

only_on = "torch"  # modules of PyTorch


def _step(model, ours, mesh, seed: int = 0) -> None:
    x = batch(8, 3, seed=seed)
    for one in (model, ours):
        one.zero_grad()
    loss_of(model(x)).backward()
    loss_of(ours(my_part(x, mesh))).backward()
    assert_same_gradients(model, ours)
    assert_all_sharded(ours)


@run_on_ranks(2)
def test_state_dict_at_any_moment() -> None:
    """B12. Also between forward and backward, and inside of forward, it holds the sharded parameters."""
    mesh = mesh_of()
    model, ours = pair(mesh)
    seen = []
    ours.blocks[1].register_forward_hook(lambda module, args, out: seen.append(ours.state_dict()))
    loss = loss_of(ours(my_part(batch(8, 3), mesh)))
    seen.append(ours.state_dict())
    loss.backward()
    seen.append(ours.state_dict())
    for state in seen:
        assert list(state) == list(model.state_dict())
        for name, value in state.items():
            torch.testing.assert_close(whole(value), model.state_dict()[name])


@run_on_ranks(2)
def test_loading() -> None:
    """B12. load_state_dict in place and with assign, and values set through ``data``."""
    mesh = mesh_of()
    model = double(Mlp)
    other = double(Mlp)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.5)
    sharded_other = copy.deepcopy(other)
    shard_blocks(mesh)(sharded_other)
    state = {name: value.detach().clone() for name, value in sharded_other.state_dict().items()}
    for assign in (False, True):
        ours = copy.deepcopy(model)
        shard_blocks(mesh)(ours)
        loss_of(ours(my_part(batch(8, 3), mesh))).backward()
        ours.load_state_dict(state, assign=assign)
        assert_same_weights(other, ours)
        _step(other, ours, mesh)
    for parameter, value in zip(ours.parameters(), model.state_dict().values(), strict=True):
        parameter.data = hp.distribute_tensor(value.clone(), mesh, parameter.placements)
    _step(model, ours, mesh)
    ours.blocks[0].up.weight = torch.nn.Parameter(torch.zeros(7, 5, dtype=torch.float64))
    with pytest.raises(TypeError, match=r"'blocks\.0\.up\.weight' was replaced by a plain tensor of shape \(7, 5\)"):
        ours(my_part(batch(8, 3), mesh))


@run_on_ranks(2)
def test_conversion() -> None:
    """B12. ``to(dtype)`` after a step, which torch's fully_shard crashes on."""
    mesh = mesh_of()
    model, ours = pair(mesh)
    _step(model, ours, mesh)
    ours.zero_grad()
    ours.float()
    out = ours(my_part(batch(8, 3), mesh).float())
    assert out.dtype == torch.float32
    loss_of(out).backward()
    assert ours.first.weight.grad.dtype == torch.float32
    ours.double()
    model.float().double()
    _step(model, ours, mesh)


@run_on_ranks(2, 4)
def test_deferred_initialisation() -> None:
    """B12. Built without memory, sharded, then given values: the same bits as on one device."""
    mesh = mesh_of()
    hp.manual_seed(3)
    with hp.deferred_init():
        model = Mlp(width=6)
    hp.materialize(model)
    hp.manual_seed(3)
    with hp.deferred_init():
        ours = Mlp(width=6)
    shard_blocks(mesh)(ours)
    assert ours.first.weight.is_meta
    hp.materialize(ours)
    assert_same_weights(model, ours, 0)
    model.double()
    ours.double()
    _step(model, ours, mesh)


@run_on_ranks(2)
def test_saved_parameters_are_small() -> None:
    """T10: a parameter lies in memory that it shares with all of its unit; a file holds its own bytes."""
    mesh = mesh_of()
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1))
    hp.fully_shard(model, mesh=mesh)
    file = io.BytesIO()
    torch.save(model[1].weight, file)
    assert file.tell() < 4000
    file.seek(0)
    torch.testing.assert_close(whole(torch.load(file, weights_only=False)), whole(model[1].weight))


@run_on_ranks(4)
def test_full_and_sharded_state() -> None:
    """get_model_state_dict and set_model_state_dict, whole or sharded, between layouts."""
    mesh, hybrid = mesh_of(4), mesh_of(2, 2)
    model = double(Mlp)
    ours, others = copy.deepcopy(model), double(Mlp)
    shard_blocks(mesh)(ours)
    with torch.no_grad():
        for parameter in others.parameters():
            parameter.zero_()
    shard_blocks(hybrid)(others)
    full = hp.get_model_state_dict(ours, options={"full_state_dict": True})
    assert not any(isinstance(value, hp.DTensor) for value in full.values())
    hp.set_model_state_dict(others, full)
    assert_same_weights(model, others)
    with torch.no_grad():
        for parameter in others.parameters():
            parameter.zero_()
    hp.set_model_state_dict(others, hp.get_model_state_dict(ours))  # sharded over another mesh
    assert_same_weights(model, others)
    with torch.no_grad():
        for parameter in others.parameters():
            parameter.zero_()
    on_rank_0 = full if get_platform().get_rank() == 0 else {}
    options = {"full_state_dict": True, "broadcast_from_rank0": True}
    hp.set_model_state_dict(others, on_rank_0, options=options)
    assert_same_weights(model, others)
    with pytest.raises(ValueError, match=r"has no 'blocks\.9\.up\.weight'"):
        hp.set_model_state_dict(others, full | {"blocks.9.up.weight": torch.zeros(1)})
    with pytest.raises(ValueError, match="missing"):
        hp.set_model_state_dict(others, {"scale": torch.zeros(())})
    hp.set_model_state_dict(others, {"scale": torch.tensor(2.5)}, options={"strict": False})
    assert whole(others.scale).item() == 2.5
