"""What programs do between calls, and inside: recorded anew, or refused with a reason, and never silently wrong."""

import dataclasses
import functools
import types
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyper_parallel as hp
from hyper_parallel.testing import threads
from tests.lowering.test_refusals import MASKS, Layer, _same, call, made
from tests.lowering.training import both_ways

only_on = "torch"  # modules of PyTorch

SCALE = 2.0
SETTINGS = types.ModuleType("settings")  # a Python module of the program
TABLE, CHOSEN = {"scale": 2.0}, types.SimpleNamespace(inner=types.SimpleNamespace(scale=2.0), scale=2.0)


@dataclasses.dataclass
class Options:
    scale: float = 2.0
    count: int = 0


class Scaled(nn.Module):
    factor = 2.0

    @property
    def scale(self):
        return TABLE["scale"]

    @classmethod
    def of_class(cls):
        return cls.factor * SCALE

    def forward(self, y):
        return y * self.scale * self.of_class()


@dataclasses.dataclass
class Batch:
    mask: torch.Tensor


def _scaled(y):
    return y * SCALE


def _set_scale(value):
    global SCALE
    SCALE = value


def with_more(body):
    """The layer with things that programs keep in modules."""

    def make():
        model = made(body)()
        layer = model[0]
        layer.act, layer.options, layer.scales = F.silu, Options(), [2.0, 1.0]
        layer.named, layer.first, layer.second = {"scale": 2.0}, nn.Linear(3, 3), nn.Linear(3, 3)
        layer.gain = nn.Parameter(torch.full((3,), 2.0))
        layer.count, layer.scaled = 0, Scaled()
        return model

    return make


def _on_layer(change):
    return [call(0), call(1), call(2, before=change), call(3)]


def _swaps():
    """Another submodule, and the first again, which has changed meanwhile."""
    kept = {}  # of the layers of all ranks

    def other(layer):
        kept[id(layer)] = layer.first
        layer.first = nn.Linear(3, 3)
        layer.first.load_state_dict({"weight": torch.eye(3), "bias": torch.ones(3)})

    def back(layer):
        layer.first = kept.pop(id(layer))
        with torch.no_grad():
            layer.first.weight.mul_(2.0)

    return [call(0), call(1), call(2, before=other), call(3), call(4, before=back), call(5), call(6)]


def _closure():
    scale = 2.0

    def body(layer, y):
        return y * scale

    def change(value):
        nonlocal scale
        scale = value

    return body, _set_each_time(change)


def _held_in_closure():
    held = [2.0]

    def body(layer, y):
        return y * held[0]

    return body, _set_each_time(functools.partial(held.__setitem__, 0))


def _options():
    return CHOSEN


def _set_each_time(change):
    """What all ranks of a world of threads share is set before each call."""
    return [call(seed, before=lambda layer, seed=seed: change((2.0, 2.0, 3.0, 3.0)[seed])) for seed in range(4)]


def _autocast(model):
    with torch.autocast("cpu", torch.bfloat16):
        return [model[0](torch.ones(2, 4)).detach()]


def _plus(name, value):
    return lambda layer: setattr(layer, name, value)


def _table(layer):
    layer.table = torch.arange(6.0) * 3


def _gain(layer):
    layer.gain = nn.Parameter(torch.full((3,), 5.0))


def _tie(layer):
    layer.second.weight = layer.first.weight


def _scale_in_place(layer):
    layer.scales[0] = 3.0


def _scale_in_dict(layer):
    layer.named["scale"] = 3.0


def _scale_in_object(layer):
    layer.options.scale = 3.0


WIDER = [MASKS[0], MASKS[1].double()]

