"""A rank of a world in which nobody answers: collectives, distributed tensors with and without memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import hyper_parallel as hp
from hyper_parallel.platform.shared.membership import Member, as_member

platform = hp.get_platform()


@pytest.fixture
def _rank_1_of_3():
    with as_member(Member(1, 3, platform.silent_group)):
        yield


pytestmark = pytest.mark.usefixtures("_rank_1_of_3")


@pytest.mark.parametrize(
    ("op", "gives"), [("sum", [6.0, -9.0]), ("avg", [2.0, -3.0]), ("max", [2.0, -3.0]), ("prod", [8.0, -27.0])]
)
def test_a_reduction_is_that_of_equal_tensors(op, gives):
    assert platform.all_reduce(torch.tensor([2.0, -3.0]), None, op=op).tolist() == gives


def test_a_gather_repeats_and_an_exchange_takes_what_this_rank_gives_itself():
    ones = torch.tensor([1, 2])
    assert platform.all_gather_into_tensor(ones, None).tolist() == [1, 2] * 3
    rows = torch.arange(6).view(6, 1)
    received, _ = platform.all_to_all_single(rows, (6, 1), None)
    assert received.flatten().tolist() == [2, 3] * 3


def test_collectives_need_no_memory_beyond_their_results():
    from hyper_parallel.analysis.memory_log import MemoryLog

    log = MemoryLog()
    with platform.counted(log, "cpu"):
        data = torch.zeros(1000)
        log.begin_counting()
        gathered = platform.all_gather_into_tensor(data, None)
        platform.all_reduce(data, None)
    assert log.peak.num_bytes == 4 * 4000 and gathered.shape == (3000,)


def test_distributed_tensors_without_memory_have_local_shapes_in_backward():
    mesh = hp.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    layer = nn.Linear(6, 10, bias=False, device="meta")  # 4, 4, 2 rows
    hp.parallelize_module(layer, mesh, hp.ColwiseParallel(use_local_output=False), src_data_rank=None)
    y = layer(torch.empty(5, 6, device="meta"))
    assert y.shape == (5, 10) and y.to_local().shape == (5, 4)
    y.view(5, 2, 5).transpose(0, 1).reshape(10, 5).softmax(-1).sum().backward()
    assert layer.weight.grad.shape == (10, 6) and layer.weight.grad.to_local().shape == (4, 6)


def test_writing_in_place_gives_the_tensor_itself():
    mesh = hp.init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
    x = hp.DTensor.from_local(torch.empty(2, 4, device="meta"), mesh, [hp.Shard(0)])
    assert x.mul_(2) is x and x.add_(x) is x
    first, second = x.split(2, 1)
    assert first.shape == second.shape == (6, 2)
