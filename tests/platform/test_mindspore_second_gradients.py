"""Gradients of gradients on MindSpore: right, or an error that says what to write instead."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mindspore import Tensor, mint, ops

from hyper_parallel.platform import get_platform

_platform = get_platform()


def _weights(shape: tuple[int, ...]) -> Tensor:
    return Tensor(np.cos(np.arange(np.prod(shape)) + 1.0).reshape(shape))


def _gradients(function: Callable[..., Any], arrays: list[np.ndarray], create_graph: bool) -> tuple[list, tuple]:
    inputs = [Tensor(array) for array in arrays]
    for one in inputs:
        one.requires_grad_()
    result = function(*inputs)
    return inputs, _platform.grad((result * result * _weights(result.shape)).sum(), inputs, create_graph=create_graph)


RIGHT = {
    "reshape": lambda x: x.reshape(9),
    "reshape of a result": lambda x: (x * x).reshape(9),
    "two reshapes of one": lambda x: x.reshape(9) * (x * 2).reshape(9),
    "reshape beside": lambda x: x.exp() + x.reshape(9).reshape(3, 3),
    "sum that keeps dims": lambda x: mint.squeeze(x.sum(0, keepdims=True), 0).exp(),
    "sum at the end": lambda x: x.sin(),
    "maximum that keeps dims": lambda x: mint.amax(x * x, 1, True),
    "transposed": lambda x: x.T * x.T.exp(),
    "slices": lambda x: x[:2] * x[1:],
    "joined": lambda x: mint.cat([x, x * x]),
    "product": lambda x: ops.MatMul()(x, x * x),
    "product with a constant": lambda x: mint.matmul(x, Tensor(np.eye(3) + 1.0)),
    "layer": lambda x: mint.nn.functional.linear(x, x * x, x[0]),
    "repeated": lambda x: ops.broadcast_to(x, (2, 3, 3)),
    "largest": lambda x: ops.topk(x, 3)[0],
}


@pytest.mark.parametrize("name", RIGHT)
def test_second_gradients_are_those_of_differences(name: str) -> None:
    function, random = RIGHT[name], np.random.RandomState(0)
    array, direction, step = (random.rand(3, 3) + 0.5 for _ in range(3))
    (x,), (first,) = _gradients(function, [array], create_graph=True)
    (second,) = _platform.grad((first * Tensor(direction)).sum(), [x])

    def slope(place: np.ndarray) -> float:
        return float((_gradients(function, [place], create_graph=False)[1][0].asnumpy() * direction).sum())

    expected = (slope(array + 1e-5 * step) - slope(array - 1e-5 * step)) / 2e-5
    np.testing.assert_allclose((second.asnumpy() * step).sum(), expected, 1e-5)


LOST = {
    "SumExt": lambda x: x.sum(0),
    "MeanExt": lambda x: x.mean(1),
    "ProdExt": lambda x: mint.prod(x, 1),
    "ReduceMax": lambda x: mint.amax(x, 1),
    "MatMulExt": lambda x: mint.matmul(x, x),
    "Dense": lambda x: mint.nn.functional.linear(x, x),
    "BatchMatMulExt": lambda x: mint.bmm(x.reshape(1, 3, 3), x.reshape(1, 3, 3)),
    "Softmax": lambda x: ops.softmax(x, 1),
    "LogSoftmax": lambda x: ops.log_softmax(x, 1),
    "ReduceStd": lambda x: ops.var(x, 1, 0),
    "ReduceSum": lambda x: ops.nansum(x, 1),
    "ReduceMean": lambda x: ops.mse_loss(x, x * x),
    "Tile": lambda x: ops.tile(x, (2, 1)),
    "Sort": lambda x: ops.sort(x)[0],
    "MatrixDeterminant": lambda x: ops.det(x),
}


@pytest.mark.parametrize("name", LOST)
def test_what_would_be_lost_is_an_error(name: str) -> None:
    array = np.random.RandomState(0).rand(3, 3)
    with pytest.raises(RuntimeError, match=rf"loses a part of the second gradient of {name} on a CPU; .*or use"):
        _gradients(LOST[name], [array], create_graph=True)
    _gradients(LOST[name], [array], create_graph=False)
