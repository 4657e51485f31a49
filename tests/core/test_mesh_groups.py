"""Device meshes on real worlds: the groups of their axes."""

from __future__ import annotations

import itertools
import socket

import pytest

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh, init_device_mesh
from hyper_parallel.platform import get_platform
from tests.core.test_device_mesh import describe
from tests.world import run_on_ranks

NAMES = ("dp", "cp", "tp", "ep")


def sum_over(group, value):
    platform = get_platform()
    return float(platform.tensor_to_numpy(platform.all_reduce(platform.full((1,), float(value)), group))[0])


def assert_group_is(group, ranks):
    """The ranks are those of the group, and a sum over it, of a different power of two from each rank, says so too."""
    platform = get_platform()
    assert sorted(platform.get_process_group_ranks(group)) == sorted(ranks)
    assert sum_over(group, 2 ** platform.get_rank()) == sum(2**rank for rank in ranks)


@run_on_ranks(2, 4, 8)
def test_groups_of_every_axis_and_of_merged_axes():
    world_size = get_platform().get_world_size()
    shape = {2: (2, 1), 4: (2, 2), 8: (2, 2, 2)}[world_size]
    names = NAMES[: len(shape)]
    in_order = init_device_mesh("cpu", shape, mesh_dim_names=names)
    odd_order = init_device_mesh("cpu", shape, mesh_dim_names=names, rank_list=range(world_size - 1, -1, -1))
    for mesh in (in_order, odd_order):
        for num_axes in range(1, len(names) + 1):
            for axes in itertools.permutations(names, num_axes):
                group = mesh.get_group(axes)
                assert_group_is(group, mesh.line(axes))
                assert mesh.get_group(list(reversed(axes))) is group
                assert mesh[axes].flatten().get_group() is group
        assert mesh.get_all_groups() == [mesh.get_group(axis) for axis in range(mesh.ndim)]
        assert all(mesh[name].get_group() is mesh.get_group(name) for name in names)
    assert odd_order.get_group(names[0]) is in_order.get_group(0)


@run_on_ranks(4)
@pytest.mark.parametrize("ranks", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)])
def test_group_positions_put_a_gather_in_mesh_order(ranks):
    platform = get_platform()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), rank_list=ranks)
    for axes in ("dp", "tp", ("dp", "tp"), ("tp", "dp")):
        mine = platform.full((1,), float(platform.get_rank()))
        gathered = platform.tensor_to_numpy(platform.all_gather_into_tensor(mine, mesh.get_group(axes)))
        assert tuple(gathered[list(mesh.group_positions(axes))]) == mesh.line(axes)


@run_on_ranks(4)
def test_a_mesh_over_a_part_of_the_world():
    rank = get_platform().get_rank()
    mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",), rank_list=(2, 0, 1))
    pair = DeviceMesh("cpu", [3, 1], ("pp",))
    if rank == 3:
        assert mesh.get_coordinate() is None
        for ask in (mesh.get_group, mesh.get_local_rank, mesh.get_all_groups):
            with pytest.raises(
                RuntimeError, match=r"rank 3 is not part of DeviceMesh\('cpu', \(tp=3\), ranks=\[2, 0, 1\]\)"
            ):
                ask()
    else:
        assert mesh.get_local_rank() == (2, 0, 1).index(rank)
        assert_group_is(mesh.get_group("tp"), (0, 1, 2))
    if rank in (1, 3):
        assert pair.get_coordinate() == ((3, 1).index(rank),)
        assert_group_is(pair.get_group(), (1, 3))


@run_on_ranks(8)
def test_overlapping_meshes_made_and_used_in_different_orders():
    rank = get_platform().get_rank()
    meshes = [
        init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")),
        init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp")),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), rank_list=(1, 2, 5, 6)),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"), rank_list=(7, 6, 5, 4)),
    ]
    mine = [mesh for mesh in meshes if mesh.get_coordinate() is not None]
    for mesh in mine:
        for axes in ("tp", "dp", ("dp", "tp")):
            assert_group_is(mesh.get_group(axes), mesh.line(axes))
    if rank in (4, 5, 6, 7):
        assert meshes[3].get_group(("dp", "tp")) is meshes[0].get_group("tp")
        assert meshes[3].get_group("tp") is meshes[1].get_group("tp")


@run_on_ranks(2)
def test_building_a_mesh_does_not_communicate():
    if get_platform().get_rank() == 0:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
        assert mesh["tp"].flatten("alone").get_coordinate() == (0,)
        assert mesh.get_ranks_by_axis("dp") == [[0, 1]]


