"""What a user may write on MindSpore that would train other numbers without a word: it is refused, as on PyTorch."""

from __future__ import annotations

from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops
from mindspore.experimental import optim

import hyper_parallel as hp
from tests.fully_shard.on_mindspore.parity import filled, values
from tests.world import run_on_ranks

CLASSES, ROWS = 5, 8


class Block(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Dense(6, 8), nn.Dense(8, 6)

    def construct(self, x: Any) -> Any:
        return x + self.fc2(ops.tanh(self.fc1(x)))


class Model(nn.Cell):
    """``way`` says what is odd about it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.blocks = nn.CellList([Block() for _ in range(2)])
        self.head = nn.Dense(6, CLASSES)
        self.ignoring, self.squares = nn.CrossEntropyLoss(ignore_index=1), nn.MSELoss()
        self.held = [self.blocks[0].fc1.weight] if way == "held" else []

    def construct(self, x: Any, labels: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        for weight in self.held:
            x = x + ops.matmul(x, weight.T).sum(-1, keepdims=True)
        if self.way == "sibling":
            x = x + ops.dense(x, self.blocks[0].fc1.weight).sum(-1, keepdims=True)
        return self.loss(self.head(x), labels)

    def loss(self, logits: Any, labels: Any) -> Any:
        rows, targets = logits.reshape(-1, CLASSES), labels.reshape(-1)
        if self.way == "shifts":
            return ops.cross_entropy(logits[:, :-1].reshape(-1, CLASSES), labels[:, 1:].reshape(-1))
        if self.way == "weights":
            return ops.cross_entropy(rows, targets, ops.ones(CLASSES, mindspore.float32))
        if self.way == "other ignored":
            return self.ignoring(rows, ops.maximum(targets, Tensor(0, mindspore.int32)))
        if self.way == "two":
            return ops.cross_entropy(rows, targets) + self.squares(rows[:, 0], rows[:, 1])
        if self.way == "divided sum":
            return ops.cross_entropy(rows, targets, reduction="sum") / 10
        return ops.cross_entropy(rows, targets, reduction="sum" if self.way == "sum" else "mean")


def _batch() -> tuple[Tensor, Tensor]:
    random = np.random.RandomState(1)
    labels = random.randint(1, CLASSES, (ROWS, 6)).astype(np.int32)
    labels[1] = labels[4, 2:] = labels[6, 1:] = -100
    return Tensor(random.randn(ROWS, 6, 6).astype(np.float32)), Tensor(labels)


def _step(way: str, degrees: str, **options: Any) -> hp.Parallel:
    run = hp.parallelize(filled(Model(way)), degrees, **options)
    mine = run.mine(range(ROWS))
    x, labels = (one[mine.start : mine.stop] for one in _batch())
    run.loss = run.forward_backward(x, labels=labels)
    return run


def test_losses() -> None:
    for way, said in (
        ("shifts", "cross_entropy as a mean over .* labels are targets .*hp.next_token_loss"),
        ("weights", "by weights of the classes"),
        ("other ignored", "cross_entropy as a mean over"),
        ("two", "MSELoss as a mean over"),
        ("divided sum", "as a sum, .* and of it its loss"),
    ):
        with pytest.raises(ValueError, match=f"Model computed .*{said}"):
            _step(way, "dp_shard=1", microbatches=3)
    for way in ("plain", "sum"):
        alone = filled(Model(way))
        loss = alone(*_batch())
        hp.backward(loss)
        run = _step(way, "dp_shard=1", microbatches=3)
        np.testing.assert_allclose(values(run.loss), values(loss), rtol=1e-5)
        for got, want in zip(run.gradients(), alone.trainable_params(), strict=True):
            np.testing.assert_allclose(values(got), values(hp.grad_of(want)), rtol=1e-4, atol=1e-5)


def test_what_a_cpu_has_no_kernels_for() -> None:
    weights = Model("plain").trainable_params()
    for kind in (mint.optim.SGD, mint.optim.Adam, mint.optim.AdamW):
        with pytest.raises(RuntimeError, match=f"mint.optim.{kind.__name__} does not update parameters on a CPU"):
            kind(weights, lr=0.1)(tuple(weights))
    with pytest.raises(ValueError, match=r"param_dtype=BFloat16: MindSpore has no kernels on a CPU .* use float16"):
        hp.parallelize(Model("plain"), precision="bf16")


@run_on_ranks(2)
def test_parameters() -> None:
    for degrees in ("dp_shard=2", "dp_replicate=2", "tp=2"):
        with pytest.raises(
            RuntimeError, match=r"computes with what was its parameter 'blocks.0.fc1.weight' .*self.layer"
        ):
            _step("held", degrees)
    with pytest.raises(RuntimeError, match=r"the parameter 'blocks.0.fc1.weight', .* over dp_shard"):
        _step("sibling", "dp_shard=2")
    model = filled(Model("plain"))
    model.head.weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(ValueError, match=r"hooks on the gradient of the parameter 'head.weight' .* behind paralleliz"):
        hp.parallelize(model, "dp_shard=2")


@run_on_ranks(2)
def test_optimizers_that_were_made_too_early() -> None:
    for kind in (lambda weights: nn.Momentum(weights, 0.1, 0.9), lambda weights: optim.AdamW(weights, lr=0.1)):
        model = filled(Model("plain"))
        optimizer = kind(model.trainable_params())
        run = hp.parallelize(model, "dp_replicate=2")
        with pytest.raises(RuntimeError, match=r"was made of parameters .* of run.parameters\(\)"):
            optimizer(tuple(run.parameters()))
    with hp.deferred_init():
        model = Model("plain")
    run = hp.parallelize(model, "dp_shard=2")
    optimizer = optim.SGD(run.parameters(), lr=0.1)
    run.materialize(seed=0)
    with pytest.raises(RuntimeError, match="since parallelize or materialize put others in their place"):
        optimizer(tuple(run.parameters()))
