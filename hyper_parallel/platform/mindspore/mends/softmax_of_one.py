"""A softmax over one element, which MindSpore 2.10 must not be asked for.

If the first softmax of a process, or the first after an operator has failed, is over a dim of size 1, the gradients of
all that follow are computed as if they were, too::

    mindspore.grad(lambda x: ops.softmax(x, 1).sum())(Tensor(np.ones((2, 1), np.float32)))
    factor = Tensor(np.array([[1.0, 0.0, 0.0]], np.float32))
    mindspore.grad(lambda x: (ops.softmax(x, 1) * factor).sum())(Tensor(np.ones((1, 3), np.float32)))
    # [[0.22, 0, 0]], and should be [[0.22, -0.11, -0.11]]

Distributed tensors do not call it then. Plain tensors do: let the first one have more elements.
"""

from __future__ import annotations

from typing import Any

from mindspore import ops

from hyper_parallel.platform.mindspore.mends import ACTIVE

__all__ = ["softmax"]

_softmax = ops.softmax  # As MindSpore has it: its module is given a replacement later, which looks for DTensors first.


def softmax(input: Any, dim: Any) -> Any:
    if ACTIVE and 1 in input.shape and input.shape[dim] == 1:
        return input - input + 1
    return _softmax(input, dim)
