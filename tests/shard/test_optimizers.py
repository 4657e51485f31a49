"""PyTorch's optimizers and what comes with them, unmodified, on distributed parameters against one device."""

import copy
import functools
import io
import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.core.dtensor.comm_recorder import CommRecorder
from tests.shard.validator import layouts_of, tensor
from tests.world import run_on_ranks

only_on = "torch"  # PyTorch's optimizers; MindSpore's: test_training_on_mindspore.py

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
ELEMENT_WISE = [name for name in OPTIMIZERS if name != "adafactor"]


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


@run_on_ranks(2, sweep=(4,))
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_three_steps(name: str) -> None:
    kind, options, modes = OPTIMIZERS[name]
    world = hp.get_platform().get_world_size()
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


@contextmanager
def _interceptions() -> Iterator[list[str]]:
    """The operators on DTensors that are dispatched inside."""
    seen: list[str] = []
    ordinary = hp.DTensor.__torch_function__

    def count(cls, func, types, args=(), kwargs=None):
        seen.append(getattr(func, "__name__", str(func)))
        return ordinary(func, types, args, kwargs)

    hp.DTensor.__torch_function__ = classmethod(count)
    try:
        yield seen
    finally:
        del hp.DTensor.__torch_function__


@run_on_ranks(2)
def test_a_step_on_blocks_dispatches_nothing() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    for name in ELEMENT_WISE:
        kind, options, modes = OPTIMIZERS[name]
        for mode in modes:
            plain, ours = _parameters(mesh, random.Random(1), True)
            optimizer = kind(ours, **options, **({"fused": True} if mode == "fused" else {"foreach": mode}))
            for step in range(2):
                _set_gradients(plain, ours, step)
                with _interceptions() as seen:
                    optimizer.step()
                assert not seen, f"{name} {mode}: {seen[:10]}"


