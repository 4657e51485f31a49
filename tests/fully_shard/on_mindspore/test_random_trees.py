"""Random trees of cells against one device: tied, frozen, unused, reused parameters, of any size and dtype."""

import random
from typing import Any

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.fully_shard.on_mindspore.parity import SINGLE, TOLERANCE, assert_all_sharded, batch, mesh_of, named, values
from tests.world import run_on_ranks, small_or_sweep


class Leaf(nn.Cell):
    """A few parameters; which of them a rank uses is written in ``uses``, by name and rank."""

    def __init__(self, draw: random.Random, num_ranks: int) -> None:
        super().__init__()
        self.uses: dict[str, list[bool]] = {}
        for number in range(draw.randint(0, 3)):
            shape = [draw.choice((0, 1, 2, 3, 5, 9)) for _ in range(draw.randint(0, 3))]
            dtype = draw.choice((np.float64, np.float64, np.float32))
            drawn = np.random.RandomState(draw.randrange(10**6)).randn(*shape)
            one = Parameter(Tensor(np.asarray(drawn, dtype)), requires_grad=draw.random() > 0.2)
            setattr(self, f"p{number}", one)
            kind = draw.random()
            used = [True] * num_ranks if kind < 0.7 else [False] * num_ranks
            self.uses[f"p{number}"] = used if kind < 0.8 else [draw.random() < 0.5 for _ in range(num_ranks)]

    def construct(self, x: Any, rank: int) -> Any:
        for name, used in self.uses.items():
            one = getattr(self, name)
            if used[rank] and 0 not in one.shape:
                x = ops.tanh(x * (1 + ops.sin(one.astype(x.dtype)).sum() / 10))
        return x


class Node(nn.Cell):
    """Calls the cells inside, some of them twice; the result of a call may not count on a rank."""

    def __init__(self, draw: random.Random, num_ranks: int, depth: int) -> None:
        super().__init__()
        made = [
            Node(draw, num_ranks, depth - 1) if depth and draw.random() < 0.6 else Leaf(draw, num_ranks)
            for _ in range(draw.randint(1, 3))
        ]
        self.inner = nn.CellList(made)
        self.weight = Parameter(Tensor(np.random.RandomState(draw.randrange(10**6)).randn(4, 4)))
        self.calls = [draw.randrange(len(made)) for _ in range(draw.randint(1, 4))]
        self.counts = [
            [draw.random() < 0.8 for _ in range(num_ranks)] if draw.random() < 0.3 else [True] * num_ranks
            for _ in self.calls
        ]

    def construct(self, x: Any, rank: int) -> Any:
        total = ops.matmul(x, self.weight)
        for call, counts in zip(self.calls, self.counts, strict=True):
            out = self.inner[call](x, rank)
            total = total + (out if counts[rank] else get_platform().detached(out))
        return total


def _built(seed: int, num_ranks: int) -> tuple[Node, random.Random]:
    draw = random.Random(seed)
    cell = Node(draw, num_ranks, depth=2)
    leaves = [inner for _, inner in cell.cells_and_names() if isinstance(inner, Leaf) and inner.uses]
    for _ in range(draw.randint(0, 3)):
        if len(leaves) > 1:
            first, second = draw.sample(leaves, 2)
            if first.p0.dtype == second.p0.dtype:
                second.p0 = first.p0
    return cell, draw


def _shard(cell: Node, mesh: hp.DeviceMesh, draw: random.Random) -> None:
    drawn = draw.randint(0, 2)
    options: dict[str, Any] = {"mesh": mesh, "shard_placement_fn": lambda p: hp.Shard(drawn % p.ndim)}
    inside = [inner for _, inner in cell.cells_and_names() if isinstance(inner, (Node, Leaf)) and inner is not cell]
    for inner in reversed(inside):
        if draw.random() < 0.6:
            hp.fully_shard(inner, reshard_after_forward=draw.random() < 0.7, **options)
    hp.fully_shard(cell, **options)


def _compare(seed: int, mesh: hp.DeviceMesh) -> None:
    size, rank = mesh.size(), mesh.get_rank()
    expected, _ = _built(seed, size)
    ours, draw = _built(seed, size)
    _shard(ours, mesh, draw)
    assert list(named(ours)) == list(named(expected))
    for step in range(2):
        x = batch(2 * size, 4, seed=step)
        for place in range(size):
            hp.backward(ops.sin(expected(Tensor(x[2 * place : 2 * place + 2]), place)).mean() / size)
        hp.backward(ops.sin(ours(Tensor(x[2 * rank : 2 * rank + 2]), rank)).mean())
        for (name, one), mine in zip(named(expected).items(), named(ours).values(), strict=True):
            want, got = hp.grad_of(one), hp.grad_of(mine)
            assert (want is None) == (got is None), f"seed {seed}, {name}: {want} {got}"
            if want is not None:
                exact = values(want).dtype == np.float64
                np.testing.assert_allclose(
                    values(got), values(want), **(TOLERANCE if exact else SINGLE), err_msg=f"seed {seed}, {name}"
                )
        assert_all_sharded(ours)
    hp.zero_grad(ours.trainable_params())


@run_on_ranks(2, sweep=(3, 4), timeout=300)
@pytest.mark.parametrize("start", small_or_sweep(range(0, 100, 5), (0,)))
def test_random_trees(start) -> None:
    mesh = mesh_of()
    for seed in range(start, start + 5):
        _compare(seed, mesh)
