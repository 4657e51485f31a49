"""Recorded cells on MindSpore: dispatch to rounding (its kernels on a CPU do not repeat their bits)."""

from __future__ import annotations

import random
import warnings

import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

import hyper_parallel as hp
from hyper_parallel.core.lowering.foreign_hooks import find_foreign_hook
from tests.tensor_parallel.llama_training import SIZES, whole
from tests.world import run_on_ranks, small_or_sweep

TIMEOUT = 300.0
CASES = [
    ("tp=2", {}, 7),  # uneven parts of the sequence
    ("tp=2", {"sequence_parallel": False}, 8),
    ("dp_shard=2", {}, 8),
    ("tp=2", {"hidden_dim": 19}, 8),  # uneven parts of features
    ("tp=2", {"recompute": "full"}, 8),
    ("tp=2", {"microbatches": 2}, 8),
]
SMALL = 1


def _model(**sizes):
    with hp.deferred_init():
        return hp.models.Llama(hp.models.LlamaConfig(**(SIZES | sizes)))


def _batch(step, length):
    numbers = np.random.RandomState(step)
    ids = numbers.randint(0, SIZES["vocab_size"], (4, length)).astype(np.int32)
    labels = np.where(numbers.rand(4, length) < 0.3, -100, ids).astype(np.int32)
    return ids, labels


class _AdamW:
    """MindSpore's own is compiled, which takes longer than all else here."""

    def __init__(self, weights):
        self.blocks = [_block(one) for one in weights]
        self.first, self.second = ([np.zeros_like(one) for one in self.blocks] for _ in range(2))
        self.num_steps = 0

    def step(self, gradients):
        self.num_steps += 1
        for block, gradient, first, second in zip(self.blocks, gradients, self.first, self.second, strict=True):
            given = _block(gradient)
            first += 0.1 * (given - first)
            second += 0.001 * (given * given - second)
            scale = np.sqrt(second / (1 - 0.999**self.num_steps)) + 1e-6
            block -= 0.01 * (first / (1 - 0.9**self.num_steps) / scale + 0.01 * block)


def _block(tensor):
    return (tensor.to_local() if isinstance(tensor, hp.DTensor) else tensor).asnumpy()


def train(degrees, options, length, compile):
    """Losses, all gradients and weights of three steps of AdamW on other batches; ``degrees`` None: on one device."""
    options = dict(options)
    sizes = {"hidden_dim": options.pop("hidden_dim")} if "hidden_dim" in options else {}
    model = _model(**sizes)
    hp.manual_seed(5)
    run = None
    if degrees is not None:
        run = hp.parallelize(model, degrees, compile=compile, **options)
        run.materialize()
    else:
        hp.materialize(model)
    weights = model.trainable_params()
    optimizer, seen = _AdamW(weights), []
    mine = range(4) if run is None else run.mine(range(4))
    for step in range(3):
        ids, labels = (Tensor(one[mine.start : mine.stop]) for one in _batch(step, length))
        if run is None:
            loss = model(ids, labels)
            hp.backward(loss)
        else:
            loss = run.forward_backward(ids, labels)
        seen.append(loss.asnumpy().copy())
        gradients = [hp.grad_of(one) for one in weights]
        seen += [whole(one) for one in gradients]
        optimizer.step(gradients)
        hp.zero_grad(weights)
    return [*seen, *(whole(one) for one in weights)], None if run is None else run.lowering


@pytest.mark.parametrize("case", small_or_sweep(range(len(CASES)), range(SMALL)))
@run_on_ranks(2, timeout=TIMEOUT)
def test_llama_trains_as_by_dispatch_and_on_one_device(case):
    degrees, options, length = CASES[case]
    by_dispatch, _ = train(degrees, options, length, False)
    got, lowering = train(degrees, options, length, "local")
    sizes = {name: value for name, value in options.items() if name == "hidden_dim"}
    for want, nearly in ((by_dispatch, 2e-5), (train(None, sizes, length, False)[0], 2e-4)):
        for one, other in zip(got, want, strict=True):
            limit = nearly * max(1e-3, np.abs(other).max())
            np.testing.assert_allclose(one, other, rtol=0, atol=limit, err_msg=degrees)
    counts = [region.num_calls["lowered"] for region in lowering.regions.values()]
    assert not lowering.refusals and all(counts), lowering


class Layer(nn.Cell):
    """A linear layer that is cut, ``body`` on its output, plain and local, and one that sums over the ranks."""

    def __init__(self, body):
        super().__init__()
        self.inner, self.outer = nn.Dense(4, 6), nn.Dense(6, 4)
        self.drop = nn.Dropout(p=0.5)
        self.register_buffer("table", Tensor(np.arange(3.0), dtype=self.inner.weight.dtype))
        self.hidden = Tensor(np.full(3, 2.0), dtype=self.inner.weight.dtype)
        self.factor, self.count, self.last = 2.0, 0, None
        self.body = body

    def construct(self, x, *args):
        return self.outer(self.body(self, self.inner(x), *args))


class OwnGradient(nn.Cell):
    def construct(self, x):
        return x * 2

    def bprop(self, x, out, gradient):
        return (gradient * 2,)


class Odd:
    value = 2.0