class _HalvedSteps(torch.optim.AdamW):
    """A user's optimizer: what it does with its parameters before the step is its own business."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(parameter.grad.square().mean())
        return super().step(closure)


def _run_both(plain, ours, make, run, what: str, **tolerance: float) -> list[torch.optim.Optimizer]:
    """``run(optimizer, parameters, step)`` three times on either side, gradients set before; the two optimizers."""
    optimizers = [make(parameters) for parameters in (plain, ours)]
    for step in range(3):
        _set_gradients(plain, ours, step)
        for optimizer, parameters in zip(optimizers, (plain, ours), strict=True):
            run(optimizer, parameters, step)
    for mine, want in zip(ours, plain, strict=True):
        torch.testing.assert_close(_whole(mine), want, msg=lambda text: f"{what}: {text}", **tolerance)
    return optimizers


@run_on_ranks(4)
def test_whatever_is_done_around_a_step() -> None:
    mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "y"))
    adamw = functools.partial(torch.optim.AdamW, lr=0.1)

    def just_step(optimizer, parameters, step):
        optimizer.step()

    makers = {
        "a user's class": functools.partial(_HalvedSteps, lr=0.1),
        "lr as a tensor": functools.partial(torch.optim.AdamW, lr=torch.tensor(0.1)),
        "maximize": functools.partial(adamw, maximize=True, foreach=True),
        "several groups": lambda ps: adamw([{"params": ps[:2]}, {"params": ps[2:], "lr": 0.01, "betas": (0.5, 0.9)}]),
        "a named group": lambda ps: adamw([(f"p{i}", p) for i, p in enumerate(ps)]),
    }
    for what, make in makers.items():
        _run_both(*_parameters(mesh, random.Random(what), True), make, just_step, what)

    def with_closure(optimizer, parameters, step):
        def closure():
            optimizer.zero_grad()
            loss = sum(_whole((p - step).square().sum()) for p in parameters)
            loss.backward()
            return loss

        assert optimizer.step(closure).item() >= 0

    _run_both(*_parameters(mesh, random.Random(5), True), adamw, with_closure, "a closure")

    def some_without_gradient(optimizer, parameters, step):
        parameters[step].grad = None
        optimizer.step()

    _run_both(*_parameters(mesh, random.Random(6), True), adamw, some_without_gradient, "without gradient")

    def later_group(optimizer, parameters, step):
        if step == 1:
            optimizer.add_param_group({"params": parameters[3:], "lr": 0.3})
        optimizer.step()

    _run_both(*_parameters(mesh, random.Random(7), True), lambda ps: adamw(ps[:3]), later_group, "a later group")

    seen = []

    def hooked(optimizer, parameters, step):
        def before(given, args, kwargs):
            assert given is optimizer and all(a is b for a, b in zip(_params(given), parameters, strict=True))
            parameters[0].grad.mul_(0.5)
            seen.append("before")

        def after(given, args, kwargs):
            assert given is optimizer and set(given.state) == set(parameters)
            seen.append("after")

        handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
        optimizer.step()
        for handle in handles:
            handle.remove()

    _run_both(*_parameters(mesh, random.Random(8), True), adamw, hooked, "hooks")
    assert seen == ["before", "after"] * 6

    def reloaded(optimizer, parameters, step):
        fresh = adamw(parameters)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        fresh.load_state_dict(torch.load(file))
        optimizer.state.clear()
        optimizer.load_state_dict(copy.deepcopy(fresh.state_dict()))
        optimizer.step()

    _run_both(*_parameters(mesh, random.Random(9), True), adamw, reloaded, "state_dict")

    def laid_out_anew(optimizer, parameters, step):
        if isinstance(parameters[0], hp.DTensor):
            placements = [[hp.Shard(0), hp.Shard(1)], [hp.Replicate(), hp.Shard(0)], [hp.Shard(0), hp.Shard(0)]][step]
            gradient = parameters[0].grad
            parameters[0].data = parameters[0].detach().redistribute(mesh, placements)
            parameters[0].grad = gradient
        optimizer.step()

    _run_both(*_parameters(mesh, random.Random(10), False), adamw, laid_out_anew, "another layout")


@run_on_ranks(2)
def test_gradients_flow_through_a_differentiable_step() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    found = []
    for distributed in (False, True):
        leaf, gradient = tensor(5, 3), tensor(5, 3, seed=1)
        if distributed:
            leaf, gradient = (hp.distribute_tensor(value, mesh, [hp.Shard(0)]) for value in (leaf, gradient))
        leaf.requires_grad_()
        parameter = leaf * 2
        parameter.retain_grad()
        parameter.grad = gradient.requires_grad_()
        torch.optim.SGD([parameter], lr=0.1, differentiable=True).step()
        _whole(parameter.square().sum()).backward()
        found.append([_whole(value) for value in (parameter, leaf.grad, gradient.grad)])
    for mine, want in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(mine, want)


def _params(optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


@run_on_ranks(2)
def test_a_step_that_raises_leaves_the_optimizer_as_it_was() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    plain, ours = _parameters(mesh, random.Random(3), False)
    optimizer = torch.optim.AdamW(ours, lr=0.1)
    _set_gradients(plain, ours, 0)
    optimizer.param_groups[0]["betas"] = (0.9, None)
    with pytest.raises(TypeError):
        optimizer.step()
    assert all(a is b for a, b in zip(_params(optimizer), ours, strict=True))
    optimizer.param_groups[0]["betas"] = (0.9, 0.99)
    optimizer.step()
    assert all(value.layout is p.layout for p in ours for key, value in optimizer.state[p].items() if key != "step")


@run_on_ranks(2)
def test_numbers_for_parameters_without_dims() -> None:
    """The state of a parameter without dims is distributed as the parameter is; its step count is not."""
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    for name in ELEMENT_WISE:
        kind, options, _ = OPTIMIZERS[name]
        plain, ours = nn.Parameter(tensor()), nn.Parameter(hp.distribute_tensor(tensor(), mesh, [hp.Replicate()]))
        theirs, mine = kind([plain], **options), kind([ours], **options)
        for _ in range(2):
            _set_gradients([plain], [ours], 0)
            theirs.step()
            mine.step()
        torch.testing.assert_close(ours.full_tensor(), plain)
        for key, value in mine.state[ours].items():
            assert isinstance(value, hp.DTensor) == (key not in ("step", "eta", "mu", "mu_product")), f"{name} {key}"


@run_on_ranks(2)
def test_muon() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    shapes = [(6, 4), (3, 5), (1, 4)]
    plain = [nn.Parameter(tensor(*shape)) for shape in shapes]
    ours = [nn.Parameter(hp.distribute_tensor(tensor(*shape), mesh, [hp.Shard(0)])) for shape in shapes]
    # Muon computes its update, about 0.03 per element and step here, in bfloat16.
    _run_both(
        plain, ours, functools.partial(torch.optim.Muon, lr=0.1), lambda o, *_: o.step(), "muon", atol=0.01, rtol=0
    )


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
