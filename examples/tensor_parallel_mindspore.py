"""A network trained with its weights cut over all ranks, next to the same network on one device; on MindSpore."""

import copy

import mindspore
import numpy as np
from mindspore import Tensor, nn, ops
from mindspore.experimental import optim

import hyper_parallel as hp


def train(model: nn.Cell, x: Tensor, y: Tensor) -> list[float]:
    """The single-device code, which serves both: ten steps of AdamW."""
    weights = model.trainable_params()
    optimizer = optim.AdamW(weights, lr=1e-2)
    step = hp.value_and_grad(lambda: ops.cross_entropy(model(x), y), weights)
    losses = []
    for _ in range(10):
        loss, gradients = step()
        optimizer(gradients)
        losses.append(loss.item())
    return losses


def main() -> None:
    platform = hp.get_platform()
    platform.init_process_group()
    mesh = hp.init_device_mesh("cpu", (platform.get_world_size(),), mesh_dim_names=("tp",))

    mindspore.set_seed(0)
    alone = nn.SequentialCell(nn.Dense(16, 66), nn.GELU(), nn.Dense(66, 5))
    random = np.random.RandomState(0)
    x, y = Tensor(random.randn(32, 16), mindspore.float32), Tensor(random.randint(5, size=32), mindspore.int32)

    cut = hp.parallelize_module(copy.deepcopy(alone), mesh, {"0": hp.ColwiseParallel(), "2": hp.RowwiseParallel()})
    losses = train(cut, x, y)

    assert np.allclose(losses, train(alone, x, y), atol=1e-6)
    held = tuple(cut[0].weight.to_local().shape)
    print(f"rank {platform.get_rank()} holds {held} of the first weight; loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    platform.destroy_process_group()


if __name__ == "__main__":
    main()
