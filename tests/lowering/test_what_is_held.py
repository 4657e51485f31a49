"""What modules and their code hold, whatever it is kept in: a change is seen, or the module is not recorded."""

import collections
import dataclasses
import enum
import functools
import itertools
import random
import types

import numpy as np
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.testing import threads
from tests.lowering.test_refusals import MASKS, call
from tests.lowering.test_what_users_change import _compare, _named, _start, all_are_refused

only_on = "torch"  # modules of PyTorch

RATE = 2.0
LAST = {"mean": torch.zeros(())}
CHANCE, FORTUNE, COUNTED = random.Random(0), np.random.default_rng(0), itertools.count(1)


class Helper:
    """Reached by an attribute; what its method finds by name counts, too."""

    def __init__(self):
        self.inner = types.SimpleNamespace(scale=2.0)

    def __call__(self, y):
        return self.scaled(y)

    def scaled(self, y):
        return y * RATE * self.inner.scale


class Child(nn.Module):
    def beside(self, y):
        return y * RATE


@dataclasses.dataclass(slots=True)
class Slots:
    scale: float = 2.0


class Mode(enum.Enum):
    PLUS, MINUS = 1, -1


Pair = collections.namedtuple("Pair", "scale shift")


def _set_rate(value):
    global RATE
    RATE = value


def _calls(change, first=None):
    """``first`` is done to the layer before the first call, ``change`` before the third."""
    doing = [first, None, change, None]
    return [call(seed, before=doing[seed]) for seed in range(4)]


def _kept(value, other):
    """An attribute, and another one from the third call on; functions make new ones for each layer."""
    made = [one if callable(one) else lambda one=one: one for one in (other, value)]
    return _calls(*[lambda layer, one=one: setattr(layer, "kept", one()) for one in made])


def _changed(value, change):
    return _calls(lambda layer: change(layer.kept), lambda layer: setattr(layer, "kept", value()))


def _of_all(first=None):
    """What all ranks of a world of threads share is set before each call."""

    def before(layer, seed):
        _set_rate((2.0, 2.0, 3.0, 3.0)[seed])
        if first is not None and seed == 0:
            layer.kept = first()

    return [call(seed, before=functools.partial(before, seed=seed)) for seed in range(4)]


def _deep(y, depth=0):
    return _deeper(y, depth)


def _deeper(y, depth):
    return y * RATE if depth == 4 else _deep(y, depth + 1)


def _freed(layer):
    """Made anew in the memory of the one before."""
    layer.kept = None
    layer.kept = Slots(3.0)


def _multiplied(by, y):
    return y * by[0]


def _with_rate(mask, rate):
    mask = mask[:3].clone()
    mask.rate = rate
    return mask


