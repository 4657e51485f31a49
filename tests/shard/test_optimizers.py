"""PyTorch's optimizers and what comes with them, unmodified, on distributed parameters against one device."""

import random

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.core.dtensor.comm_recorder import CommRecorder
from tests.shard.validator import layouts_of, tensor
from tests.world import run_on_ranks

SHAPES = [(6, 4), (5,), (3, 1), (1,), (2, 3, 2), (4, 4)]

OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}, (None, False, True, "fused")),
    "sgd_nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}, (False, True, "fused")),
    "adam": (torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1}, (None, False, True, "fused")),
    "adam_amsgrad": (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}, (False, True, "fused")),
    "adamw": (torch.optim.AdamW, {"lr": 0.1}, (None, False, True, "fused")),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.1}, (False, True, "fused")),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.1, "momentum": 0.5, "centered": True}, (False, True)),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5}, (False, True)),
    "adamax": (torch.optim.Adamax, {"lr": 0.1}, (False, True)),
    "nadam": (torch.optim.NAdam, {"lr": 0.1}, (False, True)),
    "radam": (torch.optim.RAdam, {"lr": 0.1}, (False, True)),
    "asgd": (torch.optim.ASGD, {"lr": 0.1}, (False, True)),
    "rprop": (torch.optim.Rprop, {"lr": 0.1}, (False, True)),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.1}, (False,)),
}


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, hp.DTensor) else value


def _parameters(mesh, pick: random.Random, mixed: bool) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Plain ones, and the same under random layouts (every third stays plain when ``mixed``)."""
    plain = [nn.Parameter(tensor(*shape)) for shape in SHAPES]
    ours = []
    for number, parameter in enumerate(plain):
        if mixed and number % 3 == 1:
            ours.append(nn.Parameter(parameter.detach().clone()))
        else:
            layout = pick.choice(layouts_of(mesh, parameter, False))
            ours.append(nn.Parameter(hp.distribute_tensor(parameter.detach().clone(), mesh, layout)))
    return plain, ours


def _set_gradients(plain, ours, step: int) -> None:
    for parameter, mine in zip(plain, ours, strict=True):
        gradient = tensor(*parameter.shape, seed=10 + step)
        parameter.grad = gradient
        distributed = isinstance(mine, hp.DTensor)
        mine.grad = hp.distribute_tensor(gradient, mine.device_mesh, mine.layout) if distributed else gradient.clone()


@run_on_ranks(2, 4)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_three_steps(name: str) -> None:
    kind, options, modes = OPTIMIZERS[name]
    world = torch.distributed.get_world_size()
    mesh = hp.init_device_mesh("cpu", (2,) if world == 2 else (2, 2), mesh_dim_names=("x", "y")[: world // 2])
    for mode in modes:
        for mixed in (False, True):
            plain, ours = _parameters(mesh, random.Random(f"{name}{mode}"), mixed)
            modes_of = {"fused": True} if mode == "fused" else {"foreach": mode}
            theirs, mine = kind(plain, **options, **modes_of), kind(ours, **options, **modes_of)
            schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) for optimizer in (theirs, mine)]
            for step in range(3):
                _set_gradients(plain, ours, step)
                theirs.step()
                mine.step()
                for schedule in schedules:
                    schedule.step()
            for parameter, own in zip(plain, ours, strict=True):
                torch.testing.assert_close(_whole(own), parameter, msg=lambda text, m=mode: f"{name} {m}: {text}")
                for key, value in mine.state[own].items():
                    if isinstance(own, hp.DTensor) and torch.is_tensor(value) and value.shape == own.shape != ():
                        assert value.layout is own.layout, f"the state {key} lies under {value.layout}"


@run_on_ranks(2)
def test_a_step_communicates_nothing() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    for mode in ({"foreach": False}, {"foreach": True}, {"fused": True}):
        plain, ours = _parameters(mesh, random.Random(1), True)
        optimizer = torch.optim.AdamW(ours, lr=0.1, **mode)
        _set_gradients(plain, ours, 0)
        with CommRecorder() as recorder:
            optimizer.step()
        assert not recorder.records


@run_on_ranks(2)
def test_lbfgs() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    plain = [nn.Parameter(tensor(5)), nn.Parameter(tensor(3, 2))]
    ours = [nn.Parameter(hp.distribute_tensor(p.detach().clone(), mesh, [hp.Shard(0)])) for p in plain]
    for parameters in (plain, ours):
        optimizer = torch.optim.LBFGS(parameters, lr=0.5, max_iter=3)

        def closure(parameters=parameters, optimizer=optimizer):
            optimizer.zero_grad()
            loss = sum(((p - 1) ** 4).sum() for p in parameters)
            loss.backward()
            return loss

        for _ in range(2):
            optimizer.step(closure)
    for mine, want in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.full_tensor(), want)


@run_on_ranks(4)
def test_grad_scaler_agrees_over_all_ranks() -> None:
    mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    for bad in (False, True):
        plain, ours = _parameters(mesh, random.Random(2), True)
        for parameters in (plain, ours):
            optimizer = torch.optim.SGD(parameters, lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
            loss = sum((p * p).sum() for p in parameters[:1]) + sum((p * p).sum() for p in parameters[1:2])
            scaler.scale(loss.full_tensor() if isinstance(loss, hp.DTensor) else loss).backward()
            _set_gradients(plain, ours, 0)
            if bad:
                values = tensor(*SHAPES[0], seed=10)
                values[-1, -1] = float("inf")  # in the block of some ranks only
                first = parameters[0]
                first.grad = hp.distribute_tensor(values, mesh, first.layout) if parameters is ours else values
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == (4.0 if bad else 8.0)
        for mine, want in zip(ours, plain, strict=True):
            torch.testing.assert_close(_whole(mine), want)
        if bad:
            torch.testing.assert_close(plain[0].detach(), tensor(*SHAPES[0]))


@run_on_ranks(2)
def test_vectors_of_parameters() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    plain, ours = _parameters(mesh, random.Random(3), False)
    vector = nn.utils.parameters_to_vector(ours)
    expected = nn.utils.parameters_to_vector(plain)
    torch.testing.assert_close(vector.full_tensor(), expected)
    nn.utils.vector_to_parameters(vector * 2, ours)
    for mine, want in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine.full_tensor(), want * 2)


@run_on_ranks(2)
@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
def test_parametrizations(name: str) -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    parametrize = getattr(nn.utils.parametrizations, name)
    found = []
    for distributed in (False, True):
        torch.manual_seed(0)
        module = nn.Linear(4, 4, dtype=torch.float64)
        parametrize(module)
        if distributed:
            hp.distribute_module(module, mesh, _cut_rows)
        x = tensor(3, 4)
        out = module(hp.distribute_tensor(x, mesh, [hp.Replicate()]) if distributed else x)
        _whole(out.square().sum()).backward()
        found.append([_whole(out), *(_whole(p.grad) for p in module.parameters())])
    for mine, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, want)


def _cut_rows(name: str, module: nn.Module, mesh) -> None:
    for key, parameter in list(module._parameters.items()):
        if parameter is not None:
            module.register_parameter(key, nn.Parameter(hp.distribute_tensor(parameter.detach(), mesh, [hp.Shard(0)])))
