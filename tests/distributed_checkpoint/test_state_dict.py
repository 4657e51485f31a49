"""The state of models and optimizers by name: it moves between layouts, groups, optimizers and programs."""

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.core.distributed_checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from tests.world import run_on_ranks

only_on = "torch"  # PyTorch's optimizers and modules; MindSpore's: test_mindspore_state.py


class _Net(nn.Module):
    """Sizes that do not divide by 2 or 4, a tied weight, a frozen parameter, a buffer, a size of 1."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(7, 5, dtype=torch.float64)
        self.inner = nn.Linear(5, 5, dtype=torch.float64)
        self.scale = nn.Parameter(torch.randn(1, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.randn(3, dtype=torch.float64), requires_grad=False)
        self.head = nn.Linear(5, 7, bias=False, dtype=torch.float64)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.tensor(float(seed)))


NAMES = ["scale", "embedding.weight", "inner.weight", "inner.bias"]


def _cut(model: nn.Module, mesh, shift: int) -> nn.Module:
    """Every parameter under another layout; which one depends on ``shift``."""
    seen = {}
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            choices = [[hp.Replicate()] * mesh.ndim]
            for dim in range(parameter.ndim):
                choices.append([hp.Shard(dim)] + [hp.Replicate()] * (mesh.ndim - 1))
                choices.append([hp.Replicate()] * (mesh.ndim - 1) + [hp.Shard(dim)])
                choices.append([hp.Shard(dim)] * mesh.ndim)
            if id(parameter) not in seen:
                layout = choices[(len(seen) + shift) % len(choices)]
                made = nn.Parameter(
                    hp.distribute_tensor(parameter.detach(), mesh, layout), requires_grad=parameter.requires_grad
                )
                seen[id(parameter)] = made
            setattr(module, name, seen[id(parameter)])
    return model


def _gradients(model: nn.Module, step: int) -> None:
    for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad):
        generator = torch.Generator().manual_seed(100 * step + number)
        whole = torch.randn(tuple(parameter.shape), dtype=torch.float64, generator=generator)
        is_cut = isinstance(parameter, hp.DTensor)
        parameter.grad = hp.distribute_tensor(whole, parameter.device_mesh, parameter.layout) if is_cut else whole


def _train(model: nn.Module, optimizers, steps: range) -> None:
    for step in steps:
        _gradients(model, step)
        for optimizer in optimizers:
            optimizer.step()


def _whole(value):
    return value.full_tensor() if isinstance(value, hp.DTensor) else value


def _assert_equal_models(one: nn.Module, other: nn.Module) -> None:
    mine, theirs = one.state_dict(), other.state_dict()
    assert mine.keys() == theirs.keys()
    for name, value in mine.items():
        torch.testing.assert_close(_whole(value), _whole(theirs[name]), rtol=0, atol=1e-12, msg=name)


KINDS = {
    "adamw": (torch.optim.AdamW, {"lr": 0.1, "foreach": True}),
    "adam_fused": (torch.optim.Adam, {"lr": 0.1, "fused": True, "amsgrad": True}),
    "sgd_momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    "sgd_plain": (torch.optim.SGD, {"lr": 0.1}),
    "rprop": (torch.optim.Rprop, {"lr": 0.1}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.1}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}),
    "nadam": (torch.optim.NAdam, {"lr": 0.1}),
    "asgd": (torch.optim.ASGD, {"lr": 0.1}),
    "tensor_lr": (torch.optim.Adam, {"lr": torch.tensor(0.1)}),
}


def _make(kind: str, parameters):
    make, options = KINDS[kind]
    return make(parameters, **{k: v.clone() if torch.is_tensor(v) else v for k, v in options.items()})


@run_on_ranks(4)
@pytest.mark.parametrize("kind", list(KINDS))
def test_training_goes_on_under_another_layout(kind: str) -> None:
    meshes = [hp.init_device_mesh("cpu", (4,), mesh_dim_names=("x",)), hp.init_device_mesh("cpu", (2, 2))]
    reference = _Net()
    expected = _make(kind, [p for p in reference.parameters() if p.requires_grad])
    _train(reference, [expected], range(4))

    for saved_after in (0, 2):
        first = _cut(_Net(), meshes[0], 1)
        one = _make(kind, [p for p in first.parameters() if p.requires_grad])
        _train(first, [one], range(saved_after))
        model_state, optimizer_state = get_state_dict(first, one)

        second = _cut(_Net(seed=1), meshes[1], 2)
        two = _make(kind, [p for p in second.parameters() if p.requires_grad])
        set_state_dict(second, two, model_state_dict=model_state, optim_state_dict=optimizer_state)
        _train(second, [two], range(saved_after, 4))
        second.count.fill_(0)
        _assert_equal_models(second, reference)
        for parameter in second.parameters():
            for slot, value in two.state.get(parameter, {}).items():
                if isinstance(value, hp.DTensor) and value.shape == parameter.shape:
                    assert value.layout is parameter.layout, slot

        _train(first, [one], range(saved_after, 4))  # what was taken over were copies
        _assert_equal_models(first, reference)


@run_on_ranks(2)
def test_into_a_fresh_optimizer_without_copies() -> None:
    """The way of a load: blank slots are filled in place, and then are the optimizer's own."""
    mesh = hp.init_device_mesh("cpu", (2,))
    source, target = _cut(_Net(), mesh, 1), _cut(_Net(seed=1), mesh, 1)
    one = torch.optim.AdamW(source.parameters(), lr=0.1)
    two = torch.optim.AdamW(target.parameters(), lr=0.3)
    before = {name: value.clone() for name, value in target.state_dict().items()}
    _train(source, [one], range(2))
    wanted = get_optimizer_state_dict(source, one)
    state = get_optimizer_state_dict(target, two)
    assert not any(state["stepped"].values()) and list(state["state"]) == NAMES
    assert [name for name, has in wanted["stepped"].items() if has] == NAMES
    assert not two.state, "asking for the state must not change the optimizer"
    for name, value in target.state_dict().items():
        assert torch.equal(_whole(value), _whole(before[name]))

    for name, slots in state["state"].items():
        for slot, value in slots.items():
            assert type(value) is type(wanted["state"][name][slot])
            value.copy_(wanted["state"][name][slot])
    state["options"], state["stepped"] = wanted["options"], wanted["stepped"]
    set_optimizer_state_dict(target, two, state)
    set_model_state_dict(target, get_model_state_dict(source))
    for name, parameter in target.named_parameters():
        if name in NAMES:
            assert two.state[parameter]["exp_avg"] is state["state"][name]["exp_avg"]
    _train(source, [one], range(2, 4))
    _train(target, [two], range(2, 4))
    _assert_equal_models(source, target)


