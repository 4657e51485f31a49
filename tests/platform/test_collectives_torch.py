"""What is PyTorch's own about collectives: the switch of the comparison, conjugated tensors, types of its own."""

from __future__ import annotations

import os
import runpy
import signal

import pytest
import torch
import torch.distributed as dist

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.checks import collective_checks, collective_observers
from hyper_parallel.platform.torch.communication import collectives, differentiable, messages
from tests.world import RanksFailed, run_on_ranks


def test_the_environment_turns_the_comparison_on(monkeypatch):
    assert collectives.COMPARES_RANKS is collective_checks.COMPARES_RANKS is False
    for value, expected in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("HYPER_PARALLEL_CHECK_COLLECTIVES", value)
        assert runpy.run_path(collective_checks.__file__)["COMPARES_RANKS"] is expected


def test_the_platform_calls_are_these():
    platform = get_platform()
    for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "all_to_all_single"):
        assert getattr(platform, name) is getattr(collectives, name)
    for name in messages.__all__:
        assert getattr(platform, name) is getattr(messages, name)
    assert collectives.observers is collective_observers.observers


@run_on_ranks(2)
def test_one_element_of_a_strided_tensor_travels() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    for dtype in (torch.complex128, torch.complex64, torch.bfloat16, torch.bool, torch.uint16):
        value = torch.ones(2, 2).to(dtype)[:, 0]
        block = value.narrow(0, mesh.get_local_rank(), 1)
        assert block.is_contiguous() and block.stride() == (2,)
        assert torch.equal(hp.DTensor.from_local(block, mesh, [hp.Shard(0)]).full_tensor(), value)


@run_on_ranks(2)
def test_types_without_arithmetic_are_not_reduced():
    with pytest.raises(ValueError, match="has no arithmetic; cast"):
        collectives.all_reduce(torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), None)


@run_on_ranks(2)
def test_a_group_of_torch_that_this_rank_is_not_in_is_an_error():
    group = dist.new_group([0])
    if dist.get_rank() == 1:
        with pytest.raises(ValueError, match=r"rank 1 is not a member of this group; only members use it"):
            differentiable.vary(torch.ones(1), group)


def _lose_rank_2():
    platform, mesh = get_platform(), hp.init_device_mesh("cpu", (3,))
    value = hp.ones((5, 3), mesh, [hp.Shard(0)], requires_grad=True)
    result = value.redistribute(placements=[hp.Shard(1)])
    uses = [
        lambda: platform.all_reduce(torch.ones(3), None),
        lambda: value.full_tensor(),
        lambda: (result * result).sum().backward(),
        lambda: platform.barrier(),
        lambda: platform.all_gather_object([None] * 3, "here"),
    ]
    pids = [None] * 3
    platform.all_gather_object(pids, os.getpid())
    if dist.get_rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    for use in uses:
        with pytest.raises(RuntimeError, match=rf"on rank {dist.get_rank()}: rank 2 \(process {pids[2]}\) has ended: "):
            use()


def test_a_rank_that_was_killed_is_named(worlds):
    with pytest.raises(RanksFailed) as caught:
        worlds(3).run(_lose_rank_2)
    outcome = caught.value.outcome
    assert outcome.died == {2: -signal.SIGKILL} and not outcome.raised and not outcome.silent, str(caught.value)
