"""MindSpore's random functions inside ``draws_by_sample``: plain and distributed, and the bits that PyTorch gets."""

from __future__ import annotations

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import hyper_parallel as hp
from hyper_parallel.core.dtensor.random.draw import Draw
from hyper_parallel.core.dtensor.random.random_stream import GlobalRegion
from hyper_parallel.core.dtensor.random.random_values import bernoulli
from hyper_parallel.core.dtensor.random.sample_address import derived_seed
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.gradients import backward, grad_of, zero_grad
from tests.world import run_on_ranks

only_on = "mindspore"  # MindSpore's functions; PyTorch's: test_draws_by_sample_torch.py
SAMPLES = 6


def _ones(count):
    return Tensor(np.ones((count, 5, 8), np.float32))


# Each on a tensor of ones (count, 5, 8).
CALLS = {
    "nn.Dropout": lambda x: nn.Dropout(p=0.5).set_train()(x),
    "ops.dropout": lambda x: ops.dropout(x, 0.5),
    "nn.Dropout2d": lambda x: nn.Dropout2d(0.5).set_train()(x.unsqueeze(-1)),
    "float16": lambda x: ops.dropout(x.astype(mindspore.float16), 0.5),
    "flattened tokens": lambda x: ops.dropout(x.reshape(-1, 8), 0.5),
    "rand": lambda x: ops.rand(len(x), 3),
    "randn": lambda x: ops.randn((len(x), 3)),
    "rand_like": lambda x: ops.rand_like(x),
    "randn_like": lambda x: ops.randn_like(x),
    "randint": lambda x: ops.randint(0, 1000, (len(x), 2)),
    "standard_normal": lambda x: ops.standard_normal((len(x), 2)),
    "uniform": lambda x: ops.uniform((len(x), 2), Tensor(2.0), Tensor(3.0)),
    "bernoulli": lambda x: ops.bernoulli(x, 0.5),
    "bernoulli of a tensor": lambda x: ops.bernoulli(x, x * 0.5),
}


def _under(call, parts, step=0):
    outputs = []
    for first, count in parts:
        with hp.draws_by_sample(step=step, rows=(first, count)):
            outputs.append(call(_ones(count)).asnumpy())
    return np.concatenate(outputs)


@pytest.mark.parametrize("name", CALLS)
def test_the_same_bits_for_every_cut_of_the_batch(name):
    hp.manual_seed(5)
    whole = _under(CALLS[name], [(0, SAMPLES)])
    for parts in ([(0, 3), (3, 3)], [(0, 2), (2, 2), (4, 2)], [(one, 1) for one in range(SAMPLES)]):
        assert np.array_equal(_under(CALLS[name], parts), whole), parts
    assert not np.array_equal(_under(CALLS[name], [(0, SAMPLES)], step=1), whole)
    plain = CALLS[name](_ones(SAMPLES)).asnumpy()  # MindSpore's own, outside
    assert plain.shape == whole.shape and plain.dtype == whole.dtype


def test_dropout_is_by_address():
    hp.manual_seed(5)
    seed = derived_seed(5, 0, 3, 0, 0, False)  # of what is drawn before the first block in step 3
    want = bernoulli(Draw(seed, 0, hp.SampleRows(2, 4)), GlobalRegion((4, 5, 8)), 0.5) * np.float32(2)
    assert np.array_equal(_under(CALLS["ops.dropout"], [(2, 4)], step=3), want)


class _Block(nn.Cell):
    def __init__(self):
        super().__init__()
        self.inner, self.drop = nn.Dense(8, 8, weight_init="normal"), nn.Dropout(p=0.5)

    def construct(self, x):
        return x + self.drop(ops.tanh(self.inner(x))) + ops.dropout(x, 0.25)


class _Model(nn.Cell):
    def __init__(self):
        super().__init__()
        self.blocks, self.drop = nn.CellList([_Block(), _Block()]), nn.Dropout(p=0.3)
        hp.number_blocks(self.blocks)

    def construct(self, x, recompute=False):
        x = self.drop(x)
        for block in self.blocks:
            x = get_platform().checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        return self.drop(x)


def test_gradients_of_micro_batches_with_and_without_recomputation():
    hp.manual_seed(5)
    model = _Model().set_train()

    def gradients(parts, recompute=False):
        losses = []
        for first, count in parts:
            with hp.draws_by_sample(step=2, rows=(first, count)):
                losses.append((model(_ones(count), recompute) ** 2).sum())
        for loss in losses:
            backward(loss)
        found = [grad_of(one).asnumpy().copy() for one in model.trainable_params()]
        zero_grad(model.trainable_params())
        return found

    want = gradients([(0, SAMPLES)])
    for parts, recompute in (([(0, 3), (3, 3)], False), ([(0, SAMPLES)], True), ([(0, 2), (2, 4)], True)):
        for one, other in zip(gradients(parts, recompute), want, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@run_on_ranks(2)
def test_distributed_tensors_have_the_bits_of_plain_ones():
    mesh = hp.init_device_mesh("cpu", (2,))
    for dim in range(3):
        for name in ("nn.Dropout", "ops.dropout", "flattened tokens"):
            with hp.draws_by_sample(step=0, rows=(6, SAMPLES)):
                want = CALLS[name](_ones(SAMPLES)).asnumpy()
            with hp.draws_by_sample(step=0, rows=(6, SAMPLES)):
                got = CALLS[name](hp.distribute_tensor(_ones(SAMPLES), mesh, [hp.Shard(dim)])).full_tensor().asnumpy()
            assert np.array_equal(got, want), (dim, name)
