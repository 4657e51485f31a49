"""One small transformer, the same weights and data, on PyTorch in one process and on MindSpore, whole and cut over
ranks: the losses of 10 steps of AdamW are equal."""

from __future__ import annotations

import importlib
from typing import Any

import mindspore.mint.nn.functional as F
import numpy as np
from mindspore import Parameter, Tensor, mint, ops
from mindspore.experimental import optim

import hyper_parallel as hp
from tests.world import run_on_ranks

VOCABULARY, LENGTH, WIDTH, HEADS, BATCH, STEPS, RATE = 16, 6, 8, 4, 4, 10, 0.01
SHAPES = {
    "table": (VOCABULARY, WIDTH),
    "query": (WIDTH, WIDTH),
    "key": (WIDTH, WIDTH),
    "value": (WIDTH, WIDTH),
    "out": (WIDTH, WIDTH),
    "up": (4 * WIDTH, WIDTH),
    "down": (WIDTH, 4 * WIDTH),
    "head": (VOCABULARY, WIDTH),
}
# How tensor parallelism cuts them: rows of what comes first in a pair, columns of what comes second.
CUTS = {"table": 0, "query": 0, "key": 0, "value": 0, "out": 1, "up": 0, "down": 1, "head": 0}


def arrays() -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    random = np.random.RandomState(0)
    weights = {name: (random.randn(*shape) * 0.3).astype(np.float32) for name, shape in SHAPES.items()}
    tokens = random.randint(0, VOCABULARY, (BATCH, LENGTH)).astype(np.int32)
    return weights, tokens, np.roll(tokens, -1, 1).reshape(-1)


def losses_on_torch() -> list[float]:
    torch = importlib.import_module("torch")
    functional = torch.nn.functional
    values, tokens, targets = arrays()
    w = {name: torch.nn.Parameter(torch.from_numpy(value.copy())) for name, value in values.items()}
    optimizer = torch.optim.AdamW(w.values(), lr=RATE, weight_decay=0.01)
    ids, wanted = torch.from_numpy(tokens).long(), torch.from_numpy(targets).long()
    losses = []
    for _ in range(STEPS):
        hidden = functional.embedding(ids, w["table"])
        parts = [functional.linear(hidden, w[name]) for name in ("query", "key", "value")]
        q, k, v = (part.reshape(BATCH, LENGTH, HEADS, -1).permute(0, 2, 1, 3) for part in parts)
        scores = functional.softmax(q @ k.permute(0, 1, 3, 2) * (WIDTH / HEADS) ** -0.5, -1)
        attended = (scores @ v).permute(0, 2, 1, 3).reshape(BATCH, LENGTH, WIDTH)
        hidden = hidden + functional.linear(attended, w["out"])
        hidden = hidden + functional.linear(functional.silu(functional.linear(hidden, w["up"])), w["down"])
        logits = functional.linear(hidden, w["head"]).reshape(BATCH * LENGTH, VOCABULARY)
        loss = functional.cross_entropy(logits, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def losses_on_mindspore(mesh: Any = None) -> list[float]:
    """Whole on this process, or cut over the mesh."""
    values, tokens, targets = arrays()

    def whole(array: np.ndarray) -> Any:
        return Tensor(array) if mesh is None else hp.distribute_tensor(Tensor(array), mesh, [hp.Replicate()])

    def weight(name: str) -> Parameter:
        tensor = Tensor(values[name])
        if mesh is not None:
            tensor = hp.distribute_tensor(tensor, mesh, [hp.Shard(CUTS[name])])
        return Parameter(tensor, name=name)

    w = {name: weight(name) for name in SHAPES}
    ids, wanted = whole(tokens), whole(targets)

    def loss_of() -> Any:
        hidden = ops.gather(w["table"], ids, 0)
        parts = [F.linear(hidden, w[name]) for name in ("query", "key", "value")]
        q, k, v = (ops.transpose(part.reshape(BATCH, LENGTH, HEADS, -1), (0, 2, 1, 3)) for part in parts)
        scores = ops.softmax(mint.matmul(q, ops.transpose(k, (0, 1, 3, 2))) * (WIDTH / HEADS) ** -0.5, -1)
        attended = ops.transpose(mint.matmul(scores, v), (0, 2, 1, 3)).reshape(BATCH, LENGTH, WIDTH)
        hidden = hidden + F.linear(attended, w["out"])
        hidden = hidden + F.linear(ops.silu(F.linear(hidden, w["up"])), w["down"])
        return ops.cross_entropy(F.linear(hidden, w["head"]).reshape(BATCH * LENGTH, VOCABULARY), wanted)

    weights = list(w.values())
    optimizer = optim.AdamW(weights, lr=RATE, weight_decay=0.01)
    step = hp.value_and_grad(loss_of, weights)
    losses = []
    for _ in range(STEPS):
        loss, gradients = step()
        optimizer(gradients)
        losses.append(float(loss))
    return losses


@run_on_ranks(2, timeout=300)
def test_losses_equal_those_of_torch_and_of_one_process():
    expected = losses_on_torch()
    assert expected[-1] < 0.9 * expected[0]
    np.testing.assert_allclose(losses_on_mindspore(), expected, atol=1e-5)
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    np.testing.assert_allclose(losses_on_mindspore(mesh), expected, atol=1e-5)
