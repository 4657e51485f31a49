"""What a sharded module gives: tensors in any container, views that are written to, losses on the side."""

import copy
import warnings
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from tests.fully_shard.parity import (
    Mlp,
    assert_all_sharded,
    assert_same_gradients,
    batch,
    loss_of,
    mesh_of,
    my_part,
    pair,
)
from tests.world import run_on_ranks

only_on = "torch"  # modules of PyTorch


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
    mesh = mesh_of()
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


@dataclass
class Config:
    """Refuses to be asked for some of its fields, as configs whose layers differ do."""

    width: int = 5

    def __getattribute__(self, name):
        if name == "width":
            raise RuntimeError("it differs by layer")
        return super().__getattribute__(name)


class Experts(nn.Module):
    """A loss on the side, computed last and left in an attribute, as routers of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.router = nn.Linear(5, 5), nn.Linear(5, 5)
        self.losses, self.config = [], Config()

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
    mesh = mesh_of()
    model, ours = pair(mesh, WithExperts)
    x = batch(8, 3)
    for _ in range(3):
        for one, data in ((model, x), (ours, my_part(x, mesh))):
            out = one(data)
            side = sum(block.losses[0] for block in one.blocks)
            (loss_of(out) + side).backward()
    assert_same_gradients(model, ours)
    assert_all_sharded(ours)
