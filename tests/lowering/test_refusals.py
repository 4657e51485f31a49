"""What cannot be recorded is refused with its reason, what changes is recorded anew: no call is silently wrong.

Each case is a module and a row of calls on other values, other settings, other shapes. It runs by dispatch and lowered;
all results must be the same bits, and the module's refusals must say why.
"""

import random
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hyper_parallel as hp
from tests.lowering.training import both_ways
from tests.world import run_on_ranks

only_on = "torch"  # modules of PyTorch


class Held:
    """An object that a tensor hides in."""

    def __init__(self, mask):
        self.mask = mask


class Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, held):
        ctx.held = held
        return x * held.mask

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.held.mask, None


class Layer(nn.Module):
    """A linear layer that is cut, and ``body`` on its output, which is plain and local."""

    def __init__(self, body):
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.drop = nn.Dropout(0.5)
        self.register_buffer("table", torch.arange(6.0))
        self.seen, self.last, self.factor = [], None, 2.0
        self.hidden = torch.full((3,), 3.0)
        self.body = body

    def forward(self, x, *args, **kwargs):
        return self.body(self, self.inner(x), *args, **kwargs)


def made(body):
    def make():
        torch.manual_seed(0)
        mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = nn.Sequential(Layer(body))
        return hp.parallelize_module(model, mesh, {"0.inner": hp.ColwiseParallel()})

    return make


def inputs(seed, rows=3, dtype=torch.float32):
    return torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed), dtype=dtype, requires_grad=True)


def _block(tensor):
    return tensor.to_local() if isinstance(tensor, hp.DTensor) else tensor


def call(seed, *args, rows=3, before=None, **kwargs):
    """A call on other values, with its gradients; ``before`` is done to the module first."""

    def run(model):
        if before is not None:
            before(model[0])
        x = inputs(seed, rows)
        out = model[0](x, *args, **kwargs)
        out = out[0] if isinstance(out, tuple) else out
        if out.requires_grad:
            out.square().sum().backward()
        gradients = [None if one.grad is None else _block(one.grad).clone() for one in model.parameters()]
        for one in model.parameters():
            one.grad = None
        return [out.detach(), x.grad, *gradients]

    return run


def _write_list(layer, y):
    layer.seen.append(y)
    return y


def _write_attribute(layer, y):
    layer.last = y
    return y * 2


def _hook(layer, y):
    return y + 1


def _in_object(layer, y, mask):
    return Masked.apply(y, Held(mask[: y.shape[1]]))


def _by_chance(layer, y):
    return y if random.random() < 0.5 else -y


def _closure():
    hidden = torch.tensor([2.0])
    return lambda layer, y: y * hidden


def _autocast(layer, y):
    with torch.autocast("cpu", torch.bfloat16):
        return y @ y.t()


class _Odd:
    def __init__(self, value):
        self.value = value


MASKS = [torch.tensor([1.0, 0, 1, 0, 1, 1]), torch.tensor([0.0, 1, 1, 0, 0, 1])]

# name -> (body, what a refusal must say)
REFUSED = {
    "item": (lambda layer, y: y * y.sum().item(), "item gives a float, which is no tensor"),
    "bool": (lambda layer, y: y if y.sum() > 0 else -y, "__bool__ gives a bool"),
    "int": (lambda layer, y: y * int(y.abs().sum() * 3), "gives a int"),
    "float": (lambda layer, y: y * float(y.max()), "gives a float"),
    "tolist": (lambda layer, y: y * sum(y.detach()[0].tolist()), "tolist gives values besides tensors"),
    "numpy": (lambda layer, y: y * float(y.detach().numpy().sum()), "numpy gives a ndarray"),
    "equal": (lambda layer, y: y * (2 if torch.equal(y, y.abs()) else 3), "equal gives a bool"),
    "nonzero": (lambda layer, y: y[(y[:, 0] > 0).nonzero().squeeze(1)].sum(0), "depends on values"),
    "masked select": (lambda layer, y: torch.masked_select(y, y > 0).sum() * y, "depends on values"),
    "index by booleans": (lambda layer, y: y[y[:, 0] > 0].sum() * y, "depends on values"),
    "a tensor of the module": (lambda layer, y: y * layer.hidden, "neither an input, a parameter or a buffer"),
    "a tensor of a closure": (_closure(), "neither an input, a parameter or a buffer"),
    "kept in a list": (_write_list, "forward changes the attribute seen"),
    "kept in an attribute": (_write_attribute, "forward changes the attribute last"),
    "chance": (_by_chance, "random numbers are drawn"),
    "autocast inside": (_autocast, "runs under other settings than the module was called with"),
    "recompute inside": (
        lambda layer, y: checkpoint(lambda one: one.sin() * one, y, use_reentrant=False),
        "runs under other settings than the module was called with",
    ),
    "writes a buffer": (lambda layer, y: y * layer.table.add_(1.0)[: y.shape[1]], "writes into an input"),
    "writes the input": (lambda layer, y: y.detach().data.zero_() + y, None),  # recorded, or refused: never wrong
}


