"""Random distributed tensors by PyTorch's own functions: the bits of one device under every layout, recompute too."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import checkpoint as torch_checkpoint

import hyper_parallel as hp
from hyper_parallel import Layout, Partial, Replicate, Shard, distribute_tensor, get_platform, manual_seed
from hyper_parallel.core.dtensor.device_mesh import init_device_mesh
from hyper_parallel.core.dtensor.random.random_state import get_rng_state
from tests.core.layout_cases import block_of, every_layout
from tests.world import run_on_ranks

SHAPE = (7, 6)


def alone():
    """The mesh of this rank alone: one device."""
    return init_device_mesh("cpu", (1,), rank_list=[hp.get_platform().get_rank()])


def bits_of(tensor):
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def in_place(fill):
    return lambda mesh, layout, dtype: fill(hp.empty(SHAPE, mesh, layout, dtype=dtype))


def from_ones(function):
    return lambda mesh, layout, dtype: function(hp.ones(SHAPE, mesh, layout, dtype=dtype))


MAKERS = {
    "rand": lambda mesh, layout, dtype: hp.rand(SHAPE, mesh, layout, dtype=dtype),
    "randn": lambda mesh, layout, dtype: hp.randn(SHAPE, mesh, layout, dtype=dtype),
    "normal_": in_place(lambda t: t.normal_(1, 2)),
    "uniform_": in_place(lambda t: t.uniform_(-1, 3)),
    "bernoulli_": in_place(lambda t: t.bernoulli_(0.3)),
    "bernoulli_ of tensors": from_ones(lambda t: torch.empty_like(t).bernoulli_(t * 0.3)),
    "init.normal_": in_place(lambda t: nn.init.normal_(t, std=0.02)),
    "init.uniform_": in_place(lambda t: nn.init.uniform_(t, a=-0.5)),
    "init.trunc_normal_": in_place(lambda t: nn.init.trunc_normal_(t, std=2)),
    "init.xavier_uniform_": in_place(nn.init.xavier_uniform_),
    "init.xavier_normal_": in_place(nn.init.xavier_normal_),
    "init.kaiming_uniform_": in_place(lambda t: nn.init.kaiming_uniform_(t, a=5**0.5)),
    "init.kaiming_normal_": in_place(lambda t: nn.init.kaiming_normal_(t, mode="fan_out")),
    "dropout": from_ones(lambda t: functional.dropout(t, 0.4)),
    "dropout in place": from_ones(lambda t: functional.dropout(t, 0.4, inplace=True)),
    "nn.Dropout": from_ones(nn.Dropout(0.25)),
    "rand_like": from_ones(torch.rand_like),
    "randn_like": from_ones(torch.randn_like),
}


EVERY_DTYPE = ("rand", "randn", "init.kaiming_normal_", "dropout")


@run_on_ranks(4)
@pytest.mark.parametrize("name", list(MAKERS))
def test_the_bits_of_one_device_under_every_layout(name):
    make = MAKERS[name]
    mesh = init_device_mesh("cpu", (2, 2))
    # nn.init.trunc_normal_ draws again what lies outside, with operators that no pending reduction passes.
    reductions = () if name == "init.trunc_normal_" else ("sum",)
    layouts = [Layout.of(mesh, *spec) for spec in every_layout(2, 2, reductions)]
    for dtype in (torch.float32, torch.float64, torch.bfloat16) if name in EVERY_DTYPE else (torch.float32,):
        manual_seed(7)
        expected = make(alone(), None, dtype).full_tensor()
        assert expected.dtype is dtype and expected.unique().numel() > 1
        after = get_rng_state()
        for layout in layouts[:: 1 if name in EVERY_DTYPE else 3]:
            manual_seed(7)
            made = make(mesh, layout, dtype)
            assert get_rng_state() == after
            reduced = made.reduce_partial()
            assert torch.equal(bits_of(reduced.to_local()), bits_of(block_of(expected, reduced.layout))), layout
            assert torch.equal(bits_of(made.full_tensor()), bits_of(expected)), layout


@run_on_ranks(2)
def test_values_are_what_their_names_say():
    mesh = init_device_mesh("cpu", (2,))
    manual_seed(0)
    size = (200, 300)
    placements = [Shard(0)]
    normal = hp.randn(size, mesh, placements).full_tensor()
    assert abs(normal.mean()) < 0.02 and abs(normal.std() - 1) < 0.02
    uniform = hp.rand(size, mesh, placements).full_tensor()
    assert uniform.min() >= 0 and uniform.max() < 1 and abs(uniform.mean() - 0.5) < 0.01
    cut = nn.init.trunc_normal_(hp.empty(size, mesh, placements), a=-1, b=0.5).full_tensor()
    assert cut.min() >= -1 and cut.max() <= 0.5
    bound = (6 / 300) ** 0.5  # of kaiming_uniform_: its fan_in is that of the whole tensor
    kaiming = nn.init.kaiming_uniform_(hp.empty(size, mesh, placements)).full_tensor()
    assert 0.99 * bound < kaiming.abs().max() <= bound
    dropped = functional.dropout(hp.ones(size, mesh, placements), 0.25).full_tensor()
    assert set(dropped.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs((dropped == 0).double().mean() - 0.25) < 0.01


@run_on_ranks(4)
def test_shards_differ_and_replicas_agree():
    mesh = init_device_mesh("cpu", (2, 2))
    manual_seed(3)
    torch.manual_seed(hp.get_platform().get_rank())  # the framework's generators may differ
    blocks = [None] * 4
    hp.get_platform().all_gather_object(blocks, hp.randn((4, 4), mesh, [Shard(0), Replicate()]).to_local())
    assert torch.equal(blocks[0], blocks[1]) and torch.equal(blocks[2], blocks[3])
    assert not torch.equal(blocks[0], blocks[2])
    first, second = (hp.randn((4, 4), mesh, [Shard(0), Shard(1)]).full_tensor() for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(first, hp_randn_again(3, 1))


def hp_randn_again(seed, num_before):
    manual_seed(seed)
    for _ in range(num_before):
        hp.randn((1,), alone())
    return hp.randn((4, 4), alone()).full_tensor()


@run_on_ranks(4)
def test_the_framework_s_generator_changes_nothing():
    mesh, rank = init_device_mesh("cpu", (4,)), hp.get_platform().get_rank()
    manual_seed(5)
    expected = [hp.randn((5,), mesh, [Replicate()]).full_tensor() for _ in range(4)]
    manual_seed(5)
    for number, value in enumerate(expected):
        if rank == 0 or number == 2:  # also when one rank alone seeds it again and again
            torch.manual_seed(0)
        torch.rand(rank)
        assert torch.equal(hp.randn((5,), mesh, [Replicate()]).full_tensor(), value)


@run_on_ranks(2)
def test_dropout_passes_gradients_where_it_passes_values():
    mesh = init_device_mesh("cpu", (2,))
    leaf = hp.ones((9, 5), mesh, [Shard(0)], requires_grad=True)
    result = functional.dropout(leaf, 0.5)
    result.full_tensor().sum().backward()
    assert torch.equal(leaf.grad.full_tensor(), result.full_tensor())
    assert functional.dropout(leaf, 0.5, training=False) is leaf
    pending = distribute_tensor(torch.ones(9, 5), mesh, [Partial()])
    assert set(functional.dropout(pending, 0.5).full_tensor().unique().tolist()) == {0.0, 2.0}
    with pytest.raises(ValueError, match=r"cannot be addressed by global index; seed with hyper_parallel.manual_seed"):
        hp.empty((2,), mesh, [Shard(0)]).normal_(generator=torch.Generator())


# ---------------------------------------------------------------- recompute


def noisy(data, scale):
    """A body with several draws, whose gradient depends on all of them."""
    data = functional.dropout(data * scale, 0.3).tanh()
    data = data * torch.rand_like(data)
    return functional.dropout(data, 0.2) * hp.randn(tuple(data.shape), data.device_mesh, data.placements)


def run_body(call, placements, num_layers=3):
    mesh = init_device_mesh("cpu", (2,))
    manual_seed(11)
    data = distribute_tensor(torch.linspace(-1, 1, 15, dtype=torch.float64).reshape(5, 3), mesh, placements)
    data = (data * 1.0).requires_grad_()
    scales = [torch.tensor(1.0 + layer, dtype=torch.float64, requires_grad=True) for layer in range(num_layers)]
    result = data
    for scale in scales:
        result = call(noisy, result, scale)
        result = functional.dropout(result, 0.1)
    state = get_rng_state()
    result.full_tensor().sum().backward()
    assert get_rng_state() == state  # recompute leaves no trace
    return data.grad.full_tensor(), result.full_tensor().detach()


CHECKPOINTS = {
    "platform": lambda function, *args: get_platform().checkpoint(function, *args),
    "torch": functools.partial(torch_checkpoint.checkpoint, use_reentrant=False),
    "torch, reentrant": functools.partial(torch_checkpoint.checkpoint, use_reentrant=True),
}


@run_on_ranks(2)
@pytest.mark.parametrize("name", list(CHECKPOINTS))
@pytest.mark.parametrize("placements", [[Shard(0)], [Replicate()]], ids=str)
def test_recompute_repeats_its_random_numbers(name, placements):
    torch.manual_seed(hp.get_platform().get_rank())
    expected = run_body(lambda function, *args: function(*args), placements)
    for _ in range(2):  # a second step finds its own draws, not those of the first
        gradient, result = run_body(CHECKPOINTS[name], placements)
        assert torch.equal(result, expected[1])
        torch.testing.assert_close(gradient, expected[0], rtol=1e-12, atol=1e-12)


@run_on_ranks(2)
def test_recompute_in_any_order():
    """Several forwards before the first backward, and backwards in the order of the forwards, as in a pipeline."""
    mesh = init_device_mesh("cpu", (2,))
    manual_seed(1)
    leaves = [hp.ones((5, 4), mesh, [Shard(0)], requires_grad=True) for _ in range(3)]
    results = [
        torch_checkpoint.checkpoint(lambda t: functional.dropout(t * t, 0.5), leaf, use_reentrant=False)
        for leaf in leaves
    ]
    for leaf, result in zip(leaves, results, strict=True):
        result.full_tensor().sum().backward()
        assert torch.equal(leaf.grad.full_tensor(), 2 * result.full_tensor())


@run_on_ranks(2)
def test_recompute_repeats_also_when_the_framework_s_generator_is_seeded_in_between():
    mesh = init_device_mesh("cpu", (2,))
    manual_seed(1)
    leaves = [hp.ones((5, 4), mesh, [Shard(0)], requires_grad=True) for _ in range(2)]
    results = []
    for leaf in leaves:  # both start from the same state of the framework's generator
        torch.manual_seed(0)
        results.append(torch_checkpoint.checkpoint(lambda t: functional.dropout(t * t, 0.5), leaf, use_reentrant=False))
    assert not torch.equal(results[0].full_tensor(), results[1].full_tensor())
    state = get_rng_state()
    for leaf, result in zip(leaves, results, strict=True):
        result.full_tensor().sum().backward()
        assert torch.equal(leaf.grad.full_tensor(), 2 * result.full_tensor())
    assert get_rng_state() == state


@run_on_ranks(2)
def test_a_state_of_the_framework_that_is_put_back_puts_ours_back():
    mesh = init_device_mesh("cpu", (2,))
    saved = torch.get_rng_state()
    first = hp.randn((5,), mesh, [Shard(0)]).full_tensor()
    torch.set_rng_state(saved)
    assert torch.equal(hp.randn((5,), mesh, [Shard(0)]).full_tensor(), first)
    with torch.random.fork_rng():
        inside = hp.randn((5,), mesh, [Shard(0)]).full_tensor()
    assert torch.equal(hp.randn((5,), mesh, [Shard(0)]).full_tensor(), inside)
