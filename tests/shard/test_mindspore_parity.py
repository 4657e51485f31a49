"""One small transformer, the same weights and data, on PyTorch and on MindSpore, whole and cut over ranks: the losses
are equal step by step, also when the other framework makes the second half from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mindspore.mint.nn.functional as F
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.experimental import optim

import hyper_parallel as hp
from tests.shard.small_transformer import (
    BATCH,
    HEADS,
    LENGTH,
    OPTIMIZERS,
    STEPS,
    VOCABULARY,
    WIDTH,
    Run,
    Training,
    train_on_torch,
)
from tests.world.world import Worlds

TIMEOUT = 300.0
HALF = STEPS // 2


def train_on_mindspore(runs: list[Run]) -> list[list[float]]:
    """As ``train_on_torch``."""
    return [_train_on_mindspore(run) for run in runs]


def _train_on_mindspore(run: Run) -> list[float]:
    training = Training(run, Tensor)
    model, model.layer = nn.Cell(), nn.Cell()
    for name, value in training.weights.items():
        owner, _, own_name = name.rpartition(".")
        setattr(model.layer if owner else model, own_name, Parameter(value, name=name))
    layer, weights = model.layer, model.trainable_params()
    optimizer = getattr(optim, run.optimizer)(weights, **training.options)

    def loss_of() -> Any:
        hidden = training.between(ops.gather(model.table, training.tokens, 0))
        parts = [F.linear(hidden, weight) for weight in (layer.query, layer.key, layer.value)]
        q, k, v = (ops.transpose(part.reshape(BATCH, LENGTH, HEADS, -1), (0, 2, 1, 3)) for part in parts)
        scores = ops.softmax(mint.matmul(q, ops.transpose(k, (0, 1, 3, 2))) * (WIDTH / HEADS) ** -0.5, -1)
        attended = ops.transpose(mint.matmul(scores, v), (0, 2, 1, 3)).reshape(BATCH, LENGTH, WIDTH)
        hidden = hidden + training.between(F.linear(attended, layer.out))
        hidden = hidden + training.between(F.linear(ops.silu(F.linear(hidden, layer.up)), layer.down))
        logits = F.linear(hidden, model.head).reshape(BATCH * LENGTH, VOCABULARY)
        return ops.cross_entropy(logits, training.targets)

    value_and_grad = hp.value_and_grad(loss_of, weights)

    def step() -> float:
        loss, gradients = value_and_grad()
        optimizer(gradients)
        return float(loss)

    return training.losses(model, optimizer, step)


@pytest.fixture(scope="module")
def torch_worlds() -> Iterator[Worlds]:
    worlds = Worlds("torch")
    yield worlds
    worlds.close()


@pytest.fixture(scope="module")
def expected(torch_worlds: Worlds) -> dict[str, list[float]]:
    """The losses on PyTorch, whole on one process, by optimizer."""
    runs = [Run(None, optimizer=name) for name in OPTIMIZERS]
    found = dict(zip(OPTIMIZERS, torch_worlds(2, TIMEOUT).run(train_on_torch, runs)[0], strict=True))
    for losses in found.values():  # far apart, step by step and from each other
        assert losses[-1] < 0.9 * losses[0] and min(abs(np.diff(losses))) > 1e-3
    assert abs(found["AdamW"][-1] - found["Adam"][-1]) > 1e-3
    return found


def _assert_equal(by_rank: list[list[list[float]]], runs: list[Run], expected: dict[str, list[float]]) -> None:
    """Each run's losses, on every rank, are those of the first or, after loading, of the last steps."""
    for found in by_rank:
        for losses, run in zip(found, runs, strict=True):
            wanted = expected[run.optimizer][HALF if run.load else 0 :][: run.steps]
            np.testing.assert_allclose(losses, wanted, rtol=0, atol=1e-5, err_msg=str(run))


@pytest.mark.sweep("mindspore")
def test_losses_equal_those_of_torch_on_one_process(worlds, torch_worlds, expected):
    runs = [Run("tensor parallel", optimizer=name) for name in OPTIMIZERS]
    _assert_equal(torch_worlds(2, TIMEOUT).run(train_on_torch, runs), runs, expected)
    runs.append(Run(None))
    _assert_equal(worlds(2, TIMEOUT).run(train_on_mindspore, runs), runs, expected)
    runs = [Run("sequence parallel", HALF), Run("data and tensor", HALF)]
    runs += [Run("tensor parallel")] if worlds.sweep else []
    _assert_equal(worlds(4, TIMEOUT).run(train_on_mindspore, runs), runs, expected)


@pytest.mark.sweep("mindspore")
def test_mindspore_goes_on_from_a_checkpoint_of_torch(worlds, torch_worlds, expected, tmp_path):
    runs = [Run("tensor parallel", HALF, name, save=tmp_path / name) for name in OPTIMIZERS]
    _assert_equal(torch_worlds(2, TIMEOUT).run(train_on_torch, runs), runs, expected)
    runs = [Run(cut, HALF, load=tmp_path / "AdamW") for cut in ("tensor parallel", "rows and columns")]
    _assert_equal(worlds(4, TIMEOUT).run(train_on_mindspore, runs), runs, expected)
    runs = [Run("columns", HALF, name, load=tmp_path / name) for name in ("Adam", "SGD")]
    runs.append(Run(None, HALF, load=tmp_path / "AdamW"))
    _assert_equal(worlds(2, TIMEOUT).run(train_on_mindspore, runs), runs, expected)


@pytest.mark.sweep("mindspore")
def test_torch_goes_on_from_a_checkpoint_of_mindspore(worlds, torch_worlds, expected, tmp_path):
    """That of AdamW is written in the background while training goes on."""
    runs = [Run("data and tensor", HALF, save=tmp_path / "AdamW", in_background=True)]
    _assert_equal(worlds(4, TIMEOUT).run(train_on_mindspore, runs), runs, expected)
    runs = [Run("tensor parallel", HALF, name, save=tmp_path / name) for name in ("Adam", "SGD")]
    _assert_equal(worlds(2, TIMEOUT).run(train_on_mindspore, runs), runs, expected)
    runs = [Run(cut, HALF, load=tmp_path / "AdamW") for cut in ("tensor parallel", "rows", None)]
    runs += [Run("columns", HALF, name, load=tmp_path / name) for name in ("Adam", "SGD")]
    _assert_equal(torch_worlds(2, TIMEOUT).run(train_on_torch, runs), runs, expected)