# name -> (body, calls): recorded anew
ANEW = {
    "a dtype": (lambda layer, y: y.to(layer.kept), _kept(torch.float32, torch.float64)),
    "an enum": (lambda layer, y: y * layer.kept.value, _kept(Mode.PLUS, Mode.MINUS)),
    "1 becomes 1.0": (lambda layer, y: torch.full((2,), layer.kept), _kept(1, 1.0)),
    "True becomes 1": (lambda layer, y: torch.full((2,), layer.kept), _kept(True, 1)),
    "0.0 becomes -0.0": (lambda layer, y: y.copysign(layer.kept), _kept(0.0, -0.0)),
    "a slice": (lambda layer, y: y[layer.kept], _kept(slice(0, 1), slice(1, 2))),
    "a named tuple": (lambda layer, y: y * layer.kept.scale, _kept(Pair(2.0, 0), Pair(3.0, 0))),
    "a number of numpy": (lambda layer, y: y * float(layer.kept), _kept(np.float32(2), np.float32(3))),
    "an array": (lambda layer, y: y * layer.kept.item(), _changed(lambda: np.full(1, 2.0), lambda one: one.fill(3.0))),
    "an ordered dict": (
        lambda layer, y: y * layer.kept["scale"],
        _changed(lambda: collections.OrderedDict(scale=2.0), lambda one: one.update(scale=3.0)),
    ),
    "a dict in a dict": (
        lambda layer, y: y * layer.kept["a"]["b"],
        _changed(lambda: {"a": {"b": 2.0}}, lambda one: one["a"].update(b=3.0)),
    ),
    "an object in a list": (
        lambda layer, y: y * layer.kept[0].scale,
        _changed(lambda: [Slots()], lambda one: setattr(one[0], "scale", 3.0)),
    ),
    "slots": (lambda layer, y: y * layer.kept.scale, _changed(Slots, lambda one: setattr(one, "scale", 3.0))),
    "a freed object": (
        lambda layer, y: y * layer.kept.scale,
        _calls(_freed, lambda layer: setattr(layer, "kept", Slots())),
    ),
    "modules in a list": (
        lambda layer, y: layer.kept[0](y),
        _calls(lambda layer: layer.kept.reverse(), lambda layer: setattr(layer, "kept", [layer.first, layer.second])),
    ),
    "a list of a partial function": (
        lambda layer, y: layer.kept(y),
        _changed(lambda: functools.partial(_multiplied, [2.0]), lambda one: one.args[0].append(one.args[0].pop() + 1)),
    ),
    "a helper's method": (lambda layer, y: layer.kept.scaled(y), _of_all(Helper)),
    "a helper that is called": (lambda layer, y: layer.kept(y), _of_all(Helper)),
    "a helper's object": (
        lambda layer, y: layer.kept.scaled(y),
        _changed(Helper, lambda one: setattr(one.inner, "scale", 3.0)),
    ),
    "another method of a child": (lambda layer, y: layer.kept.beside(y), _of_all(Child)),
    "many calls deep": (lambda layer, y: _deep(y), _of_all()),
    "an attribute of an argument": (
        lambda layer, y, m: y * m * m.rate,
        [call(seed, _with_rate(MASKS[seed % 2], 2.0 + seed // 2)) for seed in range(4)],
    ),
    "-0.0 is given": (lambda layer, y, by: y.copysign(by), [call(seed, (0.0, -0.0)[seed % 2]) for seed in range(4)]),
    "powers and transposed": (lambda layer, y: y.T**2 + y.mT.pow(2), [call(seed) for seed in range(4)]),
}  # fmt: skip


def _append(layer, y, given):
    given.append(y)
    return y * 2


def _keep_globally(layer, y):
    LAST["mean"] = y.detach().mean()
    return y * 2


def _on_node(layer, y):
    y = y * 2
    y.grad_fn.register_prehook(lambda gradients: tuple(2 * one for one in gradients))
    return y


def _tagged(layer, y):
    y = y * 2
    y.tag = "mine"
    return y


def _seeded(layer, y):
    return y * torch.rand(3, generator=torch.Generator().manual_seed(1))


def _backward(layer, y):
    (y**2).sum().backward(retain_graph=True)
    return y * 2


REFUSED = {
    "a generator of Python's": (lambda layer, y: y * CHANCE.random(), [], "changes a value that it depends on"),
    "a generator of numpy's": (lambda layer, y: y * FORTUNE.normal(), [], "changes a value that it depends on"),
    "an iterator": (lambda layer, y: y * next(COUNTED), [], "forward may use COUNTED, a count"),
    "a generator that is seeded": (_seeded, [], "a Generator may change"),
    "kept in a global": (_keep_globally, [], "changes a value that it depends on"),
    "a list that is given": (_append, [[]], "changes or returns a list or dict"),
    "the list that is given": (lambda layer, y, given: (y * given[0], given), [[2.0]], "changes or returns a list"),
    "hooks of nodes": (_on_node, [], "'grad_fn' of a tensor is read"),
    "a gradient": (lambda layer, y: y if layer.gain.grad is None else -y, [], "'grad' of a tensor is read"),
    "an attribute of what it returns": (_tagged, [], "sets the attribute 'tag'"),
    "backward": (_backward, [], "it runs backward"),
    "a sparse argument": (
        lambda layer, y, m: torch.sparse.mm(m, y.mT), [torch.eye(3).to_sparse()], "sparse, nested, or a kind with"
    ),
    "out": (lambda layer, y: torch.add(layer.table, 1, out=layer.table)[:3] * y, [], "writes into an input"),
}  # fmt: skip


def test_what_changes_between_calls():
    def run():
        for name, (body, calls) in ANEW.items():
            region = _named(name, lambda body=body, calls=calls: _compare(body, calls))
            assert region.num_calls["lowered"] > 0 and not region.refusals, (name, region.refusals)

    threads(2).run(run)


def test_transformed_calls_run_by_dispatch():
    model = nn.Sequential(nn.Linear(4, 3))
    lowering = hp.lower(model, "0")
    x = torch.ones(2, 4)
    for _ in range(2):
        assert torch.equal(torch.func.vmap(model)(x), model(x))
        torch.testing.assert_close(torch.func.grad(lambda y: model(y).sum())(x), model[0].weight.sum(0).expand(2, 4))
    assert lowering["0"].num_calls == {"recorded": 1, "lowered": 1, "dispatched": 4, "verified": 0}


def _begin(seed, layer):
    """The two models begin with the same generators."""
    global CHANCE, FORTUNE, COUNTED
    CHANCE, FORTUNE, COUNTED = random.Random(seed), np.random.default_rng(seed), itertools.count(seed + 1)
    _start(seed, layer)


def test_what_is_refused():
    threads(2).run(all_are_refused, REFUSED, _begin)
