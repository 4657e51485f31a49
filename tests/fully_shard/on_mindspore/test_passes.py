"""On MindSpore: unused, frozen and shared parameters, several forwards, recompute, errors in the middle, and gradients
by value_and_grad, the library's and MindSpore's own."""

import warnings
from typing import Any

import mindspore
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.fully_shard.on_mindspore.parity import (
    TOLERANCE,
    AdamW,
    Block,
    Mlp,
    assert_all_sharded,
    assert_same_gradients,
    assert_same_weights,
    batch,
    filled,
    linear,
    loss_of,
    mesh_of,
    my_part,
    named,
    pair,
    parameter,
    shard_blocks,
    units,
    values,
)
from tests.world import run_on_ranks, small_or_sweep


class Sometimes(nn.Cell):
    """A block, one of two others, and one whose result is thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.CellList([Block(3, 5) for _ in range(4)])
        self.never, self.rarely = parameter(3), parameter(3)

    def construct(self, x: Any, which: int, rarely: bool) -> Any:
        x = self.blocks[0](x)
        self.blocks[3](x)
        x = self.blocks[which](x)
        return x * self.rarely if rarely else x


@run_on_ranks(2)
def test_unused_parameters() -> None:
    """Used by no rank: no gradient, as on one device. By one rank: the mean of its gradient and of nothing."""
    mesh = mesh_of()
    rank = get_platform().get_rank()
    expected, ours = pair(mesh, Sometimes)
    for which, rarely in (((1, 1), (False, False)), ((2, 2), (True, False)), ((1, 1), (False, True))):
        hp.zero_grad(ours.trainable_params())
        hp.zero_grad(expected.trainable_params())
        x = batch(4, 3)
        for place in range(2):
            part = Tensor(x[2 * place : 2 * place + 2])
            hp.backward(loss_of(expected(part, which[place], rarely[place])) / 2)
        hp.backward(loss_of(ours(my_part(x, mesh), which[rank], rarely[rank])))
        assert hp.grad_of(ours.never) is None and hp.grad_of(ours.blocks[3].up.weight) is None
        assert_same_gradients(expected, ours)
        assert_all_sharded(ours)


class Frozen(Mlp):
    def __init__(self) -> None:
        super().__init__()
        for one in (*self.blocks[0].trainable_params(), self.blocks[1].up.weight, self.first.bias, self.scale):
            one.requires_grad = False


@run_on_ranks(2)
def test_frozen_parameters() -> None:
    """Gathered, never reduced; later set free."""
    mesh = mesh_of()
    expected, ours = pair(mesh, Frozen)
    optimizers = [AdamW(cell) for cell in (expected, ours)]
    x = batch(8, 3)
    for step in range(3):
        if step == 2:
            for cell in (expected, ours):
                cell.blocks[1].up.weight.requires_grad = True
                cell.blocks[0].up.bias.requires_grad = True
        hp.backward(loss_of(expected(Tensor(x))))
        hp.backward(loss_of(ours(my_part(x, mesh))))
        assert (hp.grad_of(ours.blocks[1].up.weight) is None) == (step < 2)
        assert_same_gradients(expected, ours)
        for optimizer in optimizers:
            optimizer.step()
    assert_same_weights(expected, ours)
    assert_all_sharded(ours)


@run_on_ranks(2)
@pytest.mark.parametrize("reshard", small_or_sweep([True, False], [True]))
def test_several_forwards_then_backward(reshard) -> None:
    mesh = mesh_of()
    expected, ours = pair(mesh, reshard_after_forward=reshard)
    x, y = batch(8, 3), batch(8, 3, seed=1)
    both = ((expected, (Tensor(x), Tensor(y))), (ours, (my_part(x, mesh), my_part(y, mesh))))
    for cell, (a, b) in both:
        hp.backward(loss_of(cell(a)) + loss_of(cell(b)))
    assert_same_gradients(expected, ours)
    for cell, (a, b) in both:
        first, second = cell(a), cell(b)
        hp.backward(loss_of(second))
        hp.backward(loss_of(first), retain_graph=True)
        hp.backward(loss_of(first * 2))
    assert_same_gradients(expected, ours)
    for cell, (a, _) in both:
        hp.zero_grad(cell.trainable_params())
        out = cell(a)
        hp.backward(out[:, 0].mean(), retain_graph=True)
        hp.backward((out[:, 1] ** 2).mean())
    inner = batch(8, 5)
    for cell, part in ((expected, Tensor(inner)), (ours, my_part(inner, mesh))):
        hp.backward(loss_of(cell.blocks[1](cell.blocks[0](cell.blocks[1](part)))))  # twice, and not from the root
    assert_same_gradients(expected, ours)
    assert_all_sharded(ours)


@run_on_ranks(2)
def test_values_and_gradients() -> None:
    """hp.value_and_grad, mindspore.value_and_grad of a function and of a cell, and backward afterwards."""
    mesh = mesh_of()
    expected, ours = pair(mesh)
    x = batch(8, 3)
    mine = my_part(x, mesh)
    weights = ours.trainable_params()
    want = hp.value_and_grad(lambda: loss_of(expected(Tensor(x))), expected.trainable_params())()[1]
    target = Tensor(np.zeros((mine.shape[0], 2)))
    with_loss = nn.WithLossCell(ours, lambda out, _: loss_of(out))
    for run in (
        lambda: hp.value_and_grad(lambda: loss_of(ours(mine)), weights)(),
        lambda: mindspore.value_and_grad(lambda: loss_of(ours(mine)), None, weights)(),
        lambda: mindspore.value_and_grad(with_loss, None, weights)(mine, target),
        lambda: hp.value_and_grad(lambda: loss_of(ours(mine)), weights)(),
    ):
        loss, found = run()
        assert loss.shape == ()
        for name, a, b in zip(named(expected), want, found, strict=True):
            part = named(ours)[name]
            block = b.to_local() if isinstance(b, hp.DTensor) else b
            assert block.shape == part.to_local().shape
            whole = hp.DTensor.from_local(block, mesh, part.placements, shape=part.shape, stride=None)
            np.testing.assert_allclose(values(whole), values(a), **TOLERANCE, err_msg=name)
        assert all(hp.grad_of(one) is None for one in weights)
        assert_all_sharded(ours)
    hp.backward(loss_of(expected(Tensor(x))))
    hp.backward(loss_of(ours(mine)))
    assert_same_gradients(expected, ours)


@run_on_ranks(2)
def test_writes_between_forward_and_backward_are_errors() -> None:
    """An optimizer of MindSpore writes without a trace: values are compared."""
    mesh = mesh_of()
    expected, ours = pair(mesh)
    x = my_part(batch(8, 3), mesh)
    hp.backward(loss_of(ours(x)))
    loss = loss_of(ours(x))
    ours.blocks[1].up.weight.to_local().asnumpy()[...] += 1
    with pytest.raises(
        RuntimeError, match=r"'blocks\.1\.up\.weight' of unit 'blocks\.1' changed between forward and back"
    ):
        hp.backward(loss)
    expected.blocks[1].up.weight.asnumpy()[...] += 1
    hp.zero_grad(ours.trainable_params())
    hp.backward(loss_of(expected(Tensor(batch(8, 3)))))
    hp.backward(loss_of(ours(x)))
    assert_same_gradients(expected, ours)
    assert_all_sharded(ours)


@run_on_ranks(2)
def test_kept_values_are_not_used_after_a_write() -> None:
    mesh = mesh_of()
    expected, ours = pair(mesh, reshard_after_forward=False)
    ours.set_reshard_after_backward(False)
    optimizers = [AdamW(cell) for cell in (expected, ours)]
    x = batch(8, 3)
    for _ in range(3):
        hp.backward(loss_of(expected(Tensor(x))))
        hp.backward(loss_of(ours(my_part(x, mesh))))
        assert all(unit.state == "whole" for unit in units(ours))
        assert_same_gradients(expected, ours)
        for optimizer in optimizers:
            optimizer.step()
    ours.set_reshard_after_backward(True)
    ours.set_reshard_after_forward(True)
    for block in (ours, *ours.blocks):
        block.reshard()
    with get_platform().no_grad():
        np.testing.assert_allclose(values(ours(Tensor(x))), values(expected(Tensor(x))), **TOLERANCE)
    assert_all_sharded(ours)
    ours.blocks[0].unshard(async_op=True).wait()
    assert units(ours.blocks[0])[0].state == "whole"
    ours.blocks[0].reshard()
    assert_all_sharded(ours)


class Traps(Mlp):
    """Raises in forward, in backward, or not at all."""

    in_forward: BaseException | None = None
    in_backward: BaseException | None = None

    def construct(self, x: Any) -> Any:
        x = self.blocks[0](self.first(x))
        x.register_hook(self._on_gradient)
        x = self.blocks[1](x)
        if self.in_forward is not None:
            raise self.in_forward
        return self.last(self.blocks[2](x))

    def _on_gradient(self, gradient: Any) -> Any:
        if self.in_backward is not None:
            raise self.in_backward
        return gradient


@run_on_ranks(2)
@pytest.mark.parametrize(
    "kind", small_or_sweep([ValueError, KeyboardInterrupt, MemoryError], [ValueError, KeyboardInterrupt])
)
def test_errors_leave_a_cell_that_works(kind) -> None:
    error = kind("no")
    mesh = mesh_of()
    expected, ours = pair(mesh, Traps)
    x = batch(8, 3)
    mine = my_part(x, mesh)
    for _ in range(2):
        ours.in_forward = error
        with pytest.raises(kind):
            ours(mine)
        ours.in_forward = None
        assert_all_sharded(ours)
        ours.in_backward = error
        loss = loss_of(ours(mine))
        with pytest.raises(kind):
            hp.backward(loss)
        ours.in_backward = None
        hp.zero_grad(ours.trainable_params())
        hp.zero_grad(expected.trainable_params())
        hp.backward(loss_of(expected(Tensor(x))))
        hp.backward(loss_of(ours(mine)))
        assert_same_gradients(expected, ours)
        assert_all_sharded(ours)


RECOMPUTES = ("outside", "inside", "wrapper inside", "swap", "two outside", "wrapper outside")


class Recomputing(Mlp):
    """Blocks that are computed again in backward, one by one or two together."""

    together = 1

    def construct(self, x: Any) -> Any:
        x = self.first(x)
        for start in range(0, len(self.blocks), self.together):

            def run(x: Any, start: int = start) -> Any:
                for block in list(self.blocks)[start : start + self.together]:
                    x = block(x)
                return x

            x = get_platform().checkpoint(run, x)
        return self.last(x) * self.scale


class InnerRecomputing(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(5, 7)

    def construct(self, x: Any) -> Any:
        return get_platform().checkpoint(self.block, x)


class WithInner(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.CellList([InnerRecomputing() for _ in range(3)])


@run_on_ranks(2)
@pytest.mark.parametrize("kind", small_or_sweep(RECOMPUTES, RECOMPUTES[:4]))
def test_recompute(kind) -> None:
    """Around units, inside of them, and by the wrappers; the units are gathered once more, not twice."""
    mesh = mesh_of()
    make = {"outside": Recomputing, "two outside": Recomputing, "inside": WithInner}.get(kind, Mlp)
    expected, ours = filled(make()), filled(make())
    platform = get_platform()
    if kind == "two outside":
        ours.together = 2
    if make is not Mlp:
        shard_blocks(mesh)(ours)
    else:
        wrap = platform.swap_wrapper if kind == "swap" else platform.ckpt_wrapper
        blocks = []
        for block in list(ours.blocks):
            if kind == "wrapper outside":
                blocks.append(wrap(hp.fully_shard(block, mesh=mesh)))
            else:
                blocks.append(hp.fully_shard(wrap(block), mesh=mesh))
        ours.blocks = nn.CellList(blocks)
        hp.fully_shard(ours, mesh=mesh)
    optimizers = [AdamW(cell) for cell in (expected, ours)]
    x = batch(8, 3)
    for _ in range(2):
        hp.backward(loss_of(expected(Tensor(x))))
        with hp.CommRecorder() as recorder:
            hp.backward(loss_of(ours(my_part(x, mesh))))
        counts = [
            sum(one.op == op for one in recorder.records) for op in ("all_gather_into_tensor", "reduce_scatter_tensor")
        ]
        assert_same_gradients(expected, ours)
        for optimizer in optimizers:
            optimizer.step()
    assert counts == [6, 4], counts  # of the root and the last block backward has the values still
    assert_same_weights(expected, ours)
    assert_all_sharded(ours)


class Outputs(nn.Cell):
    form = "tensor"

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(3, 3), linear(3, 3)

    def construct(self, x: Any) -> Any:
        y = self.b(ops.tanh(self.a(x)))
        return {"dict": {"deep": [{"y": y}, None]}, "tuple": (y, x), "hidden": lambda: y}.get(self.form, y)


def _found(out: Any) -> Any:
    if isinstance(out, dict):
        return out["deep"][0]["y"]
    if isinstance(out, tuple):
        return out[0]
    return out if isinstance(out, Tensor) else out()


class Chain(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.CellList([linear(3, 3), Outputs()])

    def construct(self, x: Any) -> Any:
        return self.blocks[1](self.blocks[0](x))


@run_on_ranks(2)
def test_outputs_in_any_container() -> None:
    mesh = mesh_of()
    for form in ("tensor", "dict", "tuple", "hidden"):
        expected, ours = pair(mesh, Chain)
        x = batch(8, 3)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for cell, data in ((expected, Tensor(x)), (ours, my_part(x, mesh))):
                cell.blocks[1].form = form
                for _ in range(2):
                    hp.backward(loss_of(_found(cell(data))))
        assert_same_gradients(expected, ours)
        told = [str(one.message) for one in told if "stay whole until backward has ended" in str(one.message)]
        assert len(told) == (form == "hidden"), told
        assert_all_sharded(ours)
