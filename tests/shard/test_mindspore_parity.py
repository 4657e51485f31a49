"""One small transformer, the same weights and data, on PyTorch and on MindSpore, whole and cut over ranks: the losses
of 10 steps of AdamW are equal, also when the other framework makes the second half from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mindspore.mint.nn.functional as F
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.experimental import optim

import hyper_parallel as hp
from hyper_parallel import checkpoint as ckpt
from tests.shard.small_transformer import (
    BATCH,
    CUTS,
    HEADS,
    LENGTH,
    RATE,
    STEPS,
    VOCABULARY,
    WIDTH,
    arrays,
    train_on_torch,
)
from tests.world.world import Worlds

TIMEOUT = 300.0


def train_on_mindspore(cut: str | None, steps: int, load: Path | None = None, save: Path | None = None) -> list[float]:
    """As ``train_on_torch``."""
    values, tokens, targets = arrays(seed=0 if load is None else 1)
    mesh = hp.init_device_mesh("cpu", (hp.get_platform().get_world_size(),), mesh_dim_names=("tp",))

    def placed(array: np.ndarray, placement: Any) -> Any:
        return Tensor(array) if cut is None else hp.distribute_tensor(Tensor(array), mesh, [placement])

    model, model.layer = nn.Cell(), nn.Cell()
    for name, value in values.items():
        owner, _, own_name = name.rpartition(".")
        placement = hp.Shard(CUTS[cut][name]) if cut else None
        setattr(model.layer if owner else model, own_name, Parameter(placed(value, placement), name=name))
    layer = model.layer
    ids, wanted = placed(tokens, hp.Replicate()), placed(targets, hp.Replicate())
    weights = model.trainable_params()
    optimizer = optim.AdamW(weights, lr=RATE if load is None else 1.0, weight_decay=0.01)

    def loss_of() -> Any:
        hidden = ops.gather(model.table, ids, 0)
        parts = [F.linear(hidden, weight) for weight in (layer.query, layer.key, layer.value)]
        q, k, v = (ops.transpose(part.reshape(BATCH, LENGTH, HEADS, -1), (0, 2, 1, 3)) for part in parts)
        scores = ops.softmax(mint.matmul(q, ops.transpose(k, (0, 1, 3, 2))) * (WIDTH / HEADS) ** -0.5, -1)
        attended = ops.transpose(mint.matmul(scores, v), (0, 2, 1, 3)).reshape(BATCH, LENGTH, WIDTH)
        hidden = hidden + F.linear(attended, layer.out)
        hidden = hidden + F.linear(ops.silu(F.linear(hidden, layer.up)), layer.down)
        return ops.cross_entropy(F.linear(hidden, model.head).reshape(BATCH * LENGTH, VOCABULARY), wanted)

    if load is not None:
        state = dict(zip(("model", "optimizer"), ckpt.get_state_dict(model, optimizer), strict=True))
        ckpt.load(state, checkpoint_id=load)
        ckpt.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    step = hp.value_and_grad(loss_of, weights)
    losses = []
    for _ in range(steps):
        loss, gradients = step()
        optimizer(gradients)
        losses.append(float(loss))
    if save is not None:
        state = dict(zip(("model", "optimizer"), ckpt.get_state_dict(model, optimizer), strict=True))
        ckpt.save(state, checkpoint_id=save)
    return losses


@pytest.fixture(scope="module")
def torch_worlds() -> Iterator[Worlds]:
    worlds = Worlds("torch")
    yield worlds
    worlds.close()


@pytest.fixture(scope="module")
def expected(torch_worlds: Worlds) -> list[float]:
    """The losses on PyTorch, whole on one process."""
    losses = torch_worlds(2, TIMEOUT).run(train_on_torch, None, STEPS)[0]
    assert losses[-1] < 0.9 * losses[0]
    return losses


def _assert_equal(by_rank: list[list[float]], expected: list[float]) -> None:
    for losses in by_rank:
        np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-5)


def test_losses_equal_those_of_torch_on_one_process(worlds, torch_worlds, expected):
    _assert_equal(torch_worlds(2, TIMEOUT).run(train_on_torch, "tensor parallel", STEPS), expected)
    _assert_equal(worlds(2, TIMEOUT).run(train_on_mindspore, None, STEPS), expected)
    for world_size in (2, 4):
        _assert_equal(worlds(world_size, TIMEOUT).run(train_on_mindspore, "tensor parallel", STEPS), expected)


def test_mindspore_goes_on_from_a_checkpoint_of_torch(worlds, torch_worlds, expected, tmp_path):
    half, rest = tmp_path / "half", STEPS // 2
    _assert_equal(torch_worlds(2, TIMEOUT).run(train_on_torch, "tensor parallel", rest, save=half), expected[:rest])
    for world_size, cut in ((4, "tensor parallel"), (4, "columns"), (2, None)):
        _assert_equal(worlds(world_size, TIMEOUT).run(train_on_mindspore, cut, rest, load=half), expected[rest:])


def test_torch_goes_on_from_a_checkpoint_of_mindspore(worlds, torch_worlds, expected, tmp_path):
    half, rest = tmp_path / "half", STEPS // 2
    _assert_equal(worlds(4, TIMEOUT).run(train_on_mindspore, "tensor parallel", rest, save=half), expected[:rest])
    for cut in ("tensor parallel", "rows", None):
        _assert_equal(torch_worlds(2, TIMEOUT).run(train_on_torch, cut, rest, load=half), expected[rest:])
