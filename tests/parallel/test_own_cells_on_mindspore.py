"""Cells of a user's own, of MindSpore's layers, in odd sizes: every layout trains as the plain cell does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.fully_shard.on_mindspore.parity import AdamW, filled, values
from tests.world import run_on_ranks, small_or_sweep

VOCABULARY, WIDTH, HEADS, ROWS, LENGTH = 11, 15, 3, 7, 5


class Attention(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o_proj = nn.Dense(WIDTH, 3 * WIDTH), mint.nn.Linear(WIDTH, WIDTH)

    def construct(self, x: Any) -> Any:
        rows, length, width = x.shape
        parts = mint.chunk(self.qkv(x), 3, -1)
        query, key, value = (one.reshape(rows, length, HEADS, -1).transpose(0, 2, 1, 3) for one in parts)
        hidden = ops.triu(ops.ones((length, length), mindspore.float32), 1) * -1e9
        weights = ops.softmax(ops.matmul(query, key.transpose(0, 1, 3, 2)) + hidden, -1)
        return self.o_proj(ops.matmul(weights, value).transpose(0, 2, 1, 3).reshape(rows, length, width))


class Block(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm((WIDTH,)), nn.LayerNorm((WIDTH,))
        self.attention = Attention()
        self.fc1, self.fc2 = nn.Dense(WIDTH, 7), nn.Dense(7, WIDTH)

    def construct(self, x: Any) -> Any:
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(ops.gelu(self.fc1(self.norm2(x))))


class Decoder(nn.Cell):
    """Its loss is the mean over its labels."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.CellList([Block() for _ in range(3)])
        self.norm = nn.LayerNorm((WIDTH,))
        self.head = nn.Dense(WIDTH, VOCABULARY, has_bias=False)

    def construct(self, ids: Any, labels: Any = None) -> Any:
        x = self.words(ids) + self.places(ops.arange(ids.shape[1]).astype(mindspore.int32))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return logits if labels is None else ops.cross_entropy(logits.reshape(-1, VOCABULARY), labels.reshape(-1))


class Pictures(nn.Cell):
    """Convolutions, in which no pair of layers can be told: for all but tp."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 5, 3, pad_mode="pad", padding=1, has_bias=True)
        self.second, self.last = nn.Conv2d(5, 7, 3), nn.Dense(7, VOCABULARY)

    def construct(self, pixels: Any, labels: Any = None) -> Any:
        seen = ops.relu(self.second(ops.relu(self.first(pixels)))).mean((2, 3))
        return self.last(seen) if labels is None else ops.cross_entropy(self.last(seen), labels)


def _words() -> tuple[np.ndarray, np.ndarray]:
    ids = np.random.RandomState(1).randint(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
    labels = ids.copy()
    labels[0] = labels[3:5] = -100
    labels[0, 2] = 4
    return ids, labels


def _pixels() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.RandomState(1)
    return random.randn(ROWS, 3, 6, 6).astype(np.float32), random.randint(0, VOCABULARY, ROWS).astype(np.int32)


def _train(step: Any, clip: Any, parameters: Any, named: Any) -> dict[str, Any]:
    optimizer = AdamW(SimpleNamespace(trainable_params=lambda: parameters), epsilon=1e-3)
    seen: dict[str, Any] = {}
    for number in range(2):
        seen[f"loss {number}"] = values(step())
        if number == 0:
            seen |= {f"gradient of {name}": values(hp.grad_of(one)) for name, one in named}
        seen[f"norm {number}"] = values(clip())
        optimizer.step()
    return seen | {f"weight {name}": values(one) for name, one in named}


def _alone(make: Any, batch: Any) -> dict[str, Any]:
    cell, given, platform = filled(make()), [Tensor(one) for one in batch], get_platform()
    parameters = cell.trainable_params()

    def step() -> Any:
        loss = cell(*given)
        hp.backward(loss)
        return loss

    named = list(platform.parameters_dict(cell).items())
    return _train(step, lambda: platform.clip_grad_norm_(parameters, 1.0), parameters, named)


def _split(make: Any, batch: Any, degrees: str, **options: Any) -> dict[str, Any]:
    run = hp.parallelize(filled(make()), degrees, **options)
    mine = run.mine(range(ROWS))
    given, labels = (Tensor(np.ascontiguousarray(one[mine.start : mine.stop])) for one in batch)
    named = list(run.named_parameters())
    return _train(
        lambda: run.forward_backward(given, labels=labels),
        lambda: run.clip_grad_norm_(1.0),
        run.parameters(),
        named,
    )


CASES = {
    "decoder": (Decoder, _words, ("dp_shard", "tp", "cp", "pp", "dp_replicate"), {}),
    "decoder in parts": (Decoder, _words, ("dp_shard", "tp", "cp", "pp"), {"microbatches": 3, "recompute": "full"}),
    "pictures": (Pictures, _pixels, ("dp_shard", "cp", "dp_replicate"), {"microbatches": 2}),
}
SMALL = {"decoder": ("dp_shard", "tp")}


@run_on_ranks(2, sweep=(3,), timeout=400)
@pytest.mark.parametrize("case", small_or_sweep(CASES, SMALL))
def test_trains_as_the_plain_cell(case: str, sweep: bool) -> None:
    ranks = get_platform().get_world_size()
    make, batch, axes, options = CASES[case]
    want = _alone(make, batch())
    for axis in axes if sweep else SMALL[case]:
        got = _split(make, batch(), f"{axis}={ranks}", **options)
        for name, value in got.items():
            np.testing.assert_allclose(value, want[name], rtol=3e-5, atol=3e-5, err_msg=f"{axis}: {name}")
