"""Products of matrices, ``einsum`` and functions of matrices under every layout."""

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.dtensor.comm_recorder import CommRecorder
from hyper_parallel.core.shard.dispatching.strict_mode import strict
from tests.shard.validator import Sample, assert_valid, tensor
from tests.world import run_on_ranks

only_on = "torch"  # calls PyTorch's operators one by one; MindSpore's own: test_mindspore_rules.py

PRODUCTS = [
    Sample("mm", (tensor(5, 1), tensor(1, 3, seed=1))),
    Sample("mm", (tensor(3, 0), tensor(0, 4, seed=1))),
    Sample("matmul", (tensor(5, 3), tensor(3, seed=1))),
    Sample("matmul", (tensor(3, 1, 2, 4), tensor(5, 4, 3, seed=1))),
    Sample("mv", (tensor(5, 3), tensor(3, seed=1))),
    Sample("outer", (tensor(5), tensor(3, seed=1))),
    Sample("inner", (tensor(2, 5), tensor(3, 5, seed=1))),
    Sample("inner", (tensor(5), tensor(5, seed=1))),
    Sample("inner", (tensor(), tensor(5, seed=1))),
    Sample("tensordot", (tensor(2, 3, 4), tensor(3, 4, 5, seed=1))),
    Sample("tensordot", (tensor(2, 3, 4), tensor(4, 2, seed=1)), {"dims": ([0, 2], [1, 0])}),
    Sample("tensordot", (tensor(2, 1), tensor(3, 4, seed=1)), {"dims": ([1], [0])}),
    Sample("tensordot", (tensor(2, 3), tensor(4, seed=1)), {"dims": 0}),
    Sample("chain_matmul", (tensor(3, 2), tensor(2, 5, seed=1), tensor(5, 1, seed=2))),
    Sample("linalg.multi_dot", ([tensor(3), tensor(3, 5, seed=1), tensor(5, seed=2)],)),
    Sample("linalg.vecdot", (tensor(5, 3), tensor(3, seed=1))),
    Sample("linalg.vecdot", (tensor(5, 3), tensor(5, 1, seed=1)), {"dim": 0}),
    Sample("kron", (tensor(4, 3), tensor(2, 3, seed=1))),
    Sample("kron", (tensor(3), tensor(4, 1, seed=1))),
    Sample("cdist", (tensor(2, 5, 3), tensor(4, 3, seed=1))),
    Sample("cdist", (tensor(5, 3), tensor(1, 3, seed=1)), {"p": 1.0}),
    Sample("linalg.cross", (tensor(5, 3), tensor(1, 3, seed=1))),
    Sample("cross", (tensor(3, 5), tensor(3, 5, seed=1))),
]
WITH_TERMS = [
    Sample("nn.functional.linear", (tensor(2, 3, 4), tensor(5, 4, seed=1), tensor(5, seed=2))),
    Sample("nn.functional.linear", (tensor(4), tensor(5, 4, seed=1), tensor(5, seed=2))),
    Sample("nn.functional.linear", (tensor(3, 4), tensor(5, 4, seed=1)), {"bias": tensor(5, seed=2)}),
    Sample("nn.functional.linear", (tensor(3, 4), tensor(5, 4, seed=1), tensor(1, seed=2))),
    Sample("nn.functional.linear", (tensor(3, 4), tensor(5, 4, seed=1), tensor())),
    Sample("nn.functional.bilinear", (tensor(3, 2), tensor(3, 4, seed=1), tensor(5, 2, 4, seed=2), tensor(5, seed=3))),
    Sample("nn.functional.bilinear", (tensor(3, 2), tensor(3, 4, seed=1), tensor(5, 2, 4, seed=2))),
    Sample("addmm", (tensor(5, 3), tensor(5, 4, seed=1), tensor(4, 3, seed=2)), {"beta": 0.5, "alpha": 2}),
    Sample("addmm", (tensor(3), tensor(5, 4, seed=1), tensor(4, 3, seed=2))),
    Sample("addmm", (tensor(5, 1), tensor(5, 4, seed=1), tensor(4, 3, seed=2))),
    Sample("Tensor.addmm_", (tensor(5, 3), tensor(5, 4, seed=1), tensor(4, 3, seed=2))),
    Sample("addmv", (tensor(5), tensor(5, 3, seed=1), tensor(3, seed=2))),
    Sample("addr", (tensor(5, 3), tensor(5, seed=1), tensor(3, seed=2)), {"alpha": 3}),
    Sample("addbmm", (tensor(3, 2), tensor(2, 3, 4, seed=1), tensor(2, 4, 2, seed=2))),
    Sample("baddbmm", (tensor(2, 3, 2), tensor(2, 3, 4, seed=1), tensor(2, 4, 2, seed=2)), {"beta": 2}),
    Sample("baddbmm", (tensor(1, 2), tensor(2, 3, 4, seed=1), tensor(2, 4, 2, seed=2))),
    Sample("_addmm_activation", (tensor(3), tensor(5, 4, seed=1), tensor(4, 3, seed=2)), gradients=False),
]
EINSUM = [
    Sample("einsum", ("ij,jk->ik", tensor(5, 4), tensor(4, 3, seed=1))),
    Sample("einsum", ("ij, jk", tensor(5, 4), tensor(4, 3, seed=1))),
    Sample("einsum", ("bhqd,bhkd->bhqk", tensor(2, 3, 2, 4), tensor(2, 3, 5, 4, seed=1))),
    Sample("einsum", ("...ij,...jk->...ik", tensor(2, 1, 3, 4), tensor(5, 4, 2, seed=1))),
    Sample("einsum", ("i...->...", tensor(5, 3))),
    Sample("einsum", ("ii->i", tensor(4, 4))),
    Sample("einsum", ("ii,ij->j", tensor(4, 4), tensor(4, 3, seed=1))),
    Sample("einsum", ("i,i,ij->j", tensor(4), tensor(4, seed=1), tensor(4, 3, seed=2))),
    Sample("einsum", ("ij,ij->i", tensor(4, 1), tensor(4, 3, seed=1))),
    Sample("einsum", ("ba", tensor(4, 3))),
    Sample("einsum", (tensor(5, 4), [0, 1], tensor(4, 3, seed=1), [1, 2], [2, 0])),
    Sample("einsum", (tensor(5, 4), [1, 0], tensor(5, seed=1), [1])),
    Sample("einsum", ("ij,j->i", [tensor(5, 4), tensor(4, seed=1)])),
]


