"""Trainings as users of MindSpore write them, on cut cells, against the plain cell in one process: tied and frozen
parameters, gradients added up over micro-batches, groups of an optimizer, a checkpoint in the middle, recompute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mindspore import Tensor, nn, ops
from mindspore.experimental import optim

import hyper_parallel as hp
from hyper_parallel import ColwiseParallel, NoParallel, Replicate, RowwiseParallel, Shard
from hyper_parallel import checkpoint as ckpt
from hyper_parallel.platform import get_platform
from tests.tensor_parallel.test_styles_on_mindspore import fill, whole
from tests.world import run_on_ranks

VOCABULARY, WIDTH, HIDDEN = 9, 6, 7  # nothing divides by 2 or 4 but the width
IDS = np.random.RandomState(3).randint(0, VOCABULARY, (6, 4, 5)).astype(np.int32)  # micro-batches


class Net(nn.Cell):
    """The head's weight is the embedding's, the norm's shift is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm((WIDTH,))
        self.up = nn.Dense(WIDTH, HIDDEN)
        self.down = nn.Dense(HIDDEN, WIDTH)
        self.head = nn.Dense(WIDTH, VOCABULARY, has_bias=False)
        self.head.weight = self.embed.embedding_table
        self.norm.beta.requires_grad = False

    def construct(self, ids: Any) -> Any:
        x = self.embed(ids)
        x = x + self.down(ops.gelu(self.up(self.norm(x))))
        return self.head(x)


PLAN = {
    "embed": RowwiseParallel(),
    "norm": NoParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
    "head": ColwiseParallel(output_layouts=Replicate()),
}


def loss_of(net: Any, ids: Any, targets: np.ndarray) -> Any:
    logits = net(ids)
    target = Tensor(targets.reshape(-1))
    if isinstance(logits, hp.DTensor):
        target = hp.distribute_tensor(target, logits.device_mesh, [Shard(0), Replicate()])
    return ops.cross_entropy(logits.reshape(-1, VOCABULARY), target)


def optimizer_of(net: Any, rate: float = 0.05) -> Any:
    parameters = net.trainable_params()
    matrices = [one for one in parameters if len(one.shape) > 1]
    vectors = [one for one in parameters if len(one.shape) == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0, "lr": 2 * rate}]
    return optim.AdamW(groups, lr=rate)


def train(net: Any, optimizer: Any, steps: range, place: Any = Tensor) -> list[float]:
    """Two micro-batches a step, and clipping; the losses."""
    losses = []
    for step in steps:
        for ids in IDS[2 * step : 2 * step + 2]:
            loss = loss_of(net, place(ids), np.roll(ids, -1, 1)) / 2
            hp.backward(loss)
            losses.append(float(loss))
        get_platform().clip_grad_norm_(net.trainable_params(), 0.5)
        optimizer(tuple(hp.grad_of(one) for one in optimizer.parameters))
        hp.zero_grad(net.trainable_params())
    return losses


def assert_same_parameters(net: Any, expected: Any) -> None:
    wanted = get_platform().parameters_dict(expected)
    found = get_platform().parameters_dict(net)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_allclose(whole(found[name]), whole(value), rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.sweep("mindspore")
@run_on_ranks(2, 4, timeout=300)
def test_training_with_a_checkpoint_in_the_middle(tmp_path):
    world = get_platform().get_world_size()
    mesh = hp.init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    expected = fill(Net())
    losses = train(expected, optimizer_of(expected), range(3))

    net = hp.parallelize_module(fill(Net()), mesh, PLAN)
    assert net.head.weight is net.embed.embedding_table and not net.norm.beta.requires_grad
    optimizer = optimizer_of(net)
    np.testing.assert_allclose(train(net, optimizer, range(1)), losses[:2], rtol=1e-4)
    state = dict(zip(("model", "optimizer"), ckpt.get_state_dict(net, optimizer), strict=True))
    ckpt.save(state, checkpoint_id=tmp_path / "one")
    np.testing.assert_allclose(train(net, optimizer, range(1, 3)), losses[2:], rtol=1e-4)
    assert_same_parameters(net, expected)
    np.testing.assert_array_equal(whole(net.norm.beta), whole(fill(Net()).norm.beta))

    other = {"up": ColwiseParallel(), "down": RowwiseParallel()}  # another layout: the table stays whole
    again = hp.parallelize_module(fill(Net(), seed=5), mesh, other)
    optimizer = optimizer_of(again, rate=1.0)
    state = dict(zip(("model", "optimizer"), ckpt.get_state_dict(again, optimizer), strict=True))
    ckpt.load(state, checkpoint_id=tmp_path / "one")
    ckpt.set_state_dict(again, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    np.testing.assert_allclose(train(again, optimizer, range(1, 3)), losses[2:], rtol=1e-4)
    assert_same_parameters(again, expected)


@pytest.mark.sweep("mindspore")
@run_on_ranks(4, timeout=300)
def test_data_and_tensor_parallel():
    mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    cut_dims = {"embed.embedding_table": 0, "up.weight": 0, "up.bias": 0, "down.weight": 1}
    plan = {path: [Replicate(), Shard(dim)] for path, dim in cut_dims.items()} | {"**": [Replicate(), Replicate()]}
    expected = fill(Net())
    losses = train(expected, optimizer_of(expected), range(2))
    net = hp.shard_module(fill(Net()), mesh, hp.ShardingPlan(plan))
    assert net.head.weight is net.embed.embedding_table
    found = train(
        net,
        optimizer_of(net),
        range(2),
        lambda ids: hp.distribute_tensor(Tensor(ids), mesh, [Shard(0), Replicate()]),
    )
    np.testing.assert_allclose(found, losses, rtol=1e-4)
    assert_same_parameters(net, expected)


class Dropping(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Dense(WIDTH, HIDDEN)
        self.drop = nn.Dropout(p=0.4)
        self.down = nn.Dense(HIDDEN, WIDTH)

    def construct(self, x: Any) -> Any:
        return self.down(self.drop(ops.relu(self.up(x))))


@run_on_ranks(2, timeout=300)
def test_dropout_is_the_same_cut_and_whole_with_and_without_recompute():
    results = []
    values = np.random.RandomState(4).randn(8, WIDTH).astype(np.float32)
    alone = hp.init_device_mesh("cpu", (1,), rank_list=[get_platform().get_rank()], mesh_dim_names=("tp",))
    both = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    plan = {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()}
    for mesh, recompute in ((alone, False), (both, False), (both, True)):
        net = hp.parallelize_module(fill(Dropping()), mesh, plan)
        net.set_train()
        hp.manual_seed(7)
        x = Tensor(values)
        out = get_platform().checkpoint(net, x) if recompute else net(x)
        hp.backward((out**2).sum())
        results.append([whole(out), *(whole(hp.grad_of(one)) for one in net.trainable_params())])
    for found in results[1:]:
        for one, other in zip(found, results[0], strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
