"""Operators that users bring: DFunction, DistributedOp, custom_shard, local_map and register_op."""

from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.dtensor.layout import Layout
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
        return Layout.of(x.mesh, (x.cuts[0], weight.cuts[1]))


@run_on_ranks(2)
@pytest.mark.parametrize("rows", [4, 5])
def test_dfunction_on_plain_and_distributed_tensors(rows: int) -> None:
    ProductLayout("scaled_product")
    mesh = _mesh()
    plain = [_values(rows, 3).requires_grad_(), _values(3, 6, seed=1).requires_grad_()]
    expected = ScaledProduct.apply(*plain, scale=3.0, shift=0.5)
    torch.testing.assert_close(expected, plain[0] @ plain[1] * 3.0 + 0.5)
    (expected**2).sum().backward()
    for cuts in ([[hp.Shard(0)], [hp.Replicate()]], [[hp.Replicate()], [hp.Shard(1)]]):
        leaves = [t.detach().clone().requires_grad_() for t in plain]
        x, weight = (hp.distribute_tensor(leaf, mesh, cut) for leaf, cut in zip(leaves, cuts, strict=True))
        out = ScaledProduct.apply(x, weight, 3.0, shift=0.5)
        assert tuple(out.shape) == (rows, 6)
        torch.testing.assert_close(out.full_tensor(), expected.detach())
        (out.full_tensor() ** 2).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), plain[0].grad)
        torch.testing.assert_close(weight.grad.full_tensor(), plain[1].grad)


@run_on_ranks(2)
def test_dfunction_without_a_name_or_an_operator_says_so() -> None:
    x = hp.distribute_tensor(_values(4), _mesh(), [hp.Shard(0)])
    with pytest.raises(ValueError, match="_op_name"):
        NoName.apply(x)
    torch.testing.assert_close(NoName.apply(_values(4)), _values(4) * 2)

    class Unknown(NoName):
        _op_name = "nobody_registered_this"

    with pytest.raises(ValueError, match="nobody_registered_this"):
        Unknown.apply(x)


def _product(a: torch.Tensor, b: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return a @ b * scale


@run_on_ranks(2)
def test_a_rule_in_one_line() -> None:
    mesh = _mesh()
    product = hp.register_op("mk,kn->mn", reduces={"k": "sum"})(_product)
    a, b = _values(5, 4), _values(4, 3, seed=1)
    torch.testing.assert_close(product(a, b, scale=2.0), a @ b * 2.0)
    for cuts, expected in (
        (([hp.Shard(0)], [hp.Replicate()]), hp.Shard(0)),
        (([hp.Shard(1)], [hp.Shard(0)]), hp.Partial()),
        (([hp.Replicate()], [hp.Shard(1)]), hp.Shard(1)),
    ):
        x, y = hp.distribute_tensor(a, mesh, cuts[0]), hp.distribute_tensor(b, mesh, cuts[1])
        out = product(x, y, scale=2.0)
        assert out.placements == (expected,)
        torch.testing.assert_close(out.full_tensor(), a @ b * 2.0)
    with pytest.raises(ValueError, match="dims"):
        product(x, hp.distribute_tensor(_values(4), mesh, [hp.Replicate()]))
    with pytest.raises(ValueError, match="->"):
        hp.register_op("mk,kn")


@run_on_ranks(2)
def test_a_library_operator_gets_a_rule() -> None:
    @torch.library.custom_op("hyper_parallel_test::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(lambda x: torch.empty_like(x))
    hp.register_op("ab->ab")(torch.ops.hyper_parallel_test.twice)
    x = hp.distribute_tensor(_values(5, 3), _mesh(), [hp.Shard(0)])
    out = torch.ops.hyper_parallel_test.twice(x)
    assert out.placements == (hp.Shard(0),)
    torch.testing.assert_close(out.full_tensor(), _values(5, 3) * 2)


@run_on_ranks(2)
@pytest.mark.parametrize("shard", [hp.custom_shard, "local_map"])
def test_functions_of_blocks(shard: Any) -> None:
    mesh = _mesh()
    a, b = _values(5, 4).requires_grad_(), _values(4, 3, seed=1).requires_grad_()
    (a @ b * 2.0).square().sum().backward()
    x = hp.distribute_tensor(a.detach().clone().requires_grad_(), mesh, [hp.Shard(0)])
    w = hp.distribute_tensor(b.detach().clone().requires_grad_(), mesh, [hp.Replicate()])
    if shard == "local_map":
        product = hp.local_map(_product, [hp.Shard(0)], ([hp.Shard(0)], [hp.Replicate()], None))
    else:
        product = hp.custom_shard(_product, mesh, [hp.Shard(0)], ([hp.Shard(0)], [hp.Replicate()], None))
    out = product(x, w, 2.0)
    assert tuple(out.shape) == (5, 3)
    out.full_tensor().square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), a.grad)
    torch.testing.assert_close(w.grad.full_tensor(), b.grad)
    with pytest.raises(ValueError, match="redistribute_inputs"):
        product(x.redistribute(placements=[hp.Replicate()]), w, 2.0)
    moving = hp.custom_shard(_product, mesh, [hp.Shard(0)], ([hp.Shard(0)], [hp.Replicate()]), True)
    moved = moving(x.redistribute(placements=[hp.Shard(1)]), w)
    torch.testing.assert_close(moved.full_tensor(), (a @ b).detach())
    torch.testing.assert_close(product(a.detach(), b.detach(), 2.0), (a @ b * 2.0).detach())