# name -> (body, calls): recorded anew
ANEW = {
    "a function": (lambda layer, y: layer.act(y), _on_layer(_plus("act", F.relu))),
    "a number in an object": (lambda layer, y: y * layer.options.scale, _on_layer(_scale_in_object)),
    "another object": (lambda layer, y: y * layer.options.scale, _on_layer(_plus("options", Options(3.0)))),
    "a number in a list": (lambda layer, y: y * layer.scales[0], _on_layer(_scale_in_place)),
    "a number in a dict": (lambda layer, y: y * layer.named["scale"], _on_layer(_scale_in_dict)),
    "a global number": (lambda layer, y: y * SCALE, _set_each_time(_set_scale)),
    "the global of a helper": (lambda layer, y: _scaled(y), _set_each_time(_set_scale)),
    "a number of a closure": _closure(),
    "a list of a closure": _held_in_closure(),
    "a number of a Python module": (
        lambda layer, y: y * SETTINGS.scale,
        _set_each_time(lambda value: setattr(SETTINGS, "scale", value)),
    ),
    "a global dict": (lambda layer, y: y * TABLE["scale"], _set_each_time(lambda value: TABLE.update(scale=value))),
    "a global object": (lambda layer, y: y * _options().scale, _set_each_time(lambda v: setattr(CHOSEN, "scale", v))),
    "an object in an object": (
        lambda layer, y: y * CHOSEN.inner.scale,
        _set_each_time(lambda value: setattr(CHOSEN.inner, "scale", value)),
    ),
    "a property": (lambda layer, y: layer.scaled(y), _set_each_time(lambda value: TABLE.update(scale=value))),
    "a number of a class": (
        lambda layer, y: layer.scaled(y),
        _set_each_time(lambda value: setattr(Scaled, "factor", value)),
    ),
    "the global of a class method": (lambda layer, y: layer.scaled(y), _set_each_time(_set_scale)),
    "a submodule and back": (lambda layer, y: layer.first(y), _swaps()),
    "a buffer": (lambda layer, y: y * layer.table[:3], _on_layer(_table)),
    "a parameter": (lambda layer, y: y * layer.gain, _on_layer(_gain)),
    "tied later": (lambda layer, y: layer.second(layer.first(y)), _on_layer(_tie)),
    "None becomes a list": (lambda layer, y: y * (2 if layer.last else 3), _on_layer(_plus("last", [1.0]))),
    "another dtype": (lambda layer, y, m: y * m[:3], [call(s, WIDER[s // 2]) for s in range(4)]),
    "a tensor in a dict": (lambda layer, y, m: y * m["of"][:3], [call(s, {"of": MASKS[s % 2]}) for s in range(4)]),
    "autocast around": (lambda layer, y: y @ y.t(), [call(0), call(1), _autocast, call(2), _autocast]),
    "a new flag": (lambda layer, y: y * (2 if getattr(layer, "flag", False) else 3), _on_layer(_plus("flag", True))),
}  # fmt: skip


def _count(layer, y):
    layer.count += 1
    return y * layer.count


def _count_in_global(layer, y):
    TABLE["count"] += 1
    return y * TABLE["count"]


def _count_in_object(layer, y):
    layer.options.count += 1
    return y * layer.options.count


def _seed(layer, y):
    torch.manual_seed(0)
    return y + torch.randn(y.shape)


def _hooked(layer, y):
    y.register_hook(lambda gradient: gradient * 2)
    return y * 2


REFUSED = {
    "numpy": (lambda layer, y: y * float(np.asarray(y.detach()).sum()), [], "ndarray"),
    "numpy's random": (lambda layer, y: y * np.random.rand(), [], "numpy's random numbers"),
    "a seed": (_seed, [], "seeds the framework's generator"),
    "a counter": (_count, [], "forward changes the attribute count"),
    "a counter in an object": (_count_in_object, [], "forward changes a value that it depends on"),
    "a counter in a global": (_count_in_global, [], "forward changes a value that it depends on"),
    "a hook on a tensor": (_hooked, [], "register_hook gives a RemovableHandle"),
    "a dataclass": (lambda layer, y, b: y * b.mask[:3], [Batch(MASKS[0])], "the argument arg1 is a Batch, an object"),
    "a global tensor": (lambda layer, y: y * MASKS[0][:3], [], "neither an input, a parameter or a buffer"),
    "a written buffer": (lambda layer, y: y * layer.table.mul_(2.0)[:3], [], "writes into an input"),
}


def _compare(body, calls):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        want, got, lowering = both_ways(with_more(body), "0", calls)
    _same(got, want)
    return lowering["0"]


def _named(name, run):
    try:
        return run()
    except Exception as error:
        raise AssertionError(name) from error


def test_what_changes_between_calls():
    def run():
        for name, (body, calls) in ANEW.items():
            region = _named(name, lambda body=body, calls=calls: _compare(body, calls))
            assert region.num_calls["lowered"] > 0 and not region.refusals, (name, region.refusals)

    threads(2).run(run)


def _start(seed, layer):
    np.random.seed(seed)
    TABLE["count"] = 0


def all_are_refused(cases, begin):
    for name, (body, given, said) in cases.items():
        calls = [call(seed, *given, before=functools.partial(begin, seed)) for seed in range(3)]
        region = _named(name, lambda body=body, calls=calls: _compare(body, calls))
        assert any(said in one for one in region.refusals) and not region.tapes, (name, region.refusals)


def test_what_is_refused():
    threads(2).run(all_are_refused, REFUSED, _start)


def test_hooks_for_all_modules_run():
    seen = []

    def run():
        model = with_more(lambda layer, y: layer.first(y))()
        lowering = hp.lower(model, "0")
        for _ in range(2):
            model[0](torch.ones(2, 4))
        return lowering["0"].num_calls

    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module)))
    try:
        counts, _ = threads(2).run(run)
    finally:
        handle.remove()
    assert counts["dispatched"] == 2 and seen.count(nn.Linear) == 8


class Two(Layer):
    """A cut layer and one whose outputs are summed over the ranks, with a body between them."""

    def __init__(self, body):
        super().__init__(body)
        self.outer = nn.Linear(6, 4)

    def forward(self, x, *args):
        return self.outer(self.body(self, self.inner(x), *args))


def _two(body):
    torch.manual_seed(0)
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = nn.Sequential(Two(body))
    plan = {"0.inner": hp.ColwiseParallel(), "0.outer": hp.RowwiseParallel()}
    return hp.parallelize_module(model, mesh, plan)


def _on_rank_1(layer, y):
    """Rank 1 reads a value, which only it is refused for."""
    return y * float(y.detach().sum() * 0 + 1) if hp.get_platform().get_rank() == 1 else y * 1.0


@pytest.mark.parametrize("verify_every", [None, 1, 2])
def test_one_rank_refuses(verify_every):
    """It runs by dispatch what the other has recorded, in step; and where calls are compared, nobody compares."""

    def run():
        want, got, lowering = both_ways(
            lambda: _two(_on_rank_1), "0", [call(s) for s in range(5)], verify_every=verify_every
        )
        _same(got, want)
        return lowering["0"].num_calls

    with pytest.warns(RuntimeWarning, match="gives a float"):
        first, second = threads(2).run(run)
    assert first["lowered"] == 4 and second["lowered"] == 0 and second["dispatched"] == 4
    assert first["verified"] == second["verified"] == 0


@pytest.mark.parametrize("verify_every", [None, 1])
def test_ranks_record_at_different_calls(verify_every):
    """A plain argument of other sizes on one rank only: that rank records anew, the other runs what it has."""

    def run():
        rank = hp.get_platform().get_rank()

        def body(layer, y, extra):
            return y * extra.sum()

        calls = [call(s, torch.ones(1 + (s // 2) * rank, 3) + s) for s in range(6)]
        want, got, lowering = both_ways(lambda: _two(body), "0", calls, verify_every=verify_every)
        _same(got, want)
        return lowering["0"].num_calls

    first, second = threads(2).run(run)
    assert first["recorded"] == 1 and second["recorded"] == 3
    assert first["lowered"] == 5 and second["lowered"] == 3
    assert first["verified"] == second["verified"] == (3 if verify_every else 0)


def test_a_difference_on_one_rank_is_raised_by_all():
    hidden = [1.0]

    def body(layer, y, by=hidden):  # no guard reads default arguments
        return y * (by[0] if hp.get_platform().get_rank() else 1.0)

    def run():
        model = _two(body)
        hp.lower(model, "0", verify_every=2)
        for step in range(4):
            if step == 3:
                hidden[0] = 2.0
            model(torch.ones(2, 4))

    with pytest.raises(hp.LoweringMismatch, match="the recorded program"):
        threads(2).run(run)