def _definite(matrices: torch.Tensor) -> torch.Tensor:
    return matrices @ matrices.mT + 4 * torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)


def _symmetric(function):
    def on_definite(matrices: torch.Tensor) -> torch.Tensor:
        return function(matrices @ matrices.mT)

    on_definite.__name__ = f"{function.__name__}_of_symmetric"
    return on_definite


WELL_POSED = _definite(tensor(3, 4, 4))
MATRICES = [
    *(
        Sample(f"linalg.{name}", (WELL_POSED,))
        for name in ("inv", "det", "slogdet", "cholesky", "qr", "svdvals", "eigvalsh", "matrix_exp", "pinv", "cond")
    ),
    Sample("linalg.eigh", (WELL_POSED,), gradients=False),
    Sample("linalg.lu_factor", (WELL_POSED,), gradients=False),
    Sample("inverse", (WELL_POSED,)),
    Sample("logdet", (WELL_POSED,)),
    Sample("linalg.matrix_power", (WELL_POSED, 3)),
    Sample("linalg.solve", (WELL_POSED, tensor(3, 4, 2))),
    Sample("linalg.solve", (WELL_POSED, tensor(3, 4))),
    Sample("linalg.solve", (WELL_POSED[0], tensor(3, 4, 2))),
    Sample("linalg.solve_triangular", (WELL_POSED, tensor(3, 4, 2)), {"upper": True}),
    Sample("cholesky_solve", (tensor(3, 4, 2), WELL_POSED)),
    Sample("linalg.lstsq", (WELL_POSED, tensor(3, 4, 2)), gradients=False),
    Sample("linalg.matrix_rank", (WELL_POSED,), gradients=False),
]


@pytest.mark.parametrize(
    "samples",
    [PRODUCTS[::2], PRODUCTS[1::2], WITH_TERMS[::2], WITH_TERMS[1::2], EINSUM, MATRICES],
    ids=["products", "more_products", "with_terms", "more_with_terms", "einsum", "matrices"],
)
def test_same_as_one_device(worlds, samples: list[Sample]) -> None:
    assert_valid(worlds, samples)


@run_on_ranks(2)
def test_no_gathering_and_the_layouts_one_expects() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    column = hp.distribute_tensor(tensor(6, 4), mesh, [hp.Shard(0)])
    row = hp.distribute_tensor(tensor(5, 6), mesh, [hp.Shard(1)])
    bias = hp.distribute_tensor(tensor(6), mesh, [hp.Shard(0)])
    x = hp.distribute_tensor(tensor(3, 4), mesh, [hp.Replicate()])
    with strict(implicit_redistribution=True), CommRecorder() as recorder:
        hidden = torch.nn.functional.linear(x, column, bias)
        assert hidden.placements == (hp.Shard(1),)
        assert torch.nn.functional.linear(hidden, row).placements == (hp.Partial(),)
        assert torch.einsum("bi,oi->bo", hidden, row).placements == (hp.Partial(),)
        assert torch.addmm(bias, x, column.transpose(0, 1)).placements == (hp.Shard(1),)
    assert not recorder.records
    batched = hp.distribute_tensor(WELL_POSED, mesh, [hp.Shard(0)])
    with strict(implicit_redistribution=True), CommRecorder() as recorder:
        assert torch.linalg.inv(batched).placements == (hp.Shard(0),)
    assert recorder.total_bytes == 8  # whether all could be inverted


@run_on_ranks(2)
def test_shapes_that_do_not_fit_are_named() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    left = hp.distribute_tensor(tensor(3, 4), mesh, [hp.Shard(0)])
    right = hp.distribute_tensor(tensor(3, 4), mesh, [hp.Shard(0)])
    with pytest.raises(RuntimeError, match=r"mm on distributed tensors of global shape \(3, 4\).*tp"):
        torch.mm(left, right)
    with pytest.raises(RuntimeError, match=r"addmm: a plain tensor of shape \(3, 3\) meets a distributed one"):
        torch.addmm(torch.zeros(3, 3), left, right)


@run_on_ranks(2)
def test_kron_of_blocks_whose_elements_do_not_lie_in_order() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    first, second = tensor(4, 3), tensor(5, 2, seed=1)
    x, y = hp.distribute_tensor(first, mesh, [hp.Shard(0)]), hp.distribute_tensor(second, mesh, [hp.Replicate()])
    expected = torch.kron(first, second.t().contiguous())
    torch.testing.assert_close(torch.kron(x, y.t()).full_tensor(), expected)