@run_on_ranks(2)
def test_groups_in_another_order_and_other_optimizers() -> None:
    torch.manual_seed(0)
    source, target, third = _Net(), _Net(seed=1), _Net(seed=2)

    def grouped(net, matrices_first):
        groups = [
            {"params": [net.embedding.weight, net.inner.weight], "weight_decay": 0.1},
            {"params": [net.scale, net.inner.bias], "weight_decay": 0.0, "lr": 0.5},
        ]
        return groups if matrices_first else [{**g, "params": g["params"][::-1]} for g in groups[::-1]]

    one = torch.optim.AdamW(grouped(source, True), lr=0.1)
    two = torch.optim.AdamW(grouped(target, False), lr=7.0)
    parts = grouped(third, True)
    many = [torch.optim.AdamW([part], lr=7.0) for part in parts]
    _train(source, [one], range(3))
    state = get_state_dict(source, one)
    set_state_dict(target, two, model_state_dict=state[0], optim_state_dict=state[1])
    assert [group["lr"] for group in two.param_groups] == [0.5, 0.1]
    assert two.param_groups[1]["betas"] == (0.9, 0.999)
    state = get_state_dict(target, [two])
    set_state_dict(third, many, model_state_dict=state[0], optim_state_dict=state[1])
    merged = get_optimizer_state_dict(third, many)
    assert sorted(merged["state"]) == sorted(NAMES)
    for net, optimizers in ((source, [one]), (target, [two]), (third, many)):
        _train(net, optimizers, range(3, 5))
    _assert_equal_models(target, source)
    _assert_equal_models(third, source)


