"""The norm of all gradients and clipping by it, over any mix of distributed and plain tensors."""

import math

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.core.dtensor.comm_recorder import CommRecorder
from hyper_parallel.platform import get_platform
from tests.shard.validator import tensor
from tests.world import run_on_ranks

ORDERS = [2.0, 1.0, 3.0, 0.5, 0.0, math.inf, -math.inf]


def _meshes():
    square = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = hp.init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    return square, line


def _mixture(dtype: torch.dtype = torch.float64) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Plain tensors, and the same ones on two meshes, uneven, whole, pending or plain."""
    square, line = _meshes()
    shapes = [(5, 3), (4,), (3, 3), (7, 2), (1,), (2, 3), (6, 2)]
    plain = [tensor(*shape, seed=2, low=0.2).to(dtype) for shape in shapes]
    ours = [
        hp.distribute_tensor(plain[0], square, [hp.Shard(0), hp.Shard(1)]),
        hp.distribute_tensor(plain[1], square, [hp.Replicate(), hp.Shard(0)]),
        hp.distribute_tensor(plain[2], square, [hp.Replicate(), hp.Replicate()]),
        hp.distribute_tensor(plain[3], line, [hp.Shard(0)]),
        hp.distribute_tensor(plain[4], line, [hp.Shard(0)]),
        hp.distribute_tensor(plain[5], square, [hp.Partial(), hp.Shard(0)]),
        plain[6].clone(),
    ]
    return plain, ours


@run_on_ranks(4)
@pytest.mark.parametrize("order", ORDERS)
def test_total_norm_of_a_mixture(order: float) -> None:
    platform = get_platform()
    plain, ours = _mixture()
    expected = nn.utils.get_total_norm(plain, order)
    found = platform.get_total_norm(ours, order)
    assert type(found) is torch.Tensor and found.ndim == 0
    torch.testing.assert_close(found, expected)
    everywhere = [None] * 4
    torch.distributed.all_gather_object(everywhere, found.item())
    assert len(set(everywhere)) == 1, "equal to the bit on all ranks"


@run_on_ranks(4)
def test_one_reduction_for_all_that_are_spread_alike() -> None:
    square, _ = _meshes()
    parameters = [
        nn.Parameter(hp.distribute_tensor(tensor(5, 4, seed=number), square, [hp.Shard(0), placement]))
        for number in range(10)
        for placement in (hp.Shard(1), hp.Replicate())
    ]
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()
    with CommRecorder() as recorder:
        get_platform().clip_grad_norm_(parameters, 1.0)
    assert recorder.counts == {"all_reduce": 2}
    with CommRecorder() as recorder:
        nn.utils.clip_grad_norm_(parameters, 1.0)
    assert recorder.counts == {"all_reduce": 2}


@run_on_ranks(4)
@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_clipping(foreach: bool | None, order: float) -> None:
    values, cut = _mixture()
    plain = [nn.Parameter(torch.zeros_like(value)) for value in values]
    ours = [nn.Parameter(torch.zeros_like(value if isinstance(value, hp.DTensor) else value.clone())) for value in cut]
    for parameter, value in zip([*plain, *ours], [*values, *cut], strict=True):
        parameter.grad = value.clone()
    expected = nn.utils.clip_grad_norm_(plain, 1.5, order, foreach=foreach)
    found = get_platform().clip_grad_norm_(ours, 1.5, order, foreach=foreach)
    torch.testing.assert_close(found, expected)
    for mine, want in zip(ours, plain, strict=True):
        whole = mine.grad.full_tensor() if isinstance(mine, hp.DTensor) else mine.grad
        torch.testing.assert_close(whole, want.grad)


@run_on_ranks(4)
def test_half_precision_is_added_up_in_float32() -> None:
    plain, ours = _mixture(torch.bfloat16)
    exact = nn.utils.get_total_norm([value.double() for value in plain])
    found = get_platform().get_total_norm(ours)
    assert found.dtype == nn.utils.get_total_norm(plain).dtype
    torch.testing.assert_close(found.double(), exact, rtol=1e-2, atol=0)


@run_on_ranks(4)
@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_norms(order: float, bad: float) -> None:
    square, _ = _meshes()
    value = tensor(5, 4)
    value[4, 3] = bad  # in the block of one rank only
    parameter = nn.Parameter(hp.distribute_tensor(tensor(5, 4), square, [hp.Shard(0), hp.Shard(1)]))
    parameter.grad = hp.distribute_tensor(value, square, parameter.layout)
    with pytest.raises(RuntimeError, match=rf"order {order} of 1 gradients is {bad}, .*error_if_nonfinite=False"):
        get_platform().clip_grad_norm_([parameter], 1.0, order, error_if_nonfinite=True)
    found = get_platform().clip_grad_norm_([parameter], 1.0, order)
    assert math.isnan(found) if math.isnan(bad) else math.isinf(found)


@run_on_ranks(4)
@pytest.mark.parametrize("foreach", [None, False, True])
def test_torch_s_own_functions(foreach: bool | None) -> None:
    square, _ = _meshes()
    values = [tensor(5, 4), tensor(3), tensor(1, 2)]
    placements = [[hp.Shard(0), hp.Shard(1)], [hp.Replicate(), hp.Shard(0)], [hp.Replicate(), hp.Replicate()]]
    plain = [nn.Parameter(torch.zeros_like(value)) for value in values]
    ours = [
        nn.Parameter(hp.distribute_tensor(torch.zeros_like(value), square, placement))
        for value, placement in zip(values, placements, strict=True)
    ]
    for order in (2.0, 1.0, math.inf):
        for parameter, mine, value in zip(plain, ours, values, strict=True):
            parameter.grad = value.clone()
            mine.grad = hp.distribute_tensor(value, square, mine.layout)
        expected = nn.utils.clip_grad_norm_(plain, 1.0, order, foreach=foreach)
        found = nn.utils.clip_grad_norm_(ours, 1.0, order, foreach=foreach)
        torch.testing.assert_close(found.full_tensor(), expected)
        nn.utils.clip_grad_value_(plain, 0.2, foreach=foreach)
        nn.utils.clip_grad_value_(ours, 0.2, foreach=foreach)
        for mine, want in zip(ours, plain, strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), want.grad)
