"""Ranks that hold different parameters, as pipeline stages do: a checkpoint of any split goes on under any other."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel import checkpoint as ckpt
from hyper_parallel.checkpoint import get_optimizer_state_dict, get_state_dict, set_state_dict
from hyper_parallel.platform import get_platform
from tests.frameworks import assert_close, distribute_tensor, on_mindspore, ours
from tests.frameworks import models as small
from tests.world import run_on_ranks

NUM_LAYERS = 4


def _values(layer: int, name: str, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + 10 * layer + len(name))
    return torch.randn((3, 2) if name == "weight" else (3,), generator=generator)


class _Layers(small.Module):
    """The layers that a rank has, by the names that they have in the whole model."""

    def __init__(self, layers: Iterable[int]) -> None:
        super().__init__()
        self.numbers = list(layers)
        for number in self.numbers:
            setattr(self, f"layer{number}", small.linear(2, 3))


def _build(layers: Iterable[int], meshes: dict[int, Any] | None = None) -> tuple[Any, Any]:
    """The layers and an optimizer with two groups; with ``meshes``, all are held, each on the mesh of its stage."""
    platform = get_platform()
    model = _Layers(layers)
    for path, owner in platform.get_cells_and_names(model):
        for name in platform.own_parameters(owner):
            number = int(path[-1])
            value = _values(number, name, 0)
            if meshes:
                made = platform.as_parameter(distribute_tensor(value, meshes[number], [hp.Replicate()]), True)
            else:
                made = platform.Parameter(ours(value), requires_grad=True)
            platform.install_parameter(owner, name, made)
    named = platform.parameters_dict(model)
    groups = [
        {"params": [one for name, one in named.items() if name.endswith("weight")], "lr": 0.1},
        {"params": [one for name, one in named.items() if name.endswith("bias")], "lr": 0.2},
    ]
    return model, platform.new_optimizer("adamw", groups, {"weight_decay": 0.1})


def _train(model: Any, optimizer: Any, steps: range) -> None:
    platform = get_platform()
    for step in steps:
        for name, parameter in platform.parameters_dict(model).items():
            path, _, own = name.rpartition(".")
            gradient = _values(int(path[-1]), own, step + 1)
            if isinstance(parameter, hp.DTensor):
                if parameter.device_mesh.get_coordinate() is None:
                    continue
                parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.layout)
            else:
                platform.set_grad(parameter, ours(gradient))
        platform.step_optimizer(optimizer)


def _save(model: Any, optimizer: Any, folder: Any) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    ckpt.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)


def _load(model: Any, optimizer: Any, folder: Any) -> None:
    model_state, optimizer_state = get_state_dict(model, optimizer)
    ckpt.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)


def _assert_same(model: Any, optimizer: Any, expected: Any, expected_optimizer: Any) -> None:
    platform = get_platform()
    wanted = platform.parameters_dict(expected)
    slots = get_optimizer_state_dict(model, optimizer)
    wanted_slots = get_optimizer_state_dict(expected, expected_optimizer)
    for name, parameter in platform.parameters_dict(model).items():
        assert_close(platform.detached(parameter), platform.detached(wanted[name]), rtol=0, atol=1e-6)
        assert slots["stepped"][name] and slots["options"][name] == wanted_slots["options"][name], name
        for slot, value in slots["state"][name].items():
            expected_value = platform.detached(wanted_slots["state"][name][slot])
            assert_close(platform.detached(value), expected_value, rtol=0, atol=1e-6)


SPLITS = {"even": [[0, 1], [2, 3]], "uneven": [[0], [1, 2, 3]], "v": [[0, 3], [1, 2]], "one": [[0, 1, 2, 3]] * 2}


@run_on_ranks(2)
@pytest.mark.parametrize(("saved", "loaded"), [("even", "one"), ("even", "v"), ("one", "uneven"), ("v", "even")])
def test_a_checkpoint_of_stages_goes_on_under_another_split(saved: str, loaded: str, tmp_path: Any) -> None:
    rank = get_platform().get_rank()
    model, optimizer = _build(SPLITS[saved][rank])
    _train(model, optimizer, range(2))
    _save(model, optimizer, tmp_path / "half")

    other, other_optimizer = _build(SPLITS[loaded][rank])
    _load(other, other_optimizer, tmp_path / "half")
    _train(other, other_optimizer, range(2, 4))
    expected, expected_optimizer = _build(range(NUM_LAYERS))
    _train(expected, expected_optimizer, range(4))
    _assert_same(other, other_optimizer, expected, expected_optimizer)


@pytest.mark.skipif(on_mindspore, reason="MindSpore's optimizers count steps once for all parameters")
@run_on_ranks(2)
def test_stages_of_which_one_has_not_stepped(tmp_path: Any) -> None:
    """What rank 0 knows of its parameters says nothing of those that only rank 1 has."""
    rank = get_platform().get_rank()
    model, optimizer = _build(SPLITS["even"][rank])
    if rank == 1:
        _train(model, optimizer, range(2))
    _save(model, optimizer, tmp_path / "half")
    whole, whole_optimizer = _build(range(NUM_LAYERS))
    _load(whole, whole_optimizer, tmp_path / "half")
    state = get_optimizer_state_dict(whole, whole_optimizer)
    assert {name for name, has in state["stepped"].items() if has} == {
        f"layer{number}.{name}" for number in (2, 3) for name in ("weight", "bias")
    }


@run_on_ranks(2)
def test_a_whole_model_whose_parameters_lie_on_the_meshes_of_stages(tmp_path: Any) -> None:
    def meshes() -> dict[int, Any]:
        stages = [hp.init_device_mesh("cpu", (1,), rank_list=(rank,), init_backend=False) for rank in range(2)]
        return {number: stages[number // 2] for number in range(NUM_LAYERS)}

    rank = get_platform().get_rank()
    model, optimizer = _build(range(NUM_LAYERS), meshes())
    _train(model, optimizer, range(2))
    state = get_optimizer_state_dict(model, optimizer)
    own = {f"layer{number}.{name}" for number in SPLITS["even"][rank] for name in ("weight", "bias")}
    assert state["stepped"] == dict.fromkeys(state["stepped"], True) and set(state["stepped"]) == own
    _save(model, optimizer, tmp_path / "half")

    expected, expected_optimizer = _build(range(NUM_LAYERS))
    _train(expected, expected_optimizer, range(4))
    other, other_optimizer = _build(SPLITS["one"][rank])
    _load(other, other_optimizer, tmp_path / "half")
    _train(other, other_optimizer, range(2, 4))
    _assert_same(other, other_optimizer, expected, expected_optimizer)

    again, again_optimizer = _build(range(NUM_LAYERS), meshes())
    _load(again, again_optimizer, tmp_path / "half")
    assert get_optimizer_state_dict(again, again_optimizer)["stepped"] == state["stepped"]
    half = get_optimizer_state_dict(other, other_optimizer)
    set_state_dict(  # the state of all stages, in memory
        again,
        again_optimizer,
        model_state_dict=get_state_dict(other, other_optimizer)[0],
        optim_state_dict=half,
    )
