"""Random distributed tensors: the bits of the definition, hence the same on every framework, under every layout.

What the bits are is computed here by numpy (``random_values``) for the whole tensor in one process.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import hyper_parallel as hp
from hyper_parallel import Layout, Partial, Replicate, Shard, get_platform, manual_seed
from hyper_parallel.core.dtensor.device_mesh import init_device_mesh
from hyper_parallel.core.dtensor.random import random_values
from hyper_parallel.core.dtensor.random.draw import Draw
from hyper_parallel.core.dtensor.random.random_state import get_rng_state
from hyper_parallel.core.dtensor.random.random_stream import GlobalRegion
from tests.core.layout_cases import block_of, every_layout
from tests.frameworks import (
    assert_close,
    backward,
    dist,
    distribute_tensor,
    equal,
    on_mindspore,
    ours,
    same_bits,
    theirs,
)
from tests.frameworks.models import dropout as dropout_module
from tests.frameworks.models import set_training
from tests.world import run_on_ranks

SHAPE, SEED = (7, 6), 7
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def dropout(tensor, p):
    """The framework's function."""
    if on_mindspore:
        from mindspore import ops

        return ops.dropout(tensor, p)
    return torch.nn.functional.dropout(tensor, p)


def defined(kind, dtype, *parameters):
    """The whole tensor of the first draw."""
    name = str(dtype).removeprefix("torch.")
    values = getattr(random_values, kind)(
        Draw(SEED, 0), GlobalRegion(SHAPE), *parameters, **({} if kind == "bernoulli" else {"dtype": name})
    )
    return torch.from_numpy(np.asarray(values)).to(dtype)


def empty(mesh, layout, dtype):
    return hp.empty(SHAPE, mesh, layout, dtype=ours(dtype))


def ones(mesh, layout, dtype):
    return hp.ones(SHAPE, mesh, layout, dtype=ours(dtype))


# name: (what the library makes, what one process computes)
MAKERS = {
    "rand": (lambda *where: hp.rand(SHAPE, *where[:2], dtype=ours(where[2])), lambda dtype: defined("uniform", dtype)),
    "randn": (lambda *where: hp.randn(SHAPE, *where[:2], dtype=ours(where[2])), lambda dtype: defined("normal", dtype)),
    "normal_": (lambda *where: empty(*where).normal_(1, 2), lambda dtype: defined("normal", dtype, 1.0, 2.0)),
    "uniform_": (lambda *where: empty(*where).uniform_(-1, 3), lambda dtype: defined("uniform", dtype, -1.0, 3.0)),
    "bernoulli_": (lambda *where: empty(*where).bernoulli_(0.3), lambda dtype: defined("bernoulli", dtype, 0.3)),
    "dropout": (lambda *where: dropout(ones(*where), 0.4), lambda dtype: defined("bernoulli", dtype, 0.6) * (1 / 0.6)),
    "the module of dropout": (
        lambda *where: set_training(dropout_module(0.25))(ones(*where)),
        lambda dtype: defined("bernoulli", dtype, 0.75) * (1 / 0.75),
    ),
}


@run_on_ranks(4)
@pytest.mark.parametrize("name", list(MAKERS))
def test_the_bits_of_the_definition_under_every_layout(name):
    make, define = MAKERS[name]
    mesh = init_device_mesh("cpu", (2, 2))
    layouts = [Layout.of(mesh, *spec) for spec in every_layout(2, 2)]
    for dtype in DTYPES:
        expected = define(dtype)
        assert expected.dtype is dtype and expected.unique().numel() > 1
        for layout in layouts[:: 2 if dtype is torch.float32 else 5]:
            manual_seed(SEED)
            made = make(mesh, layout, dtype)
            assert get_rng_state() == (SEED, 1)
            reduced = made.reduce_partial()
            assert same_bits(reduced.to_local(), block_of(expected, reduced.layout)), (dtype, layout)
            assert same_bits(made.full_tensor(), expected), (dtype, layout)


@run_on_ranks(4)
def test_shards_differ_replicas_agree_and_draws_go_on():
    mesh = init_device_mesh("cpu", (2, 2))
    manual_seed(3)
    blocks = [None] * 4
    dist.all_gather_object(blocks, theirs(hp.randn((4, 4), mesh, [Shard(0), Replicate()]).to_local()))
    assert torch.equal(blocks[0], blocks[1]) and torch.equal(blocks[2], blocks[3])
    assert not torch.equal(blocks[0], blocks[2])
    first, second = (hp.randn((4, 4), mesh, [Shard(0), Shard(1)]).full_tensor() for _ in range(2))
    assert not equal(first, second)
    for number, value in ((1, first), (2, second)):
        whole = random_values.normal(Draw(3, number), GlobalRegion((4, 4)))
        assert equal(value, torch.from_numpy(whole))


@run_on_ranks(2)
def test_dropout_passes_gradients_where_it_passes_values():
    mesh = init_device_mesh("cpu", (2,))
    leaf = hp.ones((9, 5), mesh, [Shard(0)], requires_grad=True)
    result = dropout(leaf, 0.5)
    backward(result.full_tensor().sum())
    assert equal(leaf.grad.full_tensor(), result.full_tensor())
    assert set_training(dropout_module(0.5), False)(leaf) is leaf
    pending = distribute_tensor(torch.ones(9, 5), mesh, [Partial()])
    assert set(theirs(dropout(pending, 0.5).full_tensor()).unique().tolist()) == {0.0, 2.0}


# ---------------------------------------------------------------- recompute


def noisy(data, scale):
    """A body with several draws, whose gradient depends on all of them."""
    data = dropout(data * scale, 0.3).tanh()
    return dropout(data, 0.2) * hp.randn(tuple(data.shape), data.device_mesh, data.placements, dtype=data.dtype)


def run_body(call, placements, num_layers=3):
    mesh = init_device_mesh("cpu", (2,))
    manual_seed(11)
    data = distribute_tensor(torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(5, 3), mesh, placements)
    data.requires_grad_()
    result = data
    for layer in range(num_layers):
        result = call(noisy, result, 1.0 + layer)
        result = dropout(result, 0.1)
    state = get_rng_state()
    backward(result.full_tensor().sum())
    assert get_rng_state() == state  # recompute leaves no trace
    return theirs(data.grad.full_tensor()), theirs(result.full_tensor())


@run_on_ranks(2)
@pytest.mark.parametrize("placements", [[Shard(0)], [Replicate()]], ids=str)
def test_recompute_repeats_its_random_numbers(placements):
    expected = run_body(lambda function, *args: function(*args), placements)
    for _ in range(2):  # a second step finds its own draws, not those of the first
        gradient, result = run_body(get_platform().checkpoint, placements)
        assert torch.equal(result, expected[1])
        assert_close(gradient, expected[0], rtol=1e-12, atol=1e-12)


@run_on_ranks(2)
def test_recompute_in_any_order():
    """Several forwards before the first backward, and backwards in the order of the forwards, as in a pipeline."""
    mesh = init_device_mesh("cpu", (2,))
    manual_seed(1)
    leaves = [hp.ones((5, 4), mesh, [Shard(0)], requires_grad=True) for _ in range(3)]
    results = [get_platform().checkpoint(lambda t: dropout(t * t, 0.5), leaf) for leaf in leaves]
    for leaf, result in zip(leaves, results, strict=True):
        backward(result.full_tensor().sum())
        assert equal(leaf.grad.full_tensor(), theirs(result.full_tensor()) * 2)
