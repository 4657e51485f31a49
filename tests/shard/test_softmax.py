"""Softmax and its relatives under every layout, also along a cut dim."""

import pytest
import torch

import hyper_parallel as hp
from tests.shard.validator import Sample, assert_valid, tensor
from tests.world import run_on_ranks

only_on = "torch"  # calls PyTorch's operators one by one; MindSpore's own: test_mindspore_rules.py

NAN, INF = float("nan"), float("inf")
ROWS = torch.tensor(
    [
        [1.0, -INF, 2.0, 0.5],
        [-INF, -INF, -INF, -INF],
        [NAN, 1.0, 2.0, 3.0],
        [INF, 1.0, INF, 0.0],
        [1e4, -1e4, 1e4, 0.0],
    ],
    dtype=torch.float64,
)
SAMPLES = [
    Sample("softmax", (tensor(5, 3), 0)),
    Sample("softmax", (tensor(5, 3), -1)),
    Sample("Tensor.softmax", (tensor(5, 3),), {"dim": 1}),
    Sample("nn.functional.softmax", (tensor(2, 5, 3), 1)),
    Sample("nn.functional.softmax", (tensor(5, 3, dtype=torch.float32), 0), {"dtype": torch.float64}),
    Sample("softmax", (torch.arange(5), 0), {"dtype": torch.float64}),
    Sample("softmax", (ROWS, 1)),
    Sample("softmax", (ROWS, 0)),
    Sample("softmax", (tensor(1, 3), 0)),
    Sample("softmax", (tensor(0, 3), 0)),
    Sample("softmax", (torch.tensor(3.0).double(), 0)),
    Sample("special.softmax", (tensor(5, 3), 0)),
    Sample("ops.aten._safe_softmax.default", (ROWS, 1)),
    Sample("nn.functional.softmin", (tensor(5, 3),), {"dim": 0}),
    Sample("nn.functional.softmax", (tensor(5, 3),)),
    Sample("log_softmax", (tensor(5, 3), 0)),
    Sample("nn.functional.log_softmax", (tensor(2, 5, 3), 1)),
    Sample("log_softmax", (ROWS, 1)),
    Sample("log_softmax", (tensor(1, 3), 0)),
    Sample("log_softmax", (tensor(5, 3, dtype=torch.float32), 0, torch.float64)),
    Sample("logsumexp", (tensor(5, 3), 0)),
    Sample("logsumexp", (tensor(5, 3), (0, 1), True)),
    Sample("logsumexp", (tensor(1, 3), 0)),
    Sample("logsumexp", (ROWS, 1)),
    Sample("logsumexp", (ROWS, 0)),
    Sample("logsumexp", (torch.arange(5), 0)),
    Sample("special.logsumexp", (tensor(5, 3), -1)),
]


def test_same_as_one_device(worlds) -> None:
    assert_valid(worlds, SAMPLES)


@run_on_ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    values = tensor(3, 301, high=6.0).to(dtype)
    x = hp.distribute_tensor(values, mesh, [hp.Shard(1)])
    for name in ("softmax", "log_softmax"):
        ours = getattr(x, name)(1).full_tensor()
        assert ours.dtype is dtype
        torch.testing.assert_close(ours, getattr(values, name)(1), rtol=2 * torch.finfo(dtype).eps, atol=0)


@run_on_ranks(2)
def test_a_dim_that_does_not_exist() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    x = hp.distribute_tensor(tensor(5, 3), mesh, [hp.Shard(0)])
    with pytest.raises(IndexError, match="dim 2 is out of range for a distributed tensor of 2 dims"):
        torch.softmax(x, 2)


@run_on_ranks(2)
def test_complex_numbers() -> None:
    """What has no order: a sum of exponentials by rows, and values that are drawn."""
    mesh = hp.init_device_mesh("cpu", (2,))
    plain = torch.complex(tensor(5, 3), tensor(5, 3, seed=1)).requires_grad_()
    expected = plain.logsumexp(0)
    expected.abs().sum().backward()
    for layout in ([hp.Shard(0)], [hp.Shard(1)], [hp.Replicate()], [hp.Partial()]):
        ours = hp.distribute_tensor(plain.detach().clone().requires_grad_(), mesh, layout)
        found = ours.logsumexp(0)
        found.abs().sum().backward()
        torch.testing.assert_close(found.full_tensor(), expected)
        torch.testing.assert_close(ours.grad.full_tensor(), plain.grad)
        with torch.no_grad():
            for drawn in (torch.randn_like(ours), torch.rand_like(ours), ours.clone().reduce_partial().normal_()):
                whole = drawn.full_tensor()
                assert whole.dtype == torch.complex128 and whole.imag.std() > 0.05
