"""Positions and targets that are outside: the error of one device, on every rank, under every layout, and no hang."""

import pytest
import torch
import torch.nn.functional as F

import hyper_parallel as hp
from tests.shard.validator import layouts_of, tensor
from tests.world import run_on_ranks

only_on = "torch"  # the errors are PyTorch's; MindSpore's kernels are not asked yet

# Each takes a table of 5 rows and 3 columns, and 4 positions of which the third is bad.
READS = {
    "embedding": lambda x, i: F.embedding(i, x),
    "index_select": lambda x, i: x.index_select(0, i),
    "gather": lambda x, i: x.gather(0, i.unsqueeze(1).expand(-1, 3)),
    "getitem": lambda x, i: x[i],
    "getitem of two dims": lambda x, i: x[i, i * 0],
    "take": lambda x, i: x.take(i * 3),
    "one_hot": lambda x, i: F.one_hot(i, 5),
    "scatter": lambda x, i: x.scatter(0, i.unsqueeze(1).expand(-1, 3), 1.0),
    "scatter_add": lambda x, i: x.scatter_add(0, i.unsqueeze(1).expand(-1, 3), x),
    "scatter_reduce": lambda x, i: x.scatter_reduce(0, i.unsqueeze(1).expand(-1, 3), x, "amax"),
    "index_add": lambda x, i: x.index_add(0, i, x[:4]),
    "index_copy": lambda x, i: x.index_copy(0, i, x[:4]),
    "index_fill": lambda x, i: x.index_fill(0, i, 2.0),
    "index_reduce": lambda x, i: x.index_reduce(0, i, x[:4], "prod"),
    "in place": lambda x, i: x.clone().index_fill_(0, i, 2.0),
    "setitem": lambda x, i: x.clone().__setitem__(i, 2.0),
    "index_put": lambda x, i: x.index_put((i,), x[:4]),
    "cross_entropy": lambda x, i: F.cross_entropy(x.t().repeat(2, 1)[:4], i),
    "nll_loss": lambda x, i: F.nll_loss(x.t().repeat(2, 1)[:4], i, reduction="none"),
}


def _outcome(run, x, index):
    try:
        run(x, index)
    except (IndexError, RuntimeError) as error:
        return type(error)
    return None


@run_on_ranks(2, timeout=120)
@pytest.mark.parametrize("bad", [5, -1, -6])
def test_same_error_on_every_rank(bad: int) -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    table, positions = tensor(5, 3), torch.tensor([0, 4, bad, 1])
    for name, run in READS.items():
        expected = _outcome(run, table, positions)
        for layout in layouts_of(mesh, table, False):
            for other in layouts_of(mesh, positions, False):
                x = hp.distribute_tensor(table, mesh, layout)
                index = hp.distribute_tensor(positions, mesh, other)
                found = _outcome(run, x, index)
                assert found is expected, f"{name} of {bad} under {layout}, {other}: {found} instead of {expected}"


@run_on_ranks(4)
def test_messages_name_operator_position_and_size() -> None:
    mesh = hp.init_device_mesh("cpu", (2, 2))
    x = hp.distribute_tensor(tensor(5, 3), mesh, [hp.Shard(0), hp.Replicate()])
    index = hp.distribute_tensor(torch.tensor([0, 4, 7, 1]), mesh, [hp.Replicate(), hp.Shard(0)])
    with pytest.raises(IndexError, match="embedding: index 7 is out of bounds for dimension 0 with size 5"):
        F.embedding(index, x)
    with pytest.raises(RuntimeError, match="scatter: index 7 is out of bounds for dimension 0 with size 5"):
        x.scatter(0, index.unsqueeze(1).expand(-1, 3), 1.0)
    logits = hp.distribute_tensor(tensor(4, 5), mesh, [hp.Shard(1), hp.Shard(0)])
    with pytest.raises(
        IndexError, match="the target 7 is not one of the 5 classes; targets are 0 to 4, or ignore_index"
    ):
        F.cross_entropy(logits, index)
    assert F.cross_entropy(logits, index, ignore_index=7).full_tensor().isfinite()
    # Positions that every rank has are not sent around.
    whole = hp.distribute_tensor(torch.tensor([0, 4]), mesh, [hp.Replicate(), hp.Replicate()])
    with hp.CommRecorder() as recorder:
        F.embedding(whole, x)
    assert not recorder.records


