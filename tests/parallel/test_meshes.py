"""The mesh of a run as each rank sees it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import hyper_parallel as hp
from hyper_parallel.parallel.degrees import AXES, as_degrees
from hyper_parallel.parallel.meshes import make_meshes
from hyper_parallel.platform.shared.membership import Member, as_member
from tests.commands import command_environment


def _as_rank(rank: int, size: int):
    return as_member(Member(rank, size, hp.get_platform().silent_group))


@pytest.mark.parametrize("rank", range(12))
def test_views(rank):
    with _as_rank(rank, 12):
        fitted, meshes = make_meshes(as_degrees("dp_replicate=2, dp_shard=rest, tp=3"))
        assert fitted.sizes == {"pp": 1, "dp_replicate": 2, "dp_shard": 2, "cp": 1, "tp": 3}
        assert meshes.world.mesh_dim_names == AXES and meshes.world.shape == (1, 2, 2, 1, 3)
        assert meshes.batch_place() == (rank // 3, 4)
        assert meshes.compute.rank_list == tuple(range(rank // 3 * 3, rank // 3 * 3 + 3))
        assert meshes.data.shape == (2, 2, 1)


def test_a_mesh_of_the_user():
    with _as_rank(1, 4):
        mine = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
        fitted, meshes = make_meshes(as_degrees("tp=2"), mine)
        assert str(fitted) == '"dp_shard=2, tp=2"' and meshes.world.shape == (1, 1, 2, 1, 2)
        with pytest.raises(ValueError, match=r"is not what the degrees .*tp=4.* say; give one of the two"):
            make_meshes(as_degrees("tp=4"), mine)
        wrong = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp_shard"))
        with pytest.raises(ValueError, match="in this order"):
            make_meshes(as_degrees("tp=2"), wrong)


def test_a_program_that_nobody_launched_is_a_world_of_one():
    program = """
import hyper_parallel as hp
from hyper_parallel.parallel.degrees import Degrees
from hyper_parallel.parallel.meshes import make_meshes
degrees, meshes = make_meshes(Degrees())
print(degrees, meshes.world.size(), hp.get_platform().get_world_size())
"""
    environment = command_environment(HYPER_PARALLEL_PLATFORM=os.environ["HYPER_PARALLEL_PLATFORM"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment, timeout=120)
    assert done.stdout.strip().splitlines()[-1:] == ['"dp_shard=1" 1 1'], done.stdout + done.stderr
