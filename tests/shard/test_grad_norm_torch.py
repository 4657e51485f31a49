"""PyTorch's own functions that clip gradients, given distributed ones."""

import math

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.core.dtensor.comm_recorder import CommRecorder
from tests.shard.validator import tensor
from tests.world import run_on_ranks


@run_on_ranks(4)
def test_one_reduction_for_all_that_are_spread_alike() -> None:
    square = hp.init_device_mesh("cpu", (2, 2))
    parameters = [
        nn.Parameter(hp.distribute_tensor(tensor(5, 4, seed=number), square, [hp.Shard(0), placement]))
        for number in range(10)
        for placement in (hp.Shard(1), hp.Replicate())
    ]
    for parameter in parameters:
        parameter.grad = parameter.detach().clone()
    with CommRecorder() as recorder:
        nn.utils.clip_grad_norm_(parameters, 1.0)
    assert recorder.counts == {"all_reduce": 2}


@run_on_ranks(4)
@pytest.mark.parametrize("foreach", [None, False, True])
def test_torch_s_own_functions(foreach: bool | None) -> None:
    square = hp.init_device_mesh("cpu", (2, 2))
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
