"""Fully sharded training of MindSpore's cells against one device: loss, gradients, their norm, weights after steps of
AdamW, in float64."""

from typing import Any

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import hyper_parallel as hp
from hyper_parallel import ColwiseParallel, Replicate, RowwiseParallel
from hyper_parallel.platform import get_platform
from tests.fully_shard.on_mindspore.parity import (
    SINGLE,
    AdamW,
    Block,
    Mlp,
    Norm,
    assert_all_sharded,
    assert_same_gradients,
    batch,
    filled,
    linear,
    loss_of,
    mesh_of,
    my_part,
    pair,
    parameter,
    shard_blocks,
    trains_as_one_device,
    values,
)
from tests.world import run_on_ranks, small_or_sweep


@run_on_ranks(2, sweep=(3, 4))
@pytest.mark.parametrize("reshard", [True, False])
def test_one_shard_axis(reshard) -> None:
    mesh = mesh_of()
    ours = trains_as_one_device(Mlp, shard_blocks(mesh, reshard_after_forward=reshard), batch(12, 3), mesh)
    assert_all_sharded(ours)
    assert ours.first.weight.placements == (hp.Shard(0),)
    assert ours.scale.placements == (hp.Replicate(),)
    assert isinstance(ours.blocks[0], hp.HSDPModule) and isinstance(ours.blocks[0], Block)


@pytest.mark.sweep("mindspore")
@run_on_ranks(4)
@pytest.mark.parametrize("shape", small_or_sweep([(2, 2), (1, 4), (4, 1)], [(2, 2), (1, 4)]))
def test_hybrid(shape) -> None:
    """Replicas of shards, and axes of one rank: where a wrong divisor or a collective with oneself would show."""
    mesh = mesh_of(*shape)
    ours = trains_as_one_device(Mlp, shard_blocks(mesh), batch(8, 3), mesh, num_steps=2)
    assert_all_sharded(ours)
    assert ours.first.weight.placements == (hp.Replicate(), hp.Shard(0))


@run_on_ranks(4)
def test_two_shard_axes() -> None:
    mesh = mesh_of(2, 2, names=("dp", "cp"))
    ours = trains_as_one_device(Mlp, shard_blocks(mesh, shard_axes=("dp", "cp")), batch(8, 3), mesh, num_steps=2)
    assert ours.first.weight._layout.shard_axes == ((0, 1), ())


@run_on_ranks(2, sweep=(3, 4))
def test_other_dims_and_another_order_of_ranks() -> None:
    mesh = mesh_of()
    shard = shard_blocks(mesh, shard_placement_fn=lambda p: hp.Shard(p.ndim - 1))
    ours = trains_as_one_device(Mlp, shard, batch(12, 3), mesh, num_steps=2)
    assert ours.first.weight.placements == (hp.Shard(1),)
    ranks = tuple(reversed(range(mesh.size())))
    turned = hp.init_device_mesh("cpu", (mesh.size(),), mesh_dim_names=("dp",), rank_list=ranks)
    trains_as_one_device(Mlp, shard_blocks(turned), batch(12, 3), turned, num_steps=2)