def _made(body):
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    cell = nn.SequentialCell(Layer(body))
    numbers = np.random.RandomState(0)
    for one in cell.trainable_params():
        one.set_data(Tensor(numbers.randn(*one.shape).astype(np.float32)))
    return hp.parallelize_module(cell, mesh, {"0.inner": hp.ColwiseParallel(), "0.outer": hp.RowwiseParallel()})


def _compare(name, body, calls):
    """Each call by dispatch and lowered: outputs, gradients of the input and of the weights; the lowered region."""
    seen = []
    for lowered in (False, True):
        cell = _made(body)
        lowering = hp.lower(cell, "0") if lowered else None
        hp.manual_seed(3)
        results = []
        for seed, (change, args) in enumerate(calls):
            random.seed(seed)
            if change is not None:
                change(cell[0])
            x = Tensor(np.random.RandomState(seed).randn(3 + len(args), 4).astype(np.float32))
            x.requires_grad_()
            out = cell[0](x, *args)
            hp.backward((out * out).sum())
            results += [out.asnumpy().copy(), hp.grad_of(x).asnumpy().copy()]
            results += [_block(hp.grad_of(one)).copy() for one in cell.trainable_params()]
            hp.zero_grad(cell.trainable_params())
        seen.append(results)
    for got, want in zip(*reversed(seen), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5, err_msg=name)
    return lowering["0"]


def _plain(layer, y):
    both = ops.stack([y, y * 2]).sum(0) + y[0] + mint.cat((y[:, :1], y[:, 1:]), 1) * layer.table
    first, rest = both[:, :1], both.T.reshape(3, -1).transpose(1, 0)
    return ops.silu(first) + ops.softmax(rest, -1) - layer.table.expand_as(y) / 3 + (y > 0).astype(y.dtype)


def _sum_over_ranks(layer, y):
    return layer.drop(hp.DTensor.from_local(y, layer.outer.weight.device_mesh, [hp.Shard(1)])).to_local()


def _last(layer, y):
    layer.last = y
    return y


def _count(layer, y):
    layer.count += 1
    return y * layer.count


def _set(name, value):
    return lambda layer: setattr(layer, name, value)


def _freeze(layer):
    layer.inner.weight.requires_grad = False


def _times(layer, y):
    return y * layer.factor * (2 if layer.training else 3)


RECORDED = {
    "plain tensors": (_plain, [(None, ())] * 3),
    "dropout by index": (_sum_over_ranks, [(lambda layer: layer.set_train(), ())] * 3),
    "a number": (_times, [(None, ()), (None, ()), (_set("factor", 3.0), ()), (None, ())]),
    "training": (_times, [(None, ()), (None, ()), (lambda layer: layer.set_train(), ()), (None, ())]),
    "shapes": (lambda layer, y, *args: y * 2, [(None, ()), (None, (1,)), (None, ()), (None, (1,))]),
    "arguments": (lambda layer, y, by: y * by, [(None, (1,)), (None, (2,)), (None, (1,)), (None, (2,))]),
}
REFUSED = {
    "float": (lambda layer, y: y * float(y.sum()), (), "__float__ gives values"),
    "bool": (lambda layer, y: y if y.sum() > 0 else -y, (), "__bool__ gives values"),
    "asnumpy": (lambda layer, y: y * float(y.asnumpy().sum()), (), "asnumpy gives values"),
    "tolist": (lambda layer, y: y * y[0].tolist()[0], (), "tolist gives values"),
    "a hidden tensor": (lambda layer, y: y * layer.hidden, (), "neither an input, a parameter or a buffer"),
    "an attribute": (_last, (), "forward changes the attribute last"),
    "a counter": (_count, (), "forward changes the attribute count"),
    "chance": (lambda layer, y: y * random.random(), (), "random numbers are drawn"),
    "an object": (lambda layer, y, odd: y * odd.value, (Odd(),), "the argument arg1 is a Odd, an object"),
    "a buffer": (lambda layer, y: y * layer.table.copy_(layer.table + 1), (), "copy_ writes into an input"),
}


@run_on_ranks(2, timeout=TIMEOUT)
def test_what_is_recorded_and_what_is_refused():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        wrong = []
        for name, (body, calls) in RECORDED.items():
            region = _compare(name, body, calls)
            if not region.num_calls["lowered"] or region.refusals:
                wrong.append((name, region.refusals))
        for name, (body, args, said) in REFUSED.items():
            region = _compare(name, body, [(None, args)] * 3)
            if region.tapes or not any(said in one for one in region.refusals):
                wrong.append((name, region.refusals))
        assert not wrong, wrong


def test_mistakes():
    with pytest.raises(
        ValueError, match=r"backend='inductor': it compiles programs of PyTorch; on MindSpore use backend"
    ):
        hp.lower(nn.SequentialCell(nn.Dense(2, 2)), "0", backend="inductor")
    with pytest.raises(
        ValueError, match=r"parallelize: compile='inductor': it compiles programs of PyTorch; on MindSpor"
    ):
        hp.parallelize(nn.SequentialCell(nn.Dense(2, 2)), compile=True)
    why = find_foreign_hook(nn.SequentialCell(OwnGradient()))
    assert why is not None and why.startswith("0 has a bprop of its own")