@run_on_ranks(2)
def test_take_along_dim_counts_on_from_the_start() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    positions = torch.tensor([[7, -1, 2]])
    x = hp.distribute_tensor(tensor(5, 3), mesh, [hp.Shard(0)])
    ours = x.take_along_dim(hp.distribute_tensor(positions, mesh, [hp.Replicate()]), 0)
    torch.testing.assert_close(ours.full_tensor(), tensor(5, 3).take_along_dim(positions, 0))


@run_on_ranks(2, timeout=120)
def test_targets_of_margin_losses() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    logits = tensor(5, 4)
    losses = {
        F.multi_margin_loss: [torch.tensor([0, 3, 1, 2, bad]) for bad in (3, 4, -1)],
        F.multilabel_margin_loss: [torch.tensor([[1, 2, -1, -1]] * 4 + [[0, bad, -1, -1]]) for bad in (3, 4, -1, -2)],
    }
    for loss, targets in losses.items():
        for target in targets:
            expected = _outcome(loss, logits, target)
            for layout in layouts_of(mesh, logits, False):
                for other in layouts_of(mesh, target, False):
                    ours = hp.distribute_tensor(logits, mesh, layout), hp.distribute_tensor(target, mesh, other)
                    found = _outcome(loss, *ours)
                    assert found is expected, f"{loss.__name__} of {target} under {layout}, {other}: {found}"


REFUSALS = {
    "cholesky": lambda x: torch.linalg.cholesky(x),
    "inv": lambda x: torch.linalg.inv(x),
    "solve": lambda x: torch.linalg.solve(x, x),
    "eigh": lambda x: torch.linalg.eigh(x / x.sum((1, 2), keepdim=True)),
    "cholesky_inverse": lambda x: torch.cholesky_inverse(x),
    "lu_unpack": lambda x: torch.lu_unpack(x, x.sum(2).int()),
    "lu_solve": lambda x: torch.linalg.lu_solve(x, x.sum(2).int(), x),
    "ldl_solve": lambda x: torch.linalg.ldl_solve(x, x.sum(2).int(), x),
    "binary_cross_entropy": lambda x: F.binary_cross_entropy(x - 3 * (x.sum((1, 2), keepdim=True) == 0), x),
    "floor_divide": lambda x: 6 // x.sum((1, 2)).long(),
    "remainder": lambda x: (x.long() + 1) % x.sum((1, 2), keepdim=True).long(),
    "rounded": lambda x: torch.div(x.long(), x.sum((1, 2), keepdim=True).long(), rounding_mode="trunc"),
    "in place": lambda x: x.long().floor_divide_(x.sum((1, 2), keepdim=True).long()),
    "max_unpool2d": lambda x: F.max_unpool2d(x, (x.sum((1, 2), keepdim=True) == 0).long() * 40 + x.long(), 2),
}


@run_on_ranks(2, timeout=120)
def test_a_block_that_is_refused_is_refused_on_every_rank() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    good = torch.eye(3, dtype=torch.float64).repeat(5, 1, 1)
    bad = good.clone()
    bad[4] = 0.0  # singular
    for name, run in REFUSALS.items():
        for values in (good, bad):
            expected = _outcome(lambda x, _, run=run: run(x), values, None)
            assert (expected is None) == (values is good), name
            for layout in layouts_of(mesh, values, False):
                found = _outcome(lambda x, _, run=run: run(x), hp.distribute_tensor(values, mesh, layout), None)
                assert found is expected, f"{name} under {layout}: {found} instead of {expected}"
    row = hp.distribute_tensor(torch.ones(1, 3, dtype=torch.int64), mesh, [hp.Shard(0)])  # nothing on the second rank
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        row // 0


@run_on_ranks(2)
def test_no_positions_in_nothing() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    for layout in ([hp.Shard(0)], [hp.Replicate()]):
        x = hp.distribute_tensor(tensor(0), mesh, layout)
        index = hp.distribute_tensor(torch.empty(0, dtype=torch.int64), mesh, [hp.Shard(0)])
        for found in (x.take(index), x[index], x.index_select(0, index), x.gather(0, index)):
            assert tuple(found.shape) == (0,) and found.full_tensor().numel() == 0