@run_on_ranks(2)
def test_options_of_lists_and_ways_of_computing() -> None:
    """What has been through JSON has lists for tuples; how a step is computed stays the optimizer's own choice."""
    net, other = _Net(), _Net()
    one = torch.optim.Adam(net.parameters(), lr=0.1, betas=(0.5, 0.6), foreach=True)
    two = torch.optim.Adam(other.parameters(), lr=torch.tensor(0.3), foreach=False)
    state = get_optimizer_state_dict(net, one)
    for options in state["options"].values():
        options["betas"] = [0.5, 0.6]
    set_optimizer_state_dict(other, two, state)
    group = two.param_groups[0]
    assert group["betas"] == (0.5, 0.6) and group["foreach"] is False
    assert isinstance(group["lr"], torch.Tensor) and abs(group["lr"].item() - 0.1) < 1e-7


@run_on_ranks(2)
def test_a_tied_parameter_is_kept_under_any_of_its_names() -> None:
    class Turned(_Net):
        def __init__(self, seed=0):
            super().__init__(seed)
            self._modules = dict(reversed(self._modules.items()))

    source, target = _Net(), Turned(seed=1)
    one, two = torch.optim.AdamW(source.parameters()), torch.optim.AdamW(target.parameters())
    _train(source, [one], range(2))
    model_state, state = get_state_dict(source, one)
    assert "head.weight" in model_state and "head.weight" not in state["state"]
    assert "head.weight" in get_optimizer_state_dict(target, two)["state"]
    del model_state["embedding.weight"]  # as in files that write tied weights once
    set_state_dict(target, two, model_state_dict=model_state, optim_state_dict=state)
    slots = two.state[target.embedding.weight]
    assert torch.equal(slots["exp_avg"], one.state[source.embedding.weight]["exp_avg"])
    assert torch.equal(target.embedding.weight, source.embedding.weight)

    untied = {**get_model_state_dict(source), "head.weight": torch.zeros(7, 5, dtype=torch.float64)}
    with pytest.raises(ValueError, match=r"'head.weight' and 'embedding.weight' are one tensor here, but two"):
        set_model_state_dict(target, untied)


@run_on_ranks(2)
def test_frozen_and_thawed_parameters() -> None:
    source, target = _Net(), _Net(seed=1)
    one, two = torch.optim.AdamW(source.parameters()), torch.optim.AdamW(target.parameters())
    _train(source, [one], range(1))
    state = get_optimizer_state_dict(source, one)
    assert "frozen" not in state["state"] and "frozen" in state["options"]
    target.frozen.requires_grad_()  # was frozen when it was saved: goes on as if new
    _train(target, [two], range(2))
    set_optimizer_state_dict(target, two, state)
    assert target.frozen not in two.state and len(two.state) == 4
    thawed = get_optimizer_state_dict(target, two)
    assert [name for name, has in thawed["stepped"].items() if has] == NAMES and "exp_avg" in thawed["state"]["frozen"]


@run_on_ranks(2)
def test_wrapped_models_and_schedulers() -> None:
    source = _Net()
    one = torch.optim.SGD(source.parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.StepLR(one, 1, 0.5)  # replaces `step` of the instance
    state = get_optimizer_state_dict(nn.DataParallel(source), one)
    assert list(state["state"]) == NAMES
    assert not any(state["stepped"].values()) and not one.state


@run_on_ranks(2)
def test_extra_state_of_modules() -> None:
    class Counting(nn.Linear):
        calls = 0

        def get_extra_state(self):
            return {"calls": self.calls}

        def set_extra_state(self, state):
            self.calls = state["calls"]

    source, target = nn.Sequential(Counting(2, 2)), nn.Sequential(Counting(2, 2))
    source[0].calls = 5
    set_model_state_dict(target, get_model_state_dict(source))
    assert target[0].calls == 5 and torch.equal(source[0].weight, target[0].weight)


def _state():
    net = _Net()
    optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad])
    _train(net, [optimizer], range(1))
    return net, optimizer, get_model_state_dict(net), get_optimizer_state_dict(net, optimizer)