class Odd(nn.Cell):
    """Parameters without elements, of one element, of several dims, of two dtypes, frozen, and with strides."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing, self.one, self.cube = parameter(0, 3), parameter(1), parameter(2, 3, 4)
        self.single = Parameter(Tensor(np.ones(5, np.float32)))
        self.count = Parameter(Tensor(np.arange(3)), requires_grad=False)
        self.turned = Parameter(Tensor(np.zeros((4, 3))).T)

    def construct(self, x: Any) -> Any:
        y = ops.matmul(x, self.turned) * self.one + self.cube.sum((0, 1)) + self.nothing.sum()
        return y.sum(-1, keepdims=True) * self.single.astype(y.dtype) + self.count.astype(y.dtype).sum()


class Odds(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.CellList([Odd()])
        self.last = linear(5, 2)

    def construct(self, x: Any) -> Any:
        return self.last(self.blocks[0](x))


@pytest.mark.sweep("mindspore")
@run_on_ranks(4, sweep=(2, 3))
def test_odd_parameters() -> None:
    """torch's fully_shard refuses several dtypes in a unit, and parameters that are not contiguous."""
    mesh = mesh_of()
    ours = trains_as_one_device(Odds, shard_blocks(mesh), batch(12, 3), mesh, num_steps=2, tolerance=SINGLE)
    assert_all_sharded(ours)
    expected, ours = pair(mesh, Odds)
    x, y = batch(12, 3, seed=1), batch(12, 3, seed=2)
    for cell, (first, second) in ((expected, (Tensor(x), Tensor(y))), (ours, (my_part(x, mesh), my_part(y, mesh)))):
        hp.backward(loss_of(cell(first)) + loss_of(cell(second)))
    assert_same_gradients(expected, ours, SINGLE)


class Decoder(nn.Cell):
    """Words to words; the head may have the weight of the embedding."""

    def __init__(self, tied: bool = False, vocabulary: int = 11, width: int = 6) -> None:
        super().__init__()
        self.embed = parameter(vocabulary, width)
        self.blocks = nn.CellList([Block(width, 9) for _ in range(2)])
        self.head = linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed

    def construct(self, ids: Any) -> Any:
        x = ops.gather(self.embed, ids, 0)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def _ids(rows: int, words: int = 11) -> np.ndarray:
    return np.arange(rows * 5, dtype=np.int32).reshape(rows, 5) * 7 % words


@run_on_ranks(4)
def test_tensor_parallelism_inside() -> None:
    """Both cut the same dim: tensor parallelism first, then the data axis the block that is left."""
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    plan = {"head": ColwiseParallel(output_layouts=Replicate())}
    for number in range(2):
        plan |= {f"blocks.{number}.up": ColwiseParallel(), f"blocks.{number}.down": RowwiseParallel()}

    def shard(cell: nn.Cell) -> None:
        hp.parallelize_module(cell, mesh["tp"], plan)
        shard_blocks(mesh["dp"])(cell)

    ours = trains_as_one_device(Decoder, shard, _ids(4), mesh["dp"], num_steps=2)
    assert ours.blocks[0].up.weight._layout.described_dims() == "[tp*dp, -]"
    assert ours.blocks[0].down.weight._layout.described_dims() == "[dp, tp]"
    assert ours.blocks[0].norm.weight._layout.described_dims() == "[dp]"
    assert_all_sharded(ours)


@run_on_ranks(2)
@pytest.mark.parametrize("own_units", [False, True])
def test_tied_across_units(own_units) -> None:
    """torch's fully_shard refuses a parameter that two units have (ValueError since 2.13)."""
    mesh = mesh_of()

    def shard(cell: nn.Cell) -> None:
        if own_units:
            hp.fully_shard(cell.head, mesh=mesh)
        shard_blocks(mesh)(cell)

    ours = trains_as_one_device(lambda: Decoder(tied=True), shard, _ids(4), mesh, num_steps=2)
    assert ours.head.weight is ours.embed
    assert_all_sharded(ours)


@run_on_ranks(2, sweep=(3,))
@pytest.mark.parametrize("units", small_or_sweep(["auto", None], ["auto"]))
def test_replicate_and_automatic_units(units) -> None:
    mesh = mesh_of()
    for shard in (hp.replicate, hp.fully_shard):
        ours = trains_as_one_device(
            Mlp, lambda cell, shard=shard: shard(cell, mesh=mesh, units=units), batch(12, 3), mesh, num_steps=2
        )
        assert ours.first.weight.placements == ((hp.Replicate(),) if shard is hp.replicate else (hp.Shard(0),))
        assert isinstance(ours.blocks[1], hp.HSDPModule) == (units == "auto")


