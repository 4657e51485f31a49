"""A network trained with its weights cut over all ranks, next to the same network on one device."""

import copy

import torch
from torch import nn

import hyper_parallel as hp


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    """The single-device code, which serves both: ten steps of AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(10):
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        hp.backward(loss)
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    platform = hp.get_platform()
    platform.init_process_group()
    mesh = hp.init_device_mesh("cpu", (platform.get_world_size(),), mesh_dim_names=("tp",))

    torch.manual_seed(0)
    alone = nn.Sequential(nn.Linear(16, 66), nn.GELU(), nn.Linear(66, 5))
    x, y = torch.randn(32, 16), torch.randint(5, (32,))

    cut = hp.parallelize_module(copy.deepcopy(alone), mesh, {"0": hp.ColwiseParallel(), "2": hp.RowwiseParallel()})
    losses = train(cut, x, y)

    assert torch.allclose(torch.tensor(losses), torch.tensor(train(alone, x, y)), atol=1e-6)
    held = tuple(cut[0].weight.to_local().shape)
    print(f"rank {platform.get_rank()} holds {held} of the first weight; loss {losses[0]:.4f} -> {losses[-1]:.4f}")
    platform.destroy_process_group()


if __name__ == "__main__":
    main()
