"""The reference model fully sharded on MindSpore has the losses of PyTorch's on one process."""

from typing import Any, NamedTuple

import mindspore  # noqa: F401  # this test is about MindSpore
import numpy as np
import pytest
from mindspore import Tensor

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.fully_shard.on_mindspore.parity import AdamW, mean_over
from tests.tensor_parallel.llama_training import RATE, SEED, SIZES, STEPS, Case, tokens, train_on_torch
from tests.world.world import Worlds

TIMEOUT = 300.0


class Layout(NamedTuple):
    """A mesh and what is done with it."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    kind: str = "fully_shard"
    tied: bool = False


def train_on_mindspore(layouts: list[Layout]) -> list[list[float]]:
    """The losses of some steps, as the mean over the data ranks; each of them has one of the two sequences."""
    results = []
    for layout in layouts:
        mesh = hp.init_device_mesh("cpu", layout.shape, mesh_dim_names=layout.names)
        with hp.deferred_init():
            model = hp.models.Llama(hp.models.LlamaConfig(**SIZES, tie_head=layout.tied))
        data = mesh["dp"] if "tp" in layout.names else mesh
        if "tp" in layout.names:
            model = hp.parallelize_module(model, mesh["tp"], hp.plans.for_model(model))
        if layout.kind == "replicate":
            hp.replicate(model, data)
        else:
            for block in model.blocks:
                hp.fully_shard(block, mesh=data)
            hp.fully_shard(model, mesh=data)
        hp.manual_seed(SEED)
        hp.materialize(model)
        results.append(_losses(model, data))
    return results


def _losses(model: Any, data: hp.DeviceMesh) -> list[float]:
    ids = tokens()
    rows = ids[data.rank_list.index(get_platform().get_rank()) * len(ids) // data.size()]
    inputs, labels = Tensor(rows[None, :-1]), Tensor(rows[None, 1:])
    optimizer, losses = AdamW(model, RATE), []
    for _ in range(STEPS):
        loss = model(inputs, labels)
        hp.backward(loss)
        optimizer.step()
        losses.append(mean_over(loss, data))
    return losses


@pytest.mark.sweep("mindspore")
def test_losses_are_those_of_torch(worlds, sweep) -> None:
    torch_worlds = Worlds("torch")
    try:
        plain, tied = (
            losses for _, losses in torch_worlds(1, TIMEOUT).run(train_on_torch, [Case(), Case(tied=True)])[0]
        )
    finally:
        torch_worlds.close()
    assert plain[-1] < 0.98 * plain[0] and abs(plain[-1] - tied[-1]) > 1e-3
    of_two = [Layout((2,), ("dp",), tied=True)]
    of_four = [Layout((2, 2), ("dp", "tp"))]
    if sweep:
        of_two += [Layout((2,), ("dp",)), Layout((2,), ("dp",), "replicate")]
        of_four += [Layout((2, 2), ("replicate", "shard"))]
    for world_size, layouts in ((2, of_two), (4, of_four)):
        for results in worlds(world_size, TIMEOUT).run(train_on_mindspore, layouts):
            for layout, losses in zip(layouts, results, strict=True):
                np.testing.assert_allclose(
                    losses, tied if layout.tied else plain, rtol=0, atol=1e-5, err_msg=str(layout)
                )
