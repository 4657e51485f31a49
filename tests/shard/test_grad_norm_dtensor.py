"""The norm of all gradients and clipping by it, over any mix of distributed and plain tensors."""

import math
from typing import Any

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.core.dtensor.comm_recorder import CommRecorder
from hyper_parallel.platform import get_platform
from tests.frameworks import assert_close, dist, distribute_tensor, dtype_of, grad_of, leaf, ours, theirs
from tests.shard.validator import tensor
from tests.world import run_on_ranks

ORDERS = [2.0, 1.0, 3.0, 0.5, 0.0, math.inf, -math.inf]


def _meshes() -> tuple[hp.DeviceMesh, hp.DeviceMesh]:
    square = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    line = hp.init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
    return square, line


def _mixture(dtype: torch.dtype = torch.float64) -> tuple[list[torch.Tensor], list[Any]]:
    """Plain tensors of PyTorch, and the same ones on two meshes, uneven, whole, pending or plain."""
    square, line = _meshes()
    shapes = [(5, 3), (4,), (3, 3), (7, 2), (1,), (2, 3), (6, 2)]
    plain = [tensor(*shape, seed=2, low=0.2).to(dtype) for shape in shapes]
    mixed = [
        distribute_tensor(plain[0], square, [hp.Shard(0), hp.Shard(1)]),
        distribute_tensor(plain[1], square, [hp.Replicate(), hp.Shard(0)]),
        distribute_tensor(plain[2], square, [hp.Replicate(), hp.Replicate()]),
        distribute_tensor(plain[3], line, [hp.Shard(0)]),
        distribute_tensor(plain[4], line, [hp.Shard(0)]),
        distribute_tensor(plain[5], square, [hp.Partial(), hp.Shard(0)]),
        ours(plain[6].clone()),
    ]
    return plain, mixed


def _parameter(value: torch.Tensor, *placed: Any) -> Any:
    return get_platform().as_parameter(distribute_tensor(value, *placed), True)


@run_on_ranks(4)
def test_total_norm_of_a_mixture() -> None:
    plain, mixed = _mixture()
    for order in ORDERS:
        expected = nn.utils.get_total_norm(plain, order)
        found = get_platform().get_total_norm(mixed, order)
        assert type(found) is get_platform().Tensor and found.ndim == 0
        assert_close(found, expected, msg=lambda text, order=order: f"order {order}: {text}")
        everywhere = [None] * 4
        dist.all_gather_object(everywhere, theirs(found).item())
        assert len(set(everywhere)) == 1, "equal to the bit on all ranks"


@run_on_ranks(4)
def test_one_reduction_for_all_that_are_spread_alike() -> None:
    square, _ = _meshes()
    parameters = [
        _parameter(tensor(5, 4, seed=number), square, [hp.Shard(0), placement])
        for number in range(10)
        for placement in (hp.Shard(1), hp.Replicate())
    ]
    for parameter in parameters:
        parameter.grad = distribute_tensor(tensor(5, 4), square, parameter.layout)
    with CommRecorder() as recorder:
        get_platform().clip_grad_norm_(parameters, 1.0)
    assert recorder.counts == {"all_reduce": 2}


@run_on_ranks(4)
def test_clipping() -> None:
    for order in (2.0, math.inf):
        for foreach in (None, False, True):
            values, cut = _mixture()
            plain = [nn.Parameter(torch.zeros_like(value)) for value in values]
            mixed = [
                _parameter(value, one.device_mesh, one.layout) if isinstance(one, hp.DTensor) else leaf(value)
                for value, one in zip(values, cut, strict=True)
            ]
            for parameter, mine, value, one in zip(plain, mixed, values, cut, strict=True):
                parameter.grad = value.clone()
                get_platform().set_grad(mine, one)
            expected = nn.utils.clip_grad_norm_(plain, 1.5, order, foreach=foreach)
            found = get_platform().clip_grad_norm_(mixed, 1.5, order, foreach=foreach)
            assert_close(found, expected)
            for mine, want in zip(mixed, plain, strict=True):
                gradient = grad_of(mine)
                assert_close(gradient.full_tensor() if isinstance(mine, hp.DTensor) else gradient, want.grad)


@run_on_ranks(4)
def test_half_precision_is_added_up_in_float32() -> None:
    plain, mixed = _mixture(torch.bfloat16)
    exact = nn.utils.get_total_norm([value.double() for value in plain])
    found = get_platform().get_total_norm(mixed)
    assert dtype_of(found) == nn.utils.get_total_norm(plain).dtype
    assert_close(theirs(found).double(), exact, rtol=1e-2, atol=0)


@run_on_ranks(4)
def test_non_finite_norms() -> None:
    square, _ = _meshes()
    for order in (2.0, math.inf):
        for bad in (math.nan, math.inf):
            value = tensor(5, 4)
            value[4, 3] = bad  # in the block of one rank only
            parameter = _parameter(tensor(5, 4), square, [hp.Shard(0), hp.Shard(1)])
            parameter.grad = distribute_tensor(value, square, parameter.layout)
            said = rf"order {order} of 1 gradients is {bad}, .*error_if_nonfinite=False"
            with pytest.raises(RuntimeError, match=said):
                get_platform().clip_grad_norm_([parameter], 1.0, order, error_if_nonfinite=True)
            found = theirs(get_platform().clip_grad_norm_([parameter], 1.0, order)).item()
            assert math.isnan(found) if math.isnan(bad) else math.isinf(found)
