"""The styles of attention modules on MindSpore: shards of the sequence, with the numbers of one device."""

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import mint, nn

import hyper_parallel as hp
from tests.world import run_on_ranks

only_on = "mindspore"

BATCH, TOKENS, HEADS, KEY_HEADS, WIDTH = 2, 8, 4, 2, 3


class Core(nn.Cell):
    def construct(self, query: Any, key: Any, value: Any) -> Any:
        query, key, value = (one.transpose(1, 2) for one in (query, key, value))
        return hp.attention(query, key, value, visible=hp.Visibility(causal=True)).transpose(1, 2)


class Attention(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        numbers = np.random.default_rng(0)
        dim = HEADS * WIDTH
        self.q, self.k, self.v = (mint.nn.Linear(dim, out * WIDTH) for out in (HEADS, KEY_HEADS, KEY_HEADS))
        for layer in (self.q, self.k, self.v):
            layer.weight.set_data(ms.Tensor(numbers.normal(0, 0.3, layer.weight.shape).astype(np.float32)))
            layer.bias.set_data(ms.Tensor(numbers.normal(0, 0.3, layer.bias.shape).astype(np.float32)))
        self.core = Core()

    def construct(self, x: Any) -> Any:
        found = [one(x) for one in (self.q, self.k, self.v)]
        query, key, value = (one.reshape((*one.shape[:2], -1, WIDTH)) for one in found)
        mixed = self.core(query, key, value)
        return mixed.reshape((*mixed.shape[:2], -1))


def _run(model: Attention, x: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    step = ms.value_and_grad(lambda given: (model(given) ** 2).sum(), None, list(model.trainable_params()))
    _, grads = step(ms.Tensor(x))
    return model(ms.Tensor(x)).asnumpy(), [one.asnumpy() for one in grads]


@pytest.mark.parametrize("kind", ["ContextParallel", "AsyncContextParallel"])
@run_on_ranks(2)
def test_same_as_one_device(kind: str) -> None:
    x = np.random.default_rng(1).normal(size=(BATCH, TOKENS, HEADS * WIDTH)).astype(np.float32)
    want, want_grads = _run(Attention(), x)
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    model = Attention()
    if kind == "ContextParallel":
        hp.ContextParallel().apply(model.core, mesh)
    else:
        hp.AsyncContextParallel().apply(model.core, mesh, model.q, model.k, model.v)
    place = mesh.get_local_rank()
    got, grads = _run(model, np.split(x, 2, 1)[place])
    np.testing.assert_allclose(got, np.split(want, 2, 1)[place], rtol=1e-5, atol=1e-5)
    for one, wanted in zip(grads, want_grads, strict=True):
        total = hp.get_platform().all_reduce(ms.Tensor(one), mesh.get_group())
        np.testing.assert_allclose(total.asnumpy(), wanted, rtol=1e-4, atol=1e-4)
