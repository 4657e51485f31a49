"""On MindSpore: a pipeline's backward in two halves, gradients of inputs first and those of weights later."""

from typing import Any

import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.fully_shard.on_mindspore.parity import (
    TOLERANCE,
    Mlp,
    assert_all_sharded,
    assert_same_gradients,
    batch,
    loss_of,
    mesh_of,
    my_part,
    pair,
    parameter,
    values,
)
from tests.world import run_on_ranks, small_or_sweep


@run_on_ranks(2)
@pytest.mark.parametrize("reshard", small_or_sweep([True, False], [True]))
def test_split_backward(reshard) -> None:
    """The graph of two micro-batches is kept, and the schedule says when the gradients are complete."""
    mesh = mesh_of()
    expected, ours = pair(mesh, reshard_after_forward=reshard)
    ours.set_requires_gradient_sync(False)
    losses = []
    for number in range(2):
        x = batch(8, 3, seed=number)
        slopes = []
        for cell, data in ((expected, Tensor(x)), (ours, my_part(x, mesh))):
            data = get_platform().set_tensor_requires_grad(data)
            loss = loss_of(cell(data))
            slopes.append(values(get_platform().grad(loss, data, retain_graph=True)[0]))
            losses.append(loss)
        np.testing.assert_allclose(slopes[1] / mesh.size(), my_part(slopes[0], mesh).asnumpy(), **TOLERANCE)
    assert all(hp.grad_of(one) is None for one in ours.trainable_params())
    for loss in losses:
        hp.backward(loss)
    assert all(hp.grad_of(one) is None for one in ours.trainable_params())
    ours.reduce_gradients()
    assert_same_gradients(expected, ours)
    assert_all_sharded(ours)


_later: list[Any] = []


class InputsFirst(get_platform().Function):
    """A product whose backward leaves the gradient of the weight for later, as zero-bubble schedules have it."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        return ops.matmul(x, weight.T)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, weight = ctx.saved_tensors
        _later.append((ctx.weight, gradient, x))
        return ops.matmul(gradient, weight), None


class LaterLinear(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = parameter(5, 5), parameter(5)

    def construct(self, x: Any) -> Any:
        return ops.tanh(InputsFirst.apply(x, self.weight) + self.bias)


class Later(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.CellList([LaterLinear() for _ in range(3)])


@run_on_ranks(2)
def test_gradients_that_others_write() -> None:
    """Written into ``grad`` of what forward has seen, after backward: reduced like any other."""
    platform, mesh = get_platform(), mesh_of()
    expected, ours = pair(mesh, Later)
    ours.set_requires_gradient_sync(False)
    for number in range(2):
        x = batch(8, 3, seed=number)
        for cell, data in ((expected, Tensor(x)), (ours, my_part(x, mesh))):
            _later.clear()
            hp.backward(loss_of(cell(data)))
            for weight, gradient, then in _later:
                slope, before = Tensor(values(gradient).T @ values(then)), platform.get_grad(weight)
                platform.set_grad(weight, slope if before is None else Tensor(values(before) + values(slope)))
    assert all(hp.grad_of(one) is None for one in ours.trainable_params())
    ours.reduce_gradients()
    assert_same_gradients(expected, ours)
