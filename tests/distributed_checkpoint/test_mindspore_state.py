"""The state of MindSpore's optimizers by the names of parameters: training goes on under another layout as if nothing
had happened, and what an optimizer of MindSpore cannot go on from is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from mindspore.experimental import optim

import hyper_parallel as hp
from hyper_parallel import checkpoint as ckpt
from hyper_parallel.checkpoint import get_optimizer_state_dict, get_state_dict, set_state_dict
from tests.world import run_on_ranks, small_or_sweep

SHAPES = {"a": (5, 4), "inner.b": (1, 3), "inner.c": (4,)}  # over 2 ranks: uneven, empty on one, even
KINDS = {
    "adamw": (optim.AdamW, {"weight_decay": 0.1}),
    "amsgrad": (optim.AdamW, {"amsgrad": True}),
    "adam": (optim.Adam, {"betas": (0.8, 0.9)}),
    "sgd_momentum": (optim.SGD, {"momentum": 0.9, "dampening": 0.5}),
    "sgd_plain": (optim.SGD, {}),
}


def _placed(array: np.ndarray, mesh: Any, dim: int) -> Any:
    tensor = Tensor(array.astype(np.float32))
    return tensor if mesh is None else hp.distribute_tensor(tensor, mesh, [hp.Shard(min(dim, array.ndim - 1))])


def _net(seed: int, mesh: Any = None, dim: int = 0) -> nn.Cell:
    random = np.random.RandomState(seed)
    net, net.inner = nn.Cell(), nn.Cell()
    for name, shape in SHAPES.items():
        owner = net.inner if "." in name else net
        setattr(owner, name.rpartition(".")[2], Parameter(_placed(random.randn(*shape), mesh, dim), name=name))
    return net


def _optimizer(kind: str, net: nn.Cell, rate: float = 0.1) -> Any:
    make, options = KINDS[kind]
    return make(net.trainable_params(), lr=rate, **options)


def _train(optimizer: Any, steps: range, mesh: Any = None, dim: int = 0) -> None:
    for step in steps:
        random = np.random.RandomState(100 + step)
        optimizer(tuple(_placed(random.randn(*shape), mesh, dim) for shape in SHAPES.values()))


def _whole(tensor: Any) -> np.ndarray:
    return (tensor.full_tensor() if isinstance(tensor, hp.DTensor) else tensor).asnumpy()


def _assert_equal(net: nn.Cell, expected: nn.Cell) -> None:
    for one, other in zip(net.trainable_params(), expected.trainable_params(), strict=True):
        np.testing.assert_allclose(_whole(one), _whole(other), rtol=0, atol=1e-5, err_msg=one.name)


@run_on_ranks(2, timeout=300)
@pytest.mark.parametrize("kind", small_or_sweep(KINDS, ["adamw"]))
def test_training_goes_on_under_another_layout(kind, tmp_path):
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    expected = _net(0)
    _train(_optimizer(kind, expected), range(4))

    # The first step of each optimizer is compiled, so there are no more of them than are needed.
    for saved_after, places in ((0, [(mesh, 1)]), (2, [(mesh, 1), (None, 0)])):
        first = _net(0, mesh, 0)
        one = _optimizer(kind, first)
        _train(one, range(saved_after), mesh, 0)
        state = dict(zip(("model", "optimizer"), get_state_dict(first, one), strict=True))
        has_slots = saved_after > 0 and kind != "sgd_plain"
        assert state["optimizer"]["stepped"] == dict.fromkeys(SHAPES, has_slots)
        ckpt.save(state, checkpoint_id=tmp_path / "half")

        for where, dim in places:
            second = _net(1, where, dim)
            two = _optimizer(kind, second, rate=0.5)
            _train(two, range(7, 8), where, dim)  # what it had learned is forgotten
            wanted = dict(zip(("model", "optimizer"), get_state_dict(second, two), strict=True))
            ckpt.load(wanted, checkpoint_id=tmp_path / "half")
            set_state_dict(second, two, model_state_dict=wanted["model"], optim_state_dict=wanted["optimizer"])
            _train(two, range(saved_after, 4), where, dim)
            _assert_equal(second, expected)

    third = _net(1, mesh, 1)  # without a file
    three = _optimizer(kind, third)
    set_state_dict(third, three, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    _train(three, range(2, 4), mesh, 1)
    _assert_equal(third, expected)
    _train(one, range(2, 4), mesh, 0)  # what was taken over were copies
    _assert_equal(first, expected)


def test_what_an_optimizer_cannot_go_on_from_is_refused():
    net = _net(0)
    optimizer = _optimizer("adamw", net)
    _train(optimizer, range(2))
    model, state = get_state_dict(net, optimizer)
    before = [_whole(parameter).copy() for parameter in net.trainable_params()]
    assert state["options"]["a"]["lr"] == 0.1

    def refused(changed: dict[str, Any], message: str, kind: str = "adamw") -> None:
        other = _net(1)
        target = _optimizer(kind, other)
        with pytest.raises(ValueError, match=message):
            set_state_dict(other, target, model_state_dict=model, optim_state_dict=changed)
        _assert_equal(other, _net(1))
        assert not any(get_optimizer_state_dict(other, target)["stepped"].values())

    slots = {**state["state"], "a": {**state["state"]["a"], "step": Tensor(np.float32(7))}}
    refused({**state, "state": slots}, "counts its steps once for all parameters, but 'inner.b' has made 2 .* 'a' 7")
    refused({**state, "stepped": {"a": True, "inner.b": True}}, "'inner.c' has made 0 of them and 'a' 2")
    options = {name: {**one, "amsgrad": True} for name, one in state["options"].items()}
    refused({**state, "options": options}, "amsgrad=False and the state")
    refused(state, "decoupled_weight_decay=False and the state decoupled_weight_decay=True", "adam")
    refused(state, "missing in the state dict: a: max_exp_avg_sq", "amsgrad")
    for parameter, value in zip(net.trainable_params(), before, strict=True):
        assert np.array_equal(_whole(parameter), value)

    with pytest.raises(TypeError, match="Adam takes amsgrad and does not use it"):
        get_optimizer_state_dict(net, optim.Adam(net.trainable_params(), amsgrad=True))
    with pytest.raises(TypeError, match=r"a Adagrad does not tell .*use one of mindspore\.experimental\.optim\.AdamW"):
        get_optimizer_state_dict(net, optim.Adagrad(net.trainable_params()))
