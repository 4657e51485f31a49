"""Element-wise operators and products under every layout."""

import math

import pytest
import torch

from tests.shard.validator import Sample, assert_valid, tensor

only_on = "torch"  # calls PyTorch's operators one by one; MindSpore's own: test_mindspore_rules.py

BINARY = [
    Sample("add", (tensor(5, 3), tensor(5, 3, seed=1))),
    Sample("add", (tensor(5, 3), 2.5)),
    Sample("add", (tensor(5, 3), tensor(3, seed=1)), {"alpha": 2}),
    Sample("sub", (tensor(5, 1), tensor(1, 3, seed=1))),
    Sample("mul", (tensor(5, 3), tensor(5, 3, seed=1))),
    Sample("mul", (tensor(5, 3), 3)),
    Sample("div", (tensor(4, 2), tensor(4, 2, seed=1, low=1.0))),
    Sample("div", (tensor(4, 2), 4.0)),
    Sample("div", (tensor(4, 2), 0)),
    Sample("div", (tensor(4, 2), torch.tensor([0.0, 3.0], dtype=torch.float64)), gradients=False),
    Sample("mul", (tensor(4, 2), math.inf), gradients=False),
    Sample("_foreach_div", ([tensor(4, 2)], 0.0)),
    Sample("_foreach_div", ([tensor(4, 2)], [2.0])),
    Sample("Tensor.__rsub__", (tensor(4, 2), 3.0)),
    Sample("isin", (torch.arange(15).reshape(5, 3), torch.tensor([13, 1, 5]))),
    Sample("isin", (torch.arange(6).reshape(2, 3), torch.arange(3, 9).reshape(2, 3).flip(0)), {"invert": True}),
    Sample("where", (tensor(4, 3) > 0, tensor(4, 3, seed=1), tensor(3, seed=2))),
]
UNARY = [
    Sample(name, (tensor(5, 3, low=0.1),))
    for name in ("exp", "relu", "sigmoid", "neg", "sqrt", "nn.functional.gelu", "nn.functional.silu", "tanh", "clone")
]
IN_PLACE = [
    Sample("Tensor.add_", (tensor(5, 3), tensor(5, 3, seed=1))),
    Sample("Tensor.mul_", (tensor(5, 3), 0.5)),
    Sample("Tensor.exp_", (tensor(5, 3),)),
    Sample("Tensor.copy_", (tensor(5, 3), tensor(5, 3, seed=1))),
    Sample("Tensor.zero_", (tensor(5, 3),)),
]
MATMUL = [
    Sample("mm", (tensor(5, 4), tensor(4, 3, seed=1))),
    Sample("matmul", (tensor(2, 5, 4), tensor(4, 3, seed=1))),
    Sample("matmul", (tensor(2, 1, 5, 4), tensor(3, 4, 2, seed=1))),
    Sample("matmul", (tensor(4), tensor(4, 3, seed=1))),
    Sample("nn.functional.linear", (tensor(2, 3, 4), tensor(5, 4, seed=1), tensor(5, seed=2))),
    Sample("nn.functional.linear", (tensor(3, 4), tensor(5, 4, seed=1))),
    Sample("bmm", (tensor(2, 3, 4), tensor(2, 4, 3, seed=1))),
    Sample("dot", (tensor(5), tensor(5, seed=1))),
]


@pytest.mark.parametrize("samples", [BINARY, UNARY, IN_PLACE, MATMUL], ids=["binary", "unary", "in_place", "matmul"])
def test_same_as_one_device(worlds, samples: list[Sample]) -> None:
    assert_valid(worlds, samples)
    assert torch.get_default_dtype() is torch.float32