def _same(one, other):
    assert len(one) == len(other)
    for got, want in zip(one, other, strict=True):
        for a, b in zip(got, want, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


def _compare(body, calls):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        random.seed(3)
        want, got, lowering = both_ways(made(body), "0", calls)
    return want, got, lowering["0"]


@run_on_ranks(2, timeout=300)
def test_what_cannot_be_recorded_runs_by_dispatch():
    for name, (body, said) in REFUSED.items():
        calls = [call(seed) for seed in range(4)]
        if name == "chance":  # the two models draw one behind the other
            calls = [call(seed, before=lambda layer, seed=seed: random.seed(seed)) for seed in range(4)]
        want, got, region = _compare(body, calls)
        _same(got, want)
        if said is not None:
            assert any(said in one for one in region.refusals), (name, region.refusals)
            assert not region.tapes, name


@run_on_ranks(2)
def test_tensors_that_hide_in_objects():
    want, got, region = _compare(_in_object, [call(seed, MASKS[seed % 2]) for seed in range(4)])
    _same(got, want)
    assert "a Held may change, or hide tensors" in region.refusals[0]


@run_on_ranks(2)
def test_arguments_that_are_objects():
    want, got, region = _compare(lambda layer, y, odd: y * odd.value, [call(s, _Odd(float(s))) for s in range(3)])
    _same(got, want)
    assert "the argument arg1 is a _Odd, an object that may hold anything" in region.refusals[0]


def _set(name, value):
    return lambda layer: setattr(layer, name, value)


CHANGES = {
    "training": [call(0), call(1), call(2, before=lambda layer: layer.eval()), call(3)],
    "probability": [call(0), call(1), call(2, before=lambda layer: setattr(layer.drop, "p", 0.1)), call(3)],
    "number": [call(0), call(1), call(2, before=_set("factor", 3.0)), call(3), call(4, before=_set("factor", 2.0))],
    "shape": [call(0), call(1), call(2, rows=5), call(3, rows=5), call(4)],
    "argument": [call(0, 1), call(1, 1), call(2, 2), call(3, 1.0), call(4, True), call(5, 1)],
    "frozen": [call(0), call(1), call(2, before=lambda layer: layer.inner.weight.requires_grad_(False)), call(3)],
    "no gradients": [call(0), call(1), lambda model: [model[0](inputs(2).detach()).detach()], call(3)],
    "attribute gone": [call(0), call(1), call(2, before=lambda layer: vars(layer).pop("last")), call(3)],
    "child": [call(0), call(1), call(2, before=_set("drop", nn.Identity())), call(3)],
    "mask": [call(seed, MASKS[seed % 2]) for seed in range(4)],
    "inference": [call(0), call(1), lambda model: [_in_inference(model)], call(3)],
}


def _in_inference(model):
    with torch.inference_mode():
        return model[0](inputs(2).detach()).clone()


def _changing(layer, y, by=1.0):
    by = by[: y.shape[1]] if isinstance(by, torch.Tensor) else by * (2 if type(by) is float else 3)
    return F.silu(layer.drop(y) * layer.factor) * by


@run_on_ranks(2, timeout=300)
def test_what_changes_is_recorded_anew():
    for name, calls in CHANGES.items():
        want, got, region = _compare(_changing, calls)
        _same(got, want)
        assert region.num_calls["lowered"] > 0, (name, region.refusals)


@run_on_ranks(2)
def test_hooks_of_users_run_at_every_call():
    seen = []

    def add(layer):
        layer.inner.register_forward_hook(lambda *_: seen.append(1))

    calls = [call(0), call(1), call(2, before=add), call(3)]
    want, got, region = _compare(_hook, calls)
    _same(got, want)
    assert len(seen) == 4  # two for each model
    assert any("hook" in one and "would not run" in one for one in region.refusals)


@run_on_ranks(2)
def test_gradients_that_are_not_recorded_inside():
    def body(layer, y):
        with torch.no_grad():
            scale = y.abs().amax()
        return y / scale

    want, got, region = _compare(body, [call(seed) for seed in range(3)])
    _same(got, want)
    assert region.num_calls["lowered"] == 2 and "with grad_mode(False):" in region.source


@run_on_ranks(2)
def test_normalisation_over_ranks_is_recorded():
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.LayerNorm(6, elementwise_affine=False))
    lowering = hp.lower(model, "0")
    for seed in range(3):
        x = torch.randn(3, 6, generator=torch.Generator().manual_seed(seed))
        got = model(hp.distribute_tensor(x, mesh, [hp.Shard(1)]))
        torch.testing.assert_close(got.full_tensor(), F.layer_norm(x, (6,)))
    assert lowering["0"].num_calls["lowered"] == 2