MISFITS = [
    (lambda m, o: m.pop("scale"), "the model: missing in the state dict: scale"),
    (lambda m, o: m.update(new=1, old=2), "the model: in the state dict but not here: new, old"),
    (
        lambda m, o: m.update(scale=torch.zeros(2, dtype=torch.float64)),
        r"'scale' has shape \(2,\) in the state dict and \(1,\) here",
    ),
    (lambda m, o: m.update(scale=torch.zeros(1)), "'scale' has torch.float32 .* cast it on purpose"),
    (lambda m, o: m.update(scale=3.0), "'scale' is a float in the state dict and a tensor here"),
    (lambda m, o: o.pop("stepped"), r"has no 'stepped', only \['options', 'state'\]"),
    (lambda m, o: o["options"].pop("scale"), "the optimizers: missing in the state dict: sc"),
    (
        lambda m, o: (o["options"].update(gone={}), o["stepped"].update(gone=True)),
        "the optimizers: in the state dict but not here: gone; their moments would be dropped",
    ),
    (lambda m, o: o["state"].pop("scale"), "missing in the state dict: scale: step, scale: exp_avg, scale: exp"),
    (lambda m, o: o["state"]["scale"].pop("exp_avg_sq"), "missing in the state dict: scale: exp_avg_sq$"),
    (
        lambda m, o: o["state"]["scale"].update(max_exp_avg_sq=torch.zeros(1)),
        "not here: scale: max_exp_avg_sq; these moments would be dropped",
    ),
    (lambda m, o: o["state"]["scale"].update(exp_avg=torch.zeros(1)), "'scale: exp_avg' has torch.float32"),
    (
        lambda m, o: o["options"]["scale"].update(lr=3.0),
        r"'scale' and 'embedding.weight' are in one parameter group here, .*\(lr: 3.0 and 0.001\)",
    ),
]


@run_on_ranks(2)
def test_what_does_not_fit_is_an_error_and_changes_nothing() -> None:
    for change, said in MISFITS:
        _try_misfit(change, said)


def _try_misfit(change, said) -> None:
    net, optimizer, model_state, optimizer_state = _state()
    model_before = {name: value.clone() for name, value in model_state.items()}
    model_state = {name: value + 1 for name, value in model_state.items()}
    change(model_state, optimizer_state)
    with pytest.raises(ValueError, match=said):
        set_state_dict(net, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    for name, value in get_model_state_dict(net).items():
        assert torch.equal(value, model_before[name])


@run_on_ranks(2)
def test_optimizers_that_cannot_be_kept_by_name() -> None:
    net, other = _Net(), _Net()
    with pytest.raises(ValueError, match=r"parameter 0 \(shape \(1,\)\) of group 0 of optimizer 0 \(SGD\) is not a"):
        get_optimizer_state_dict(net, torch.optim.SGD(other.parameters()))
    with pytest.raises(ValueError, match="'scale' is in two places of the optimizers"):
        get_optimizer_state_dict(net, [torch.optim.SGD([net.scale]), torch.optim.Adam([net.scale])])
    with pytest.raises(TypeError, match=r"must be a torch.optim.Optimizer, got int"):
        get_optimizer_state_dict(net, [1])
    with pytest.raises(RuntimeError, match="SparseAdam has not stepped yet and does not tell"):
        get_optimizer_state_dict(net, torch.optim.SparseAdam([net.scale]))
    linear = nn.Linear(2, 1)
    lbfgs = torch.optim.LBFGS(linear.parameters())

    def closure():
        lbfgs.zero_grad()
        loss = linear(torch.ones(3, 2)).square().sum()
        loss.backward()
        return loss

    lbfgs.step(closure)
    with pytest.raises(TypeError, match=r"LBFGS keeps a list under '.*belongs to all parameters together"):
        get_optimizer_state_dict(linear, lbfgs)
