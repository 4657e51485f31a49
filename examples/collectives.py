"""Each rank holds a part of a vector; the sum of squares and its gradient are those of the whole vector."""

import torch

from hyper_parallel import get_platform


def main() -> None:
    platform = get_platform()
    platform.init_process_group()
    rank, num_ranks = platform.get_rank(), platform.get_world_size()
    group = platform.create_group(range(num_ranks))

    whole = torch.arange(5.0)
    part = platform.chunk(whole, 0, num_ranks, rank).clone().requires_grad_()
    total = platform.differentiable_all_reduce(part.square().sum(), "sum", group)  # backward: identity
    total.backward()

    assert total.item() == whole.square().sum().item()
    assert torch.equal(part.grad, 2 * part)
    print(f"rank {rank} holds {part.tolist()}, the sum of all squares is {total.item()}")
    platform.destroy_process_group()


if __name__ == "__main__":
    main()