@run_on_ranks(4)
def test_from_group():
    platform = get_platform()
    rank = platform.get_rank()
    if rank in (0, 1):  # Only one member of each column has made its group before.
        DeviceMesh("cpu", [[0, 1], [2, 3]]).get_group(0)
    columns = platform.split_group(None, [[0, 2], [1, 3]])
    rows = platform.split_group(None, [[0, 1], [2, 3]])
    mesh = DeviceMesh.from_group([columns, rows], "cpu", [[0, 1], [2, 3]], ("dp", "tp"))
    assert mesh == init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert mesh.get_all_groups() == [columns, rows]
    assert_group_is(mesh.get_group("dp"), (rank % 2, rank % 2 + 2))
    assert_group_is(mesh.get_group("tp"), (rank // 2 * 2, rank // 2 * 2 + 1))
    one = DeviceMesh.from_group(rows, "cpu", mesh_dim_names=("tp",))
    assert one == mesh["tp"]
    assert one.get_group() is mesh.get_group("tp")
    with pytest.raises(ValueError, match=r"2 groups, of ranks \[\[.*\]\], needs mesh="):
        DeviceMesh.from_group([columns, rows], "cpu")
    with pytest.raises(ValueError, match=r"one group for each axis of DeviceMesh\('cpu', \(2, 2\).*, not 1"):
        DeviceMesh.from_group([rows], "cpu", [[0, 1], [2, 3]])
    with pytest.raises(ValueError, match=rf"axis 0 of DeviceMesh\(.*\) has ranks .* on rank {rank}; it must have"):
        DeviceMesh.from_group([rows, columns], "cpu", [[0, 1], [2, 3]])
    with pytest.raises(ValueError, match="at least one group"):
        DeviceMesh.from_group([], "cpu")


@run_on_ranks(4)
def test_meshes_must_fit_the_world():
    with pytest.raises(
        ValueError, match=r"shape \(2, 3\).*\('dp', 'tp'\) has 6 ranks, but the world has 4; .* \(2, 2\),"
    ):
        init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"shape \(3,\) has 3 ranks, .* shapes that fit: \(4,\); or give rank_list="):
        init_device_mesh("cpu", (3,))
    with pytest.raises(
        ValueError, match=r"ranks=\[0, 7, 4\]\) has ranks \[4, 7\], but the ranks of this world are 0 to 3"
    ):
        DeviceMesh("cpu", [0, 7, 4])
    plan = describe((64, 8), ("dp", "tp"))
    assert plan.get_coordinate() == (0, get_platform().get_rank())
    with pytest.raises(ValueError, match="the ranks of this world are 0 to 3"):
        plan.get_group("tp")


def sub_mesh_of_this_rank():
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "tp", "pp"), rank_list=(3, 1, 0, 2))
    mesh["dp", "tp"].flatten()
    mesh["tp"].get_group()
    return mesh["tp"]


def use_sub_mesh(mesh):
    inside = mesh.get_coordinate() is not None
    if inside:
        assert_group_is(mesh.get_group(), mesh.rank_list)
    own = mesh.root["dp"]
    assert_group_is(own.get_group(), own.rank_list)
    assert mesh.root["dp_tp"].rank_list == (3, 1, 0, 2)
    return inside


def test_meshes_travel_between_processes(worlds):
    subs = worlds(4).run(sub_mesh_of_this_rank)
    assert [sub.rank_list for sub in subs] == [(0, 2), (3, 1), (0, 2), (3, 1)]
    assert subs[0].root.shape == (2, 2, 1)
    assert subs[1].get_coordinate() is None, "this process has no world, so it is rank 0"
    with pytest.raises(RuntimeError, match="joined no world"):
        subs[0].get_group()
    with pytest.raises(ValueError, match=r"ranks=\[0\]\) is not around the same rank as .*ranks=\[3, 1\]"):
        DeviceMesh.concatenate([subs[1], subs[0].root["pp"]])
    assert worlds(4).run(use_sub_mesh, subs[1]) == [False, True, False, True]


@pytest.fixture
def environment_of_one_rank(monkeypatch):
    """What a launcher would set for a world of one process; the world is left again."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    yield
    get_platform().destroy_process_group()


@pytest.mark.usefixtures("environment_of_one_rank")
def test_building_a_mesh_joins_the_world():
    early = describe((1,), ("tp",))
    with pytest.raises(RuntimeError, match="joined no world"):
        early.get_group()
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    assert get_platform().get_process_group_ranks(mesh.get_group()) == [0]
    assert DeviceMesh("cpu", [0]).get_group() is mesh.get_group()
    assert early.get_group() is mesh.get_group()
    with pytest.raises(ValueError, match=r"has 2 ranks, but the world has 1; shapes that fit: \(1, 1\);"):
        init_device_mesh("cpu", (2, 1))
