"""Models built without memory, cut, and initialised block by block: the same bits as on one device."""

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from tests.tensor_parallel.small_modules import tp_plan, whole
from tests.tensor_parallel.toy import Decoder, sp_plan
from tests.world import run_on_ranks

only_on = "torch"  # PyTorch's initialisation; MindSpore's: test_deferred_init_mindspore.py


class Scale(nn.Module):
    """Parameters made by hand, without a reset_parameters: ones, and numbers that differ."""

    def __init__(self, width: int, random: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) if random else torch.full((width,), 3.0))
        self.register_buffer("table", torch.arange(width))


def _deferred(make):
    with hp.deferred_init():
        return make()


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}


@run_on_ranks(2, 4)
def test_same_bits_under_every_plan() -> None:
    world = hp.get_platform().get_world_size()
    mesh = hp.init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    for tied in (False, True):

        def make(tied=tied) -> nn.Module:
            model = Decoder(9, tied=tied)
            model.scale = Scale(5)
            return model

        hp.manual_seed(7)
        want = _values(hp.materialize(_deferred(make)))
        assert want["embed.weight"].std() > 0.5
        for plan in (tp_plan(), sp_plan()):
            model = _deferred(make)
            assert all(parameter.is_meta for parameter in model.parameters())
            with hp.CommRecorder() as recorder:
                model = hp.parallelize_module(model, mesh, plan)
                assert all(parameter.is_meta for parameter in model.parameters())
                hp.manual_seed(7)
                hp.materialize(model)
            assert not recorder.records
            assert (model.head.weight is model.embed.weight) == tied
            got = _values(model)
            assert list(got) == list(want)
            for name, value in want.items():
                assert torch.equal(got[name], value), name
            assert model.head.weight.placements == (hp.Shard(0),)
            assert not isinstance(model.scale.weight, hp.DTensor)
            assert torch.equal(model.scale.table, torch.arange(5))
            assert all(parameter.requires_grad and parameter.is_leaf for parameter in model.parameters())


@run_on_ranks(2)
def test_trains_afterwards_and_equal_ranks_are_equal() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = hp.parallelize_module(_deferred(lambda: Decoder(8)), mesh, tp_plan())
    hp.manual_seed(3)
    hp.materialize(model)
    ids = torch.arange(8).reshape(2, 4)
    losses = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for _ in range(4):
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    gathered = [None, None]
    hp.get_platform().all_gather_object(gathered, losses)
    assert gathered[0] == gathered[1]


def test_an_own_init_and_what_nobody_fills() -> None:
    model = _deferred(lambda: Scale(4, random=True))
    with pytest.raises(RuntimeError, match="nothing gave a value to 'weight'; define reset_parameters"):
        hp.materialize(model)

    def fill(module: nn.Module) -> None:
        nn.init.normal_(module.weight, std=2.0)

    hp.manual_seed(1)
    first = hp.materialize(_deferred(lambda: Scale(4, random=True)), init=fill).weight
    hp.manual_seed(1)
    second = hp.materialize(_deferred(lambda: Scale(4, random=True)), init=fill).weight
    assert torch.equal(first, second)
    assert type(first) is nn.Parameter
    assert first.std() > 0
    assert torch.equal(hp.materialize(_deferred(lambda: Scale(3))).weight, torch.full((3,), 3.0))
    plain = nn.Linear(2, 2)
    before = plain.weight.clone()
    assert torch.equal(hp.materialize(plain).weight, before)


class Noisy(nn.Module):
    """Its reset_parameters draws tensors beside the parameters, a plain and a distributed one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4))
        self.shift = nn.Parameter(torch.empty(3))

    def reset_parameters(self) -> None:
        self.weight.copy_(torch.rand(4) + 1)
        self.shift.copy_(self.shift.new_empty(3).normal_())


def test_values_after_modules_were_removed() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), Noisy(), nn.Linear(4, 4), Noisy())

    state = torch.get_rng_state()
    hp.manual_seed(7)
    want = hp.materialize(_deferred(make))
    assert torch.equal(torch.get_rng_state(), state)
    hp.manual_seed(7)
    for removed in ([0], [0, 1], [2]):
        model = _deferred(make)
        hp.number_initial_values(model)
        kept = [place for place in range(4) if place not in removed]
        hp.manual_seed(7)
        for place in reversed(kept):  # in several calls, in any order
            hp.materialize(model[place])
            for got, value in zip(model[place].parameters(), want[place].parameters(), strict=True):
                assert torch.equal(got, value), (removed, place)
    assert not torch.equal(want[0].weight, want[2].weight)
    assert not torch.equal(want[1].weight, want[3].weight)
    assert not torch.equal(want[1].shift, want[3].shift)
