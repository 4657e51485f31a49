"""Gradients of gradients on MindSpore: refused on a CPU, where a part of them would be missing."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.world import run_on_ranks

REFUSED = r"create_graph=True: MindSpore 2\.10 on a CPU cannot differentiate gradients reliably.*Use Ascend, or PyTorch"


def _fourth_power(x):
    return ((x * x).reshape(1) ** 2).sum()


def test_create_graph_is_an_error_that_says_what_to_do():
    for ask in (
        lambda x: get_platform().grad(_fourth_power(x), [x], create_graph=True),
        lambda x: hp.backward(_fourth_power(x), create_graph=True),
    ):
        x = Tensor(np.array([[2.0]]))
        x.requires_grad_()
        with pytest.raises(RuntimeError, match=REFUSED):
            ask(x)
        (gradient,) = get_platform().grad(_fourth_power(x), [x])
        assert gradient.asnumpy() == 32.0


@run_on_ranks(2)
def test_create_graph_is_an_error_for_distributed_tensors():
    x = hp.distribute_tensor(Tensor(np.ones(3)), hp.init_device_mesh("cpu", (2,)), [hp.Shard(0)])
    x.requires_grad_()
    with pytest.raises(RuntimeError, match=REFUSED):
        (x * x).sum().backward(create_graph=True)
    (x * x).sum().backward()
    np.testing.assert_array_equal(x.grad.full_tensor().asnumpy(), [2.0, 2.0, 2.0])
