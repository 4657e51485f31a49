"""Operators that users bring: DFunction, DistributedOp, custom_shard, local_map and register_op."""

from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.dtensor.layout import Layout
from tests.frameworks import assert_close, backward, distribute_tensor, grad_of, leaf, ours
from tests.world import run_on_ranks


def _mesh() -> hp.DeviceMesh:
    return hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))


def _values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


class ScaledProduct(hp.DFunction):
    _op_name = "scaled_product"

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, scale: float = 1.0, *, shift: float = 0.0) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.scale = scale
        return x @ weight * scale + shift

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, weight = ctx.saved_tensors
        return gradient @ weight.T * ctx.scale, x.T @ gradient * ctx.scale, None


class NoName(hp.DFunction):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient * 2


class ProductLayout(hp.DistributedOp):
    def infer_layout(self, layouts: Any, extra_args: Any) -> Layout:
        x, weight = layouts[:2]
        return Layout.of(x.mesh, (x.shard_axes[0], weight.shard_axes[1]))


@run_on_ranks(2)
@pytest.mark.parametrize("rows", [4, 5])
def test_dfunction_on_plain_and_distributed_tensors(rows: int) -> None:
    ProductLayout("scaled_product")
    mesh = _mesh()
    plain = [_values(rows, 3).requires_grad_(), _values(3, 6, seed=1).requires_grad_()]
    expected = plain[0] @ plain[1] * 3.0 + 0.5
    (expected**2).sum().backward()
    whole = [leaf(value) for value in plain]
    out = ScaledProduct.apply(*whole, scale=3.0, shift=0.5)
    assert_close(out, expected)
    backward((out**2).sum())
    for mine, want in zip(whole, plain, strict=True):
        assert_close(grad_of(mine), want.grad)
    for cuts in ([[hp.Shard(0)], [hp.Replicate()]], [[hp.Replicate()], [hp.Shard(1)]]):
        x, weight = (distribute_tensor(leaf(value), mesh, cut) for value, cut in zip(plain, cuts, strict=True))
        out = ScaledProduct.apply(x, weight, 3.0, shift=0.5)
        assert tuple(out.shape) == (rows, 6)
        assert_close(out.full_tensor(), expected.detach())
        backward((out.full_tensor() ** 2).sum())
        assert_close(x.grad.full_tensor(), plain[0].grad)
        assert_close(weight.grad.full_tensor(), plain[1].grad)


@run_on_ranks(2)
def test_dfunction_without_a_name_or_an_operator_says_so() -> None:
    x = distribute_tensor(_values(4), _mesh(), [hp.Shard(0)])
    with pytest.raises(ValueError, match="_op_name"):
        NoName.apply(x)
    assert_close(NoName.apply(ours(_values(4))), _values(4) * 2)

    class Unknown(NoName):
        _op_name = "nobody_registered_this"

    with pytest.raises(ValueError, match="nobody_registered_this"):
        Unknown.apply(x)


def _product(a: Any, b: Any, scale: float = 1.0) -> Any:
    return a @ b * scale


@run_on_ranks(2)
def test_a_rule_in_one_line() -> None:
    mesh = _mesh()
    product = hp.register_op("mk,kn->mn", reduces={"k": "sum"})(_product)
    a, b = _values(5, 4), _values(4, 3, seed=1)
    assert_close(product(ours(a), ours(b), scale=2.0), a @ b * 2.0)
    for cuts, expected in (
        (([hp.Shard(0)], [hp.Replicate()]), hp.Shard(0)),
        (([hp.Shard(1)], [hp.Shard(0)]), hp.Partial()),
        (([hp.Replicate()], [hp.Shard(1)]), hp.Shard(1)),
    ):
        x, y = distribute_tensor(a, mesh, cuts[0]), distribute_tensor(b, mesh, cuts[1])
        out = product(x, y, scale=2.0)
        assert out.placements == (expected,)
        assert_close(out.full_tensor(), a @ b * 2.0)
    with pytest.raises(ValueError, match="dims"):
        product(x, distribute_tensor(_values(4), mesh, [hp.Replicate()]))
    with pytest.raises(ValueError, match="->"):
        hp.register_op("mk,kn")


@run_on_ranks(2)
@pytest.mark.parametrize("shard", [hp.custom_shard, "local_map"])
def test_functions_of_blocks(shard: Any) -> None:
    mesh = _mesh()
    a, b = _values(5, 4).requires_grad_(), _values(4, 3, seed=1).requires_grad_()
    (a @ b * 2.0).square().sum().backward()
    x = distribute_tensor(leaf(a), mesh, [hp.Shard(0)])
    w = distribute_tensor(leaf(b), mesh, [hp.Replicate()])
    if shard == "local_map":
        product = hp.local_map(_product, [hp.Shard(0)], ([hp.Shard(0)], [hp.Replicate()], None))
    else:
        product = hp.custom_shard(_product, mesh, [hp.Shard(0)], ([hp.Shard(0)], [hp.Replicate()], None))
    out = product(x, w, 2.0)
    assert tuple(out.shape) == (5, 3)
    backward((out.full_tensor() ** 2).sum())
    assert_close(x.grad.full_tensor(), a.grad)
    assert_close(w.grad.full_tensor(), b.grad)
    with pytest.raises(ValueError, match="redistribute_inputs"):
        product(x.redistribute(placements=[hp.Replicate()]), w, 2.0)
    moving = hp.custom_shard(_product, mesh, [hp.Shard(0)], ([hp.Shard(0)], [hp.Replicate()]), True)
    moved = moving(x.redistribute(placements=[hp.Shard(1)]), w)
    assert_close(moved.full_tensor(), (a @ b).detach())
    assert_close(product(ours(a.detach()), ours(b.detach()), 2.0), a @ b * 2.0)


@hp.register_op("bm,bn->mn", reduces={"b": "sum"})
def _outer_of_rows(a: Any, b: Any) -> Any:
    return a.reshape((a.shape[0], a.shape[1])).T @ b.reshape((b.shape[0], b.shape[1]))


@run_on_ranks(2)
@pytest.mark.parametrize(("a", "b"), [(hp.Shard(1), hp.Replicate()), (hp.Shard(0), hp.Shard(0))])
def test_a_registered_function_reads_the_shapes_of_its_blocks(a: Any, b: Any) -> None:
    first, second = _values(3, 5), _values(3, 4, seed=1)
    mesh = _mesh()
    found = _outer_of_rows(distribute_tensor(ours(first), mesh, [a]), distribute_tensor(ours(second), mesh, [b]))
    assert_close(found.full_tensor(), first.T @ second)