MODES = ("keep", "all_reduce_last", "by hand", "reduce")
ACCUMULATIONS = [(mode, shape) for shape in ((2, 2), (4,)) for mode in MODES]


@pytest.mark.sweep("mindspore")
@run_on_ranks(4)
@pytest.mark.parametrize("case", small_or_sweep(ACCUMULATIONS, ACCUMULATIONS[:3]), ids=str)
def test_accumulation(case) -> None:
    """Micro-batches of one step: reduced each time, kept whole, between replicas at the last, or when told."""
    mode, shape = case
    mesh = mesh_of(*shape)
    expected, ours = filled(Mlp()), filled(Mlp())
    shard_blocks(mesh)(ours)
    optimizers = [AdamW(cell) for cell in (expected, ours)]
    for _ in range(2):
        if mode == "by hand":
            ours.set_is_last_backward(False)
        for number in range(3):
            if mode == "keep":
                ours.set_requires_gradient_sync(number == 2)
            elif mode == "all_reduce_last":
                ours.set_requires_all_reduce(number == 2)
            x = batch(8, 3, seed=number)
            hp.backward(loss_of(expected(Tensor(x))) / 3)
            hp.backward(loss_of(ours(my_part(x, mesh))) / 3)
            if mode == "by hand" or (mode != "reduce" and number < 2):
                assert all(hp.grad_of(one) is None for one in ours.trainable_params())
        if mode == "by hand":
            ours.reduce_gradients()
        assert_same_gradients(expected, ours)
        for optimizer in optimizers:
            optimizer.step()
    assert_all_sharded(ours)


@pytest.mark.sweep("mindspore")
@run_on_ranks(4)
def test_a_part_on_each_of_two_neighbours() -> None:
    mesh = mesh_of()
    ours = trains_as_one_device(Mlp, shard_blocks(mesh, reshard_after_forward=2), batch(8, 3), mesh, num_steps=3)
    assert_all_sharded(ours)


class HeadNorm(nn.Cell):
    """A plain norm between two projections that are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = linear(6, 8), Norm(8), linear(8, 6)

    def construct(self, x: Any) -> Any:
        return self.down(self.norm(self.up(x)))


@run_on_ranks(4)
def test_plain_parameters_on_cut_activations_are_found() -> None:
    """A gathered parameter counts as the parameter that it is."""
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    cell = hp.parallelize_module(filled(HeadNorm()), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for one in ("weight", "bias"):
        setattr(cell.norm, one, parameter(4))
    hp.fully_shard(cell, mesh=mesh["dp"])
    with pytest.raises(RuntimeError, match=r"computed with the plain parameter.*'norm\.(weight|bias)' of shape \(4,\)"):
        cell(Tensor(batch(2, 6)))


@run_on_ranks(2)
def test_sums_and_means_over_unequal_counts() -> None:
    mesh = mesh_of()
    expected, ours = filled(Mlp()), filled(Mlp())
    shard_blocks(mesh)(ours)
    x = batch(8, 3)
    mine = my_part(x, mesh)
    found = {}
    for kind in ("avg", "sum"):
        ours.set_reduce_op_type(kind)
        hp.backward(loss_of(ours(mine)))
        found[kind] = values(hp.grad_of(ours.first.weight))
        hp.zero_grad(ours.trainable_params())
    np.testing.assert_allclose(found["sum"], 2 * found["avg"], rtol=1e-12)
    ours.set_reduce_op_type("avg")
    rows = slice(0, 3) if get_platform().get_rank() == 0 else slice(3, 8)
    hp.backward((expected(Tensor(x)) ** 2).sum() / 8)
    mine = Tensor(np.ascontiguousarray(x[rows]))
    hp.backward(hp.share_of_mean((ours(mine) ** 2).sum(), mine.shape[0], mesh))
    assert_same_gradients(expected, ours)
