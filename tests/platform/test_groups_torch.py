"""What is PyTorch's own about groups: who never came, its world group, stores that outlive worlds, its launchers."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import hyper_parallel as hp
from hyper_parallel.core.shard.dispatching import dispatch
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import EXISTING_COMM_GROUPS
from hyper_parallel.platform.torch.communication import collectives, groups
from tests.world import run_on_ranks


@run_on_ranks(4)
def test_a_member_that_never_comes_is_named():
    groups._world_timeout, before = timedelta(seconds=0.3), groups._world_timeout
    try:
        if dist.get_rank() == 2:
            group = groups.make_group([2, 3])
            with pytest.raises(
                RuntimeError, match=r"rank\(s\) \[3\] did not create it within 0.3 s.*create_group\(\[2, 3"
            ):
                collectives.all_reduce(torch.ones(1), group)
            groups.destroy_process_group(group)
            with pytest.raises(ValueError, match="was destroyed"):
                collectives.all_reduce(torch.ones(1), group)
        dist.barrier()
        if dist.get_rank() == 3:  # Made as often on every member, so that the next one has the same name.
            groups.destroy_process_group(groups.make_group([2, 3]))
    finally:
        groups._world_timeout = before
    if dist.get_rank() > 1:
        assert collectives.all_reduce(torch.ones(1), groups.make_group([2, 3])).item() == 2


@pytest.fixture
def lonely_world():
    """No world before and none after, whatever the test does."""
    assert not dist.is_initialized()
    yield
    if dist.is_initialized():
        groups.destroy_process_group()


@run_on_ranks(2)
def test_the_world_is_torch_s_and_a_rank_outside_of_a_group_is_told():
    assert get_platform().create_group(range(2)) is dist.group.WORLD
    assert get_platform().get_backend() == "gloo"
    with pytest.raises(ValueError, match=f"rank {dist.get_rank()} is not a member"):
        groups.barrier(dist.GroupMember.NON_GROUP_MEMBER)


@pytest.mark.usefixtures("lonely_world")
def test_the_backend_fits_the_accelerator(monkeypatch):
    for device_type, backend in (("cpu", "gloo"), ("cuda", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl")):
        monkeypatch.setattr(groups.devices, "get_device_type", lambda device_type=device_type: device_type)
        assert groups._default_backend() == backend


@pytest.mark.usefixtures("lonely_world")
def test_a_world_of_one_again_and_again():
    platform = get_platform()
    store = dist.HashStore()
    for _ in range(3):
        groups.init_process_group("gloo", store=store, rank=0, world_size=1)
        assert platform.create_group([0]) is dist.group.WORLD
        assert collectives.all_reduce(torch.ones(2), None).tolist() == [1, 1]
        groups.destroy_process_group()
        assert not EXISTING_COMM_GROUPS


@pytest.mark.usefixtures("lonely_world")
@pytest.mark.parametrize("join", [groups.init_process_group, dist.init_process_group])
def test_a_world_that_was_left_with_torch_s_own_function_is_forgotten(join):
    for count in range(3):
        join("gloo", store=dist.PrefixStore(str(count), dist.HashStore()), rank=0, world_size=1)
        mesh = hp.init_device_mesh("cpu", (1,))
        assert not dispatch._calls
        assert mesh.get_group() is dist.group.WORLD
        assert list(EXISTING_COMM_GROUPS.values()) == [dist.group.WORLD]
        x = hp.distribute_tensor(torch.ones(2), mesh, [hp.Shard(0)])
        assert (x + x).full_tensor().tolist() == [2, 2]
        assert dispatch._calls
        dist.destroy_process_group()


def leave_and_return() -> None:
    """On each rank of a launcher whose store outlives the world: three worlds, each with a group of the same ranks."""
    for _ in range(3):
        groups.init_process_group("gloo", timeout=timedelta(seconds=100))
        rank = groups.get_rank()
        assert collectives.all_reduce(torch.tensor([1.0]), None).item() == 2
        group = groups.split_group(None, [[1, 0]])
        assert collectives.all_gather_into_tensor(torch.tensor(rank), group).tolist() == [0, 1]
        assert get_platform().create_group([rank]).size() == 1
        groups.barrier()
        groups.destroy_process_group()
    # A program may end while its last groups are still being connected.
    groups.init_process_group("gloo", timeout=timedelta(seconds=100))
    groups.barrier()
    for _ in range(5):
        groups.split_group(None, [[0, 1]])


def test_leaving_the_world_and_coming_back():
    """As under torchrun, whose agent has a store that stays when the worlds of its processes go."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    program = "from tests.platform.test_groups_torch import leave_and_return as f; f()"
    environment = os.environ | {
        **{"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)},
        **{"TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": "1", "HYPER_PARALLEL_PLATFORM": "torch"},
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in ranks]
        assert [process.returncode for process in ranks] == [0, 0], "\n".join(said)
    finally:
        for process in ranks:
            process.kill()
            process.wait()
