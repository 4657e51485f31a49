"""PyTorch's random functions inside ``draws_by_sample``: plain and distributed, whatever the call looks like."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.functional import dropout as imported_by_name
from torch.utils.checkpoint import checkpoint

import hyper_parallel as hp
from tests.world import run_on_ranks

only_on = "torch"  # PyTorch's functions; MindSpore's: test_draws_by_sample_mindspore.py
SAMPLES = 6
_Q = torch.linspace(-1, 1, SAMPLES * 2 * 5 * 4).reshape(SAMPLES, 2, 5, 4)


def _attention(x, **options):
    heads = x.reshape(len(x), 1, -1, 4)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.4, **options)


def _drop_path(x):
    return x * x.new_empty((len(x), 1, 1)).bernoulli_(0.5)


# Each on a tensor of ones (count, 5, 8).
CALLS = {
    "F.dropout": lambda x: F.dropout(x, 0.5),
    "F.dropout in place": lambda x: F.dropout(x.clone(), 0.5, inplace=True),
    "imported by name": lambda x: imported_by_name(x, 0.5),
    "torch.dropout": lambda x: torch.dropout(x, 0.5, True),
    "nn.Dropout": lambda x: nn.Dropout(0.5)(x),
    "nn.Dropout1d": lambda x: nn.Dropout1d(0.5)(x),
    "nn.Dropout2d": lambda x: nn.Dropout2d(0.5)(x.unsqueeze(-1)),
    "nn.AlphaDropout": lambda x: nn.AlphaDropout(0.5)(x),
    "nn.FeatureAlphaDropout": lambda x: nn.FeatureAlphaDropout(0.5)(x),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "flattened tokens": lambda x: F.dropout(x.reshape(-1, 8), 0.5),
    "bfloat16": lambda x: F.dropout(x.bfloat16(), 0.5),
    "drop path": _drop_path,
    "attention": _attention,
    "causal attention": lambda x: _attention(x, is_causal=True),
    "torch.bernoulli": lambda x: torch.bernoulli(x * 0.5),
    "torch.bernoulli of p": lambda x: torch.bernoulli(x, 0.5),
    "Tensor.bernoulli": lambda x: x.bernoulli(0.5),
    "bernoulli_ of a tensor": lambda x: x.clone().bernoulli_(x * 0.5),
    "rand": lambda x: torch.rand(len(x), 3),
    "rand of a size": lambda x: torch.rand(x.shape, dtype=torch.float64),
    "rand out": lambda x: torch.rand(len(x), 3, out=torch.empty(0)),
    "randn": lambda x: torch.randn(x.shape),
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.bfloat16),
    "randint": lambda x: torch.randint(0, 1000, (len(x), 2)),
    "randint of one bound": lambda x: torch.randint(1000, size=(len(x), 2)),
    "randint_like": lambda x: torch.randint_like(x, 3, 90),
    "normal": lambda x: torch.normal(x, 2.0),
    "normal of a size": lambda x: torch.normal(1.0, 2.0, (len(x), 4)),
    "multinomial": lambda x: torch.multinomial(x[:, 0], 3),
    "multinomial again": lambda x: torch.multinomial(x[:, 0], 9, replacement=True),
    "normal_": lambda x: x.clone().normal_(1.0, 3.0),
    "uniform_": lambda x: x.clone().uniform_(2.0, 3.0),
    "random_": lambda x: x.clone().random_(),
    "exponential_": lambda x: x.clone().exponential_(2.0),
    "geometric_": lambda x: x.clone().geometric_(0.25),
    "cauchy_": lambda x: x.clone().cauchy_(),
    "log_normal_": lambda x: x.clone().log_normal_(),
    "gumbel_softmax": F.gumbel_softmax,
    "multi-head attention": lambda x: _MULTI_HEAD(x, x, x)[0],
}
torch.manual_seed(0)
_MULTI_HEAD = nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True)


def _under(call, parts, step=0):
    outputs = []
    for first, count in parts:
        with hp.draws_by_sample(step=step, rows=hp.SampleRows(first, count, SAMPLES)):
            outputs.append(call(torch.ones(count, 5, 8)))
    return torch.cat(outputs)


@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits_for_every_cut_of_the_batch(name):
    hp.manual_seed(5)
    state, call = torch.get_rng_state(), CALLS[name]
    whole = _under(call, [(0, SAMPLES)])
    for parts in ([(0, 3), (3, 3)], [(0, 2), (2, 2), (4, 2)], [(one, 1) for one in range(SAMPLES)]):
        found = _under(call, parts)
        if "attention" in name:  # matrix products of other sizes
            torch.testing.assert_close(found, whole)
        else:
            assert torch.equal(found, whole), parts
    assert not torch.equal(_under(call, [(0, SAMPLES)], step=1), whole)
    rows = whole.reshape(SAMPLES, -1)
    assert len({tuple(row.tolist()) for row in rows}) > 1
    assert torch.equal(torch.get_rng_state(), state)
    plain = call(torch.ones(SAMPLES, 5, 8))  # PyTorch's own, outside
    assert plain.shape == whole.shape and plain.dtype == whole.dtype
    assert not torch.equal(torch.get_rng_state(), state)
    torch.set_rng_state(state)


@pytest.mark.parametrize(
    "name", ["F.dropout", "nn.Dropout2d", "nn.AlphaDropout", "nn.FeatureAlphaDropout", "torch.bernoulli"]
)
def test_values_are_those_that_pytorch_can_draw(name):
    torch.manual_seed(0)
    want = CALLS[name](torch.ones(200, 5, 8)).unique()
    with hp.draws_by_sample(step=0, rows=(0, 200)):
        found = CALLS[name](torch.ones(200, 5, 8))
    assert len(want) == 2
    torch.testing.assert_close(found.unique(), want)
    assert 0.4 < (found == found.unique()[0]).double().mean() < 0.6


_MOMENTS = {"exponential_": 0.5, "geometric_": 4.0, "uniform_": 2.5, "normal_": 1.0}


@pytest.mark.parametrize("name", _MOMENTS)
def test_means(name):
    with hp.draws_by_sample(step=0, rows=(0, 2000)):
        assert CALLS[name](torch.ones(2000, 5, 8)).mean().item() == pytest.approx(_MOMENTS[name], rel=0.03)


def test_counts_of_multinomial():
    weights = torch.tensor([1.0, 2.0, 0.0, 5.0]).expand(4000, 4)
    with hp.draws_by_sample(step=0, rows=(0, 4000)):
        for chosen in (torch.multinomial(weights, 1), torch.multinomial(weights, 1, replacement=True)):
            shares = torch.bincount(chosen.flatten(), minlength=4) / 4000
            torch.testing.assert_close(shares, torch.tensor([0.125, 0.25, 0.0, 0.625]), atol=0.03, rtol=0)
        assert torch.randperm(50).sort().values.equal(torch.arange(50))


@pytest.mark.parametrize("mask", [None, "causal", "bool", "float"])
def test_attention_drops_weights_of_the_kernel_without_dropout(mask):
    given = {"causal": {"is_causal": True}}.get(mask, {})
    if mask in ("bool", "float"):
        seen = torch.ones(5, 5).tril().bool()
        seen[1] = False  # a query that sees nothing
        given = {"attn_mask": seen if mask == "bool" else torch.where(seen | ~seen.any(-1, keepdim=True), 0.5, -9.0)}
    identity = torch.eye(5).expand(SAMPLES, 2, 5, 5)
    weights = F.scaled_dot_product_attention(_Q, _Q, identity, **given)
    with hp.draws_by_sample(step=0, rows=(0, SAMPLES)):
        found = F.scaled_dot_product_attention(_Q, _Q, identity, dropout_p=0.25, **given)
        keys = _Q[:, :1]
        shared = F.scaled_dot_product_attention(_Q, keys, keys, dropout_p=0.25, enable_gqa=True)
    assert shared.shape == _Q.shape
    dropped = found == 0
    assert 0.1 < dropped[weights != 0].double().mean() < 0.4
    torch.testing.assert_close(found, torch.where(dropped, 0, weights / 0.75))


def test_generators_of_the_caller_and_evaluation_are_left_alone():
    def drawn():
        mine = torch.Generator().manual_seed(4)
        values = torch.rand(3, generator=mine), torch.empty(3).normal_(generator=mine), F.dropout(torch.ones(3), 0.0)
        return torch.cat([*values, F.dropout(torch.ones(3), 0.5, training=False)])

    want = drawn()
    with hp.draws_by_sample(step=0, rows=(0, 3)):
        assert torch.equal(drawn(), want)
        assert torch.rand(3, dtype=torch.complex64, generator=torch.Generator()).is_complex()


def test_tensors_without_samples_are_alike_in_all_micro_batches():
    found = []
    for first, count in ((0, 4), (4, 4), (3, 1)):
        with hp.draws_by_sample(step=0, rows=(first, count)):
            values = [torch.rand(()), torch.rand(1), torch.rand(3)]
            with hp.without_samples():
                values.append(torch.rand(8, 2))
            found.append(torch.cat([one.flatten() for one in values]))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_without_memory():
    with hp.draws_by_sample(step=0, rows=(0, 2)):
        x = torch.ones(2, 3, device="meta", requires_grad=True)
        out = nn.Dropout(0.1)(x)
        assert out.is_meta and torch.rand_like(x).is_meta and torch.rand(2, device="meta").is_meta
        out.sum().backward()
        kept = torch.rand(2, 3)
    with hp.draws_by_sample(step=0, rows=(0, 2)):
        for _ in range(3):
            torch.rand(2, 2)
        assert torch.equal(torch.rand(2, 3), kept)  # draws without memory count
    assert x.grad.is_meta


def test_what_has_no_address_is_told():
    lstm = nn.LSTM(4, 4, num_layers=2, dropout=0.5)
    told = pytest.warns(UserWarning, match="drew from the framework's own generator.*nn.LSTM.*use nn.Dropout")
    with told, hp.draws_by_sample(step=0, rows=(0, 2)):
        lstm(torch.ones(3, 2, 4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with hp.draws_by_sample(step=0, rows=(0, 2)):
            lstm.eval()(torch.ones(3, 2, 4))


class _Block(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.inner, self.drop, self.how = nn.Linear(8, 8).double(), nn.Dropout(0.5), how

    def part(self, x):
        return self.drop(torch.tanh(self.inner(x)))

    def forward(self, x):
        x = self.drop(x)
        x = x + (checkpoint(self.part, x, **self.how) if self.how else self.part(x))
        return x + torch.rand_like(x) * x


class _Model(nn.Module):
    def __init__(self, of_blocks=None, of_parts=None):
        super().__init__()
        torch.manual_seed(1)
        block = _Block(of_parts)
        self.blocks = nn.ModuleList([_Block(of_parts), block, block])  # the last two share one
        self.drop, self.of_blocks = nn.Dropout(0.3), of_blocks
        hp.number_blocks(self.blocks[:2])

    def forward(self, x):
        x = self.drop(x)
        for block in self.blocks:
            x = checkpoint(block, x, **self.of_blocks) if self.of_blocks else block(x)
        return self.drop(x)


def _trained(model, parts):
    x = torch.linspace(-1, 1, SAMPLES * 5 * 8, dtype=torch.float64).reshape(SAMPLES, 5, 8).requires_grad_()
    outputs = []
    for first, count in parts:
        with hp.draws_by_sample(step=2, rows=(first, count)):
            outputs.append(model(x[first : first + count]))
    for output in reversed(outputs):  # as a pipeline does: after other forwards, in another order
        (output * output).sum().backward()
    return [torch.cat(outputs), x.grad, *(one.grad for one in model.parameters())]


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("of", ["of_blocks", "of_parts"])
def test_recomputation_draws_again_after_the_context(of, reentrant):
    hp.manual_seed(5)
    want = _trained(_Model(), [(0, SAMPLES)])
    for parts in ([(0, SAMPLES)], [(0, 3), (3, 3)]):
        found = _trained(_Model(**{of: {"use_reentrant": reentrant}}), parts)
        for one, other in zip(found, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_block_that_fails_does_not_move_the_others():
    model = _Model()
    model.blocks[1].inner = nn.Linear(3, 3)
    with hp.draws_by_sample(step=0, rows=(0, 2)):
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 5, 8).double())
        found = torch.rand(2, 2)
    with hp.draws_by_sample(step=0, rows=(0, 2)):
        with pytest.raises(RuntimeError):
            model(torch.ones(2, 5, 8).double())
        assert torch.equal(torch.rand(2, 2), found)


@run_on_ranks(2)
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_distributed_tensors_have_the_bits_of_plain_ones(dim):
    mesh = hp.init_device_mesh("cpu", (2,))
    for name in (
        *("F.dropout", "nn.Dropout2d", "nn.AlphaDropout", "bfloat16", "flattened tokens", "torch.bernoulli"),
        *("torch.bernoulli of p", "bernoulli_ of a tensor", "rand_like", "normal_", "uniform_", "exponential_"),
        *("attention", "multinomial", "drop path"),
    ):

        def call(place, name=name):
            with hp.implicit_replication(), hp.draws_by_sample(step=0, rows=(6, SAMPLES)):
                first = CALLS[name](place(torch.ones(SAMPLES, 5, 8)))
                return first, F.dropout(place(torch.ones(SAMPLES, 5, 8)))  # of the same number

        want = call(lambda x: x)
        got = call(lambda x: hp.distribute_tensor(x, mesh, [hp.Shard(dim)]))
        for one, other in zip(got, want, strict=True):
            one = one.full_tensor() if isinstance(one, hp.DTensor) else one
            if name == "attention":
                torch.testing.assert_close(one, other)
            else:
                assert torch.equal(one, other), name