class Later(nn.Module):
    def forward(self, x):
        return (x * 2).redistribute(placements=[hp.Replicate()], async_op=True)


@run_on_ranks(2)
def test_what_is_completed_later_runs_by_dispatch():
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = nn.Sequential(Later())
    lowering = hp.lower(model, "0")
    for seed in range(3):
        x = inputs(seed).detach()
        got = model(hp.distribute_tensor(x, mesh, [hp.Shard(1)]))
        torch.testing.assert_close(got.to_local(), x * 2, rtol=0, atol=0)
    assert "started and completed later" in lowering["0"].refusals[0] and not lowering["0"].tapes


@run_on_ranks(2)
def test_functions_of_users_on_whole_tensors():
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx, gradient):
            return 3 * ctx.saved_tensors[0] ** 2 * gradient

    def make():
        torch.manual_seed(0)
        mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = nn.Sequential(Layer(lambda layer, y: Cube.apply(y)))
        plan = {"0.inner": hp.ColwiseParallel(use_local_output=False)}
        return hp.parallelize_module(model, mesh, plan)

    def run(seed):
        return lambda model: [model[0](inputs(seed)).full_tensor().detach()]

    with pytest.warns(RuntimeWarning, match="Cube is given distributed tensors, as whole ones"):
        want, got, _ = both_ways(make, "0", [run(seed) for seed in range(3)])
    _same(got, want)


@run_on_ranks(2)
def test_too_many_shapes_end_in_dispatch():
    want, got, region = _compare(_changing, [call(seed, rows=seed + 1) for seed in range(10)] + [call(0, rows=1)])
    _same(got, want)
    assert len(region.tapes) == 8 and "8 recordings already" in region.refusals[0]


@run_on_ranks(2)
def test_another_mesh_is_recorded_anew():
    """The same module given values on another mesh of the same ranks: layouts are compared by identity."""
    meshes = [hp.init_device_mesh("cpu", (2,), mesh_dim_names=(name,)) for name in ("a", "b")]
    model = nn.Sequential(nn.SiLU())
    lowering = hp.lower(model, "0")
    for seed, mesh in enumerate((*meshes, *meshes)):
        x = inputs(seed).detach()
        got = model(hp.distribute_tensor(x, mesh, [hp.Shard(1)]))
        assert got.device_mesh is mesh
        torch.testing.assert_close(got.full_tensor(), F.silu(x), rtol=0, atol=0)
    assert lowering["0"].num_calls["recorded"] == 2 and lowering["0"].num_calls["lowered"] == 2
