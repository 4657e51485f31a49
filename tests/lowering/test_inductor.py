"""Compiled programs: dispatch to 2e-6 relative, with the same collectives in the same order."""

import unittest.mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hyper_parallel as hp
from hyper_parallel.platform.torch.lowering import compiled_programs
from hyper_parallel.platform.torch.private_api import compile_both_passes
from tests.lowering.training import count_of, largest_difference, train, train_on_one_device
from tests.world import run_on_ranks

only_on = "torch"

CASES = [
    ("ours", "tp=2", {"sequence_parallel": False}),
    ("ours", "tp=2", {}),
    ("ours", "dp_shard=2", {}),
    ("llama", "tp=2", {}),
    ("qwen3", "tp=2", {}),
    ("gpt2", "tp=2", {}),
    ("mixtral_without_balance", "tp=2", {}),
    ("gpt2_dropout", "tp=2", {}),
]


class Half(nn.Module):
    """The second half of a block, small enough to compile at every change."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False)

    def forward(self, x):
        return x + self.down(F.silu(self.up(x)))


def _half(backend):
    torch.manual_seed(0)
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = nn.Sequential(Half(), Half(), Half())
    hp.parallelize_module(model, mesh, {"*.up": hp.ColwiseParallel(), "*.down": hp.RowwiseParallel()})
    lowering = hp.lower(model, "*", backend=backend) if backend else None
    seen = []
    with hp.CommRecorder() as recorder:
        for step in range(3):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step), requires_grad=True)
            out = model(x)
            out.square().sum().backward()
            seen += [out.detach(), x.grad, *(one.grad.to_local().clone() for one in model.parameters())]
            model.zero_grad()
    return seen, [(one.op, one.shape) for one in recorder.records], lowering


@run_on_ranks(2, timeout=300)
def test_a_compiled_half_of_a_block():
    want, order, _ = _half(None)
    with unittest.mock.patch.object(compiled_programs, "compile_both_passes", wraps=compile_both_passes) as compiler:
        got, compiled_order, lowering = _half("inductor")
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)
    assert compiled_order == order
    assert not lowering.refusals and count_of(lowering, "lowered") == [2, 2, 2]
    assert compiler.call_count == 2  # the first is given a plain input, the others what the one before has made


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.first(x), self.second(x)


def _uncompiled(program, examples):
    """In place of a compiler: a backward that makes zeros of what never came, as compiled ones do."""

    def run(*tensors):
        given = [one.view_as(one) for one in tensors]
        return tuple(one + 0 * sum(each.sum() for each in given) for one in program(*given))

    return run


@unittest.mock.patch.object(compiled_programs, "compile_both_passes", side_effect=_uncompiled)
def test_what_compiled_code_is_given(compiler):
    """Parameters of an output that nobody uses have no gradients; code for autocast is another one."""
    model = nn.Sequential(Heads())
    hp.lower(model, "0", backend="inductor")
    x = torch.ones(2, 4)
    for _ in range(3):
        model.zero_grad()
        model(x)[1].sum().backward()
        assert model[0].first.weight.grad is None
        assert torch.equal(model[0].second.weight.grad, torch.full((3, 4), 2.0))
    assert compiler.call_count == 1
    with torch.autocast("cpu", torch.bfloat16):
        assert [model(x)[0].dtype for _ in range(3)] == [torch.bfloat16] * 3
    assert compiler.call_count == 2


def _check(name, degrees, options):
    want, _ = train(name, degrees, **options)
    got, lowering = train(name, degrees, backend="inductor", **options)
    assert largest_difference(got, want)[0] <= 2e-6, (name, degrees, options)
    if "dropout" not in name:  # one device draws other numbers
        difference, where = largest_difference(got, train_on_one_device(name))
        assert difference <= 2e-6, (name, degrees, options, where, difference)
    assert all(count_of(lowering, "lowered")) and not lowering.refusals, lowering


@pytest.mark.sweep
@pytest.mark.parametrize("case", range(len(CASES)))
@run_on_ranks(2, timeout=900)
def test_compiled_models(case):
    _check(*CASES[case])


@pytest.mark.sweep
@run_on_ranks(4, timeout=900)
def test_compiled_blocks_that_are_fully_sharded_and_cut():
    _check("ours", "dp_shard=2, tp=2", {})
