"""Cases on which PyTorch's own ``fully_shard`` fails, run on two ranks: ``python where_torch_fails.py <case> ...``.

Each rank prints lines ``<case>: raised <type>: <message>``, or what the case gives; ranks that abort or hang are the
caller's to see. What ours does on the same cases is in the tests of this folder.
"""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard


def _layers(num: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(num)))
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def _x() -> torch.Tensor:
    return torch.ones(2, 4)


def uneven_other_dims() -> None:
    fully_shard(nn.Linear(3, 4), shard_placement_fn=lambda p: Shard(p.ndim - 1))


class _WithNumber(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.scale = nn.Parameter(torch.tensor(1.0))


def without_dims() -> None:
    fully_shard(_WithNumber())


def several_dtypes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
    fully_shard(model)
    model(_x())


def strided() -> None:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(torch.randn(4, 4).t())
    fully_shard(model)


def tied_across_units() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    fully_shard(model[0])
    fully_shard(model[1])
    fully_shard(model)
    model(_x())


class _Branches(nn.Module):
    """Each rank uses another one."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, size) for size in sizes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branches[dist.get_rank()](x)


def alike_on_some_ranks() -> str:
    """On one device, with the batches of both ranks, all parameters have gradients."""
    model = fully_shard(_Branches(4, 4))
    model(_x()).sum().backward()
    return f"all there: {all(parameter.grad is not None for parameter in model.parameters())}"


def used_on_some_ranks() -> str:
    fully_shard(_Branches(4, 16))(_x()).sum().backward()
    return "no error"


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, gate: bool) -> torch.Tensor:
        return self.b(self.a(x)) if gate else self.a(x)


def fresh_in_the_last_micro_batch() -> None:
    model = fully_shard(_Gated(), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    for is_last in (False, True):
        model.set_requires_gradient_sync(is_last)
        model(_x(), is_last).sum().backward()


class _View(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).view(-1)


def view_written_in_place() -> None:
    model = nn.Sequential(nn.Linear(4, 4), _View(4, 4))
    fully_shard(model[1])
    fully_shard(model)
    model(_x()).mul_(2).sum().backward()


def step_before_backward() -> str:
    model = _layers()
    loss = model(_x()).square().sum()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    loss.backward()
    return "no error"


class _Raises(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise MemoryError("none left")


def exception_in_forward() -> str:
    model = nn.Sequential(nn.Linear(4, 4), _Raises(4, 4))
    fully_shard(model[1])
    fully_shard(model)
    try:
        model(_x())
    except MemoryError:
        return f"still whole: {not isinstance(model[0].weight, DTensor)}"
    return "no error"


def autograd_grad() -> str:
    model = _layers()
    found = torch.autograd.grad(model(_x()).sum(), list(model.parameters()), allow_unused=True)
    return f"all None: {all(gradient is None for gradient in found)}"


def part_before_root() -> None:
    model = _layers()
    model[0](_x())
    model(_x())


def converted_after_a_step() -> None:
    model = _layers()
    model(_x()).sum().backward()
    model.double()
    model(_x().double()).sum().backward()


def deep_copied() -> None:
    copy.deepcopy(_layers())


def clipped_over_two_meshes() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("a",)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("b", "c")))
    model(_x()).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def unequal_counts() -> str:
    """The mean over all rows is wanted; ranks have 1 and 3."""
    torch.manual_seed(0)
    rows = [torch.randn(1, 4), torch.randn(3, 4)]
    model = nn.Linear(4, 4)
    alone = copy.deepcopy(model)
    alone(torch.cat(rows)).square().mean().backward()
    fully_shard(model)
    model(rows[dist.get_rank()]).square().mean().backward()
    return f"the mean: {torch.allclose(model.weight.grad.full_tensor(), alone.weight.grad)}"


CASES: dict[str, Callable[[], str | None]] = {
    one.__name__: one
    for one in (
        uneven_other_dims,
        without_dims,
        several_dtypes,
        strided,
        tied_across_units,
        fresh_in_the_last_micro_batch,
        view_written_in_place,
        step_before_backward,
        exception_in_forward,
        autograd_grad,
        part_before_root,
        converted_after_a_step,
        deep_copied,
        clipped_over_two_meshes,
        unequal_counts,
        alike_on_some_ranks,
        used_on_some_ranks,
    )
}


def _be_rank(rank: int, names: list[str], store: str) -> None:
    torch.set_num_threads(1)
    store = f"file://{store}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=20))
    for name in names:
        try:
            result = CASES[name]()
        except Exception as error:
            result = f"raised {type(error).__name__}: {' '.join(str(error).split())}"
        sys.stdout.write(f"{name}: {result}\n")
        sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_be_rank, (sys.argv[1:], f"{folder}/store"), nprocs=2)
