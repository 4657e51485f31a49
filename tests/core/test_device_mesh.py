"""Device meshes: the arithmetic of ranks and axes without processes, and groups on real worlds."""

from __future__ import annotations

import contextlib
import copy
import doctest
import itertools
import math
import pickle
import socket
import threading
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel.core.dtensor.device_mesh import DeviceMesh, init_device_mesh
from hyper_parallel.core.dtensor.meshes import device_mesh, mesh_context, rank_grid
from hyper_parallel.core.dtensor.meshes.mesh_context import get_current_mesh
from hyper_parallel.platform import get_platform
from tests.world import run_on_ranks

NAMES = ("dp", "cp", "tp", "ep")


def describe(shape, names=None, **options):
    """A mesh without a world."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names, init_backend=False, **options)


@st.composite
def meshes(draw):
    """A named mesh of any shape over any ranks in any order, seen from one of its ranks."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple).filter(lambda s: math.prod(s) <= 48))
    num_ranks = math.prod(shape)
    ranks = draw(st.permutations(range(num_ranks + draw(st.integers(0, 3)))))[:num_ranks]
    return describe(shape, NAMES[: len(shape)], rank_list=ranks, rank=draw(st.sampled_from(ranks)))


@st.composite
def meshes_and_axes(draw):
    mesh = draw(meshes())
    axes = draw(st.permutations(mesh.mesh_dim_names))
    return mesh, tuple(axes[: draw(st.integers(1, mesh.ndim))])


def brute_force_line(mesh, axes, rank):
    """The definition of a line, rank by rank."""
    own = mesh.coordinate_of(rank)
    others = [axis for axis, name in enumerate(mesh.mesh_dim_names) if name not in axes]
    members = [r for r in mesh.rank_list if all(mesh.coordinate_of(r)[axis] == own[axis] for axis in others)]
    return tuple(sorted(members, key=lambda r: [mesh.coordinate_of(r)[mesh.axis_index(axis)] for axis in axes]))


# -------------------------------------------------------------------- properties of any mesh


@settings(max_examples=60, deadline=None)
@given(meshes())
def test_coordinates_are_the_places_in_the_array(mesh):
    for coordinate in np.ndindex(mesh.shape):
        assert mesh.coordinate_of(int(mesh.mesh[coordinate])) == coordinate
    assert mesh.mesh[mesh.get_coordinate()] == mesh.get_rank()
    assert mesh.rank_list == tuple(mesh.mesh.ravel())
    assert (mesh.size(), mesh.ndim) == (mesh.mesh.size, mesh.mesh.ndim)


@settings(max_examples=80, deadline=None)
@given(meshes_and_axes())
def test_lines_groups_and_local_ranks(mesh_and_axes):
    mesh, axes = mesh_and_axes
    for rank in mesh.rank_list:
        line = mesh.line(axes, rank)
        assert line == brute_force_line(mesh, axes, rank)
        positions = mesh.group_positions(axes, rank)
        assert tuple(sorted(line)[position] for position in positions) == line
    own = mesh.line(axes)
    assert own == mesh.line(axes, mesh.get_rank())
    assert own[mesh.get_local_rank(axes)] == mesh.get_rank()
    assert mesh.size(axes) == len(own)
    assert mesh.get_rank_list_along_axis(list(axes)) == list(own)
    lines = mesh.get_ranks_by_axis(axes)
    assert sorted(itertools.chain(*lines)) == sorted(mesh.rank_list)
    assert sorted(map(tuple, lines)) == sorted({mesh.line(axes, rank) for rank in mesh.rank_list})


@settings(max_examples=80, deadline=None)
@given(meshes_and_axes())
def test_sub_meshes_are_lines_and_join_again(mesh_and_axes):
    mesh, axes = mesh_and_axes
    sub = mesh[axes]
    assert sub.mesh_dim_names == axes
    assert sub.shape == tuple(mesh.size(axis) for axis in axes)
    assert sub.rank_list == mesh.line(axes)
    assert sub.root is mesh
    assert mesh[axes] is sub
    for axis in axes:
        assert sub[axis] == mesh[axis]
        assert sub[axis].rank_list == mesh.line(axis)
    assert DeviceMesh.concatenate([mesh[axis] for axis in axes]) == sub
    rest = tuple(name for name in mesh.mesh_dim_names if name not in axes)
    if rest:
        assert DeviceMesh.concatenate([sub, mesh[rest]]) == mesh[axes + rest]


@settings(max_examples=80, deadline=None)
@given(meshes_and_axes())
def test_flattened_axes(mesh_and_axes):
    mesh, axes = mesh_and_axes
    flat = mesh[axes].flatten()
    name = "_".join(axes)
    assert (flat.shape, flat.mesh_dim_names, flat.rank_list) == ((mesh.size(axes),), (name,), mesh.line(axes))
    assert mesh[axes].flatten() is flat
    assert mesh[name] == flat
    rest = tuple(axis for axis in mesh.mesh_dim_names if axis not in axes)
    for mixed in ((name, *rest), (*rest, name)):
        joined = mesh[mixed]
        assert joined.shape == tuple(flat.size() if axis == name else mesh.size(axis) for axis in mixed)
        assert joined.line(name) == flat.rank_list
        assert all(joined.line(axis) == mesh.line(axis) for axis in rest)
    assert pickle.loads(pickle.dumps(mesh))[(name, *rest)] == mesh[(name, *rest)]


@settings(max_examples=60, deadline=None)
@given(meshes(), st.data())
def test_split_axes(mesh, data):
    axis = data.draw(st.sampled_from(mesh.mesh_dim_names))
    first = data.draw(st.sampled_from([size for size in range(1, 5) if mesh.size(axis) % size == 0]))
    sizes = (first, mesh.size(axis) // first)
    split = mesh.unflatten(axis, sizes, ("outer", "inner"))
    at = mesh.axis_index(axis)
    assert split.shape == mesh.shape[:at] + sizes + mesh.shape[at + 1 :]
    assert split.rank_list == mesh.rank_list
    assert split["outer", "inner"].flatten("joined").rank_list == mesh.line(axis)
    assert split["joined"] == mesh["joined"]
    of_sub = mesh[axis].unflatten(axis, sizes, ("outer", "inner"))
    assert of_sub == split["outer", "inner"]
    assert of_sub["inner"] == split["inner"]


@settings(max_examples=40, deadline=None)
@given(meshes_and_axes())
def test_equal_by_content_and_through_pickle(mesh_and_axes):
    mesh, axes = mesh_and_axes
    for one in (mesh, mesh[axes], mesh[axes].flatten("flat")):
        same = DeviceMesh("cpu", one.mesh, one.mesh_dim_names, init_backend=False, rank=one.get_rank())
        again = pickle.loads(pickle.dumps(one))
        assert one == same == again
        assert hash(one) == hash(same) == hash(again)
        assert again.root == mesh
        assert repr(again) == repr(one)
        assert copy.deepcopy(one) is one
        assert copy.copy(one) is one


# -------------------------------------------------------------------- one device, no world


def test_what_a_mesh_is_made_of():
    expected = DeviceMesh("cpu", [[0, 1], [2, 3]], ("dp", "tp"), init_backend=False)
    for ranks in (
        ((0, 1), (2, 3)),
        np.arange(4, dtype=np.uint8).reshape(2, 2),
        get_platform().arange(0, 4).reshape(2, 2),
    ):
        assert DeviceMesh("cpu", ranks, ["dp", "tp"], init_backend=False) == expected
    assert describe([2, 2], ("dp", "tp")) == expected
    assert (expected.device_type, expected.shape, expected.get_coordinate()) == ("cpu", (2, 2), (0, 0))


def test_equality_looks_at_everything():
    mesh = describe((2, 2), ("dp", "tp"))
    others = [
        describe((2, 2)),
        describe((2, 2), ("tp", "dp")),
        describe((4,), ("dp",)),
        describe((1, 2, 2), ("pp", "dp", "tp")),
        describe((2, 2), ("dp", "tp"), rank_list=(0, 2, 1, 3)),
        describe((2, 2), ("dp", "tp"), rank=1),
        init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "tp"), init_backend=False),
        "mesh",
    ]
    assert all(mesh != other for other in others)
    assert len({mesh, *others, describe((2, 2), ("dp", "tp"))}) == len(others) + 1


def test_a_mesh_cannot_be_changed():
    mesh = describe((2,), ("tp",))
    with pytest.raises(AttributeError, match=r"DeviceMesh\('cpu', \(tp=2\), ranks=\[0, 1\]\) is immutable: 'shape'"):
        mesh.shape = (3,)
    with pytest.raises(ValueError, match="read-only"):
        mesh.mesh[0] = 5
    ranks = np.arange(2)
    mesh = DeviceMesh("cpu", ranks, init_backend=False)
    ranks[0] = 7
    assert mesh.rank_list == (0, 1)
    assert weakref.ref(mesh)() is mesh


def test_repr():
    assert repr(describe((2, 2), ("dp", "tp"))) == "DeviceMesh('cpu', (dp=2, tp=2), ranks=[[0, 1], [2, 3]])"
    assert repr(describe((2,))) == "DeviceMesh('cpu', (2,), ranks=[0, 1])"
    assert repr(describe((2,), rank=1)) == "DeviceMesh('cpu', (2,), ranks=[0, 1], rank=1)"
    assert repr(describe((32, 8), ("dp", "tp"))) == "DeviceMesh('cpu', (dp=32, tp=8), ranks=0..255)"
    assert "ranks=[99, 98, 97, 96, 95, 94, 93, 92, ... 0]" in repr(describe((100,), rank_list=range(99, -1, -1)))


def test_axes_by_name_index_and_label():
    mesh = describe((2, 3), ("dp", "tp"))
    assert [mesh.axis_index(axis) for axis in ("dp", "tp", 0, 1, -1, -2, np.int64(1))] == [0, 1, 0, 1, 1, 0, 1]
    assert [mesh.axis_label(axis) for axis in ("dp", 1)] == ["dp", "tp"]
    unnamed = describe((2, 3))
    assert [unnamed.axis_label(axis) for axis in (0, -1)] == ["axis0", "axis1"]
    assert unnamed.axis_index("axis1") == 1
    assert (mesh.size("tp"), mesh.size(-2), mesh.size((0, "tp"))) == (3, 2, 6)


def test_sub_mesh_seen_from_each_rank_and_from_outside():
    assert [describe((2, 2), ("dp", "tp"), rank=rank)["tp"].rank_list for rank in range(4)] == [(0, 1)] * 2 + [
        (2, 3)
    ] * 2
    outside = describe((2, 2), ("dp", "tp"), rank=9)
    assert outside.get_coordinate() is None
    assert outside["tp"].rank_list == (0, 1)
    assert DeviceMesh.concatenate([outside["tp"], outside["dp"]]).rank_list == (0, 2, 1, 3)
    assert outside.get_ranks_by_axis("dp") == [[0, 2], [1, 3]]
    for ask in (outside.line, outside.get_local_rank, outside.get_group, outside.get_rank_list_along_axis):
        with pytest.raises(RuntimeError, match=r"rank 9 is not part of DeviceMesh\('cpu', \(dp=2, tp=2\)"):
            ask("tp")
    with pytest.raises(RuntimeError, match="rank 9 is not part of"):
        outside.get_all_groups()


def test_a_flattened_axis_belongs_to_the_meshes_that_contain_it():
    mesh = describe((2, 2, 2), ("dp", "cp", "tp"))
    mesh["dp", "cp"].flatten()
    assert mesh["cp", "dp", "tp"]["dp_cp"].rank_list == (0, 2, 4, 6)
    with pytest.raises(ValueError, match=r'has no axis \'dp_cp\'; it is a flattened axis, use mesh.root\["dp_cp"\]'):
        mesh["cp", "tp"]["dp_cp"]
    with pytest.raises(ValueError, match=r"axis 'dp' is not independent of \('dp_cp',\)"):
        mesh["dp_cp", "dp"]
    with pytest.raises(ValueError, match=r"cannot be flattened as 'dp_cp': .* has another axis of that name"):
        mesh["cp", "tp"].flatten("dp_cp")
    with pytest.raises(ValueError, match=r"cannot be flattened as 'tp'"):
        mesh["dp", "cp"].flatten("tp")
    assert mesh["tp"].flatten() is mesh["tp"]
    assert mesh["tp"].flatten("model").mesh_dim_names == ("model",)
    assert describe((2, 2)).flatten() == describe((4,))


def test_axes_that_cover_the_mesh_but_bend_each_other_do_not_join():
    mesh = describe((2, 2, 3), ("dp", "cp", "tp"))
    straight = mesh.flatten("all").unflatten("all", (6, 2), ("a", "b"))
    bent = mesh["cp", "dp", "tp"].flatten("other").unflatten("other", (6, 2), ("c", "d"))
    assert DeviceMesh.concatenate([straight["b"], straight["a"]]).shape == (2, 6)
    with pytest.raises(ValueError, match=r"axes of DeviceMesh\('cpu', \(c=6\), .* are not independent"):
        DeviceMesh.concatenate([straight["b"], bent["c"]])


def test_current_mesh_nests_and_is_per_thread():
    outer, inner = describe((2,), ("tp",)), describe((4,), ("dp",))
    seen_elsewhere = []
    assert get_current_mesh() is None
    with outer as entered:
        assert entered is outer
        with inner, outer:
            assert get_current_mesh() is outer
        with contextlib.suppress(KeyError), inner:
            thread = threading.Thread(target=lambda: seen_elsewhere.append(get_current_mesh()))
            thread.start()
            thread.join()
            assert get_current_mesh() is inner
            raise KeyError
        assert get_current_mesh() is outer
    assert get_current_mesh() is None
    assert seen_elsewhere == [None]


def test_examples_in_docstrings():
    for module in (device_mesh, mesh_context, rank_grid):
        result = doctest.testmod(module)
        assert result.attempted > 0
        assert result.failed == 0


def test_a_large_mesh_is_cheap():
    mesh = describe((8, 16, 16, 8), ("pp", "dp", "cp", "tp"))
    sub = mesh["tp", "pp"]
    assert sub.rank_list[:3] == (0, 2048, 4096)
    assert mesh.line(("dp", "cp"))[1] == 8


# -------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: describe((2, 2), rank_list=(0, 1, 2)), ValueError, r"shape \(2, 2\) takes 4 ranks, .* \[0, 1, 2\]"),
        (lambda: describe((2, 0)), ValueError, r"at least one rank on each, not \(2, 0\)"),
        (lambda: describe(()), ValueError, "at least one axis"),
        (lambda: describe(4), TypeError, r"a sequence of ints like \(2, 4\), not 4"),
        (
            lambda: DeviceMesh("cpu", [[0, 1], [2]], init_backend=False),
            ValueError,
            r"equal lengths: \[\[0, 1\], \[2\]\]",
        ),
        (lambda: DeviceMesh("cpu", [], init_backend=False), ValueError, "at least one axis and one rank"),
        (lambda: DeviceMesh("cpu", [0.0, 1.0], init_backend=False), TypeError, "ranks, which are ints"),
        (
            lambda: DeviceMesh("cpu", [0, 1, 0, 2, 2], init_backend=False),
            ValueError,
            r"\(5,\).* repeats ranks \[0, 2\]",
        ),
        (
            lambda: DeviceMesh("cpu", [0, -1], init_backend=False),
            ValueError,
            r"ranks=\[0, -1\]\) has negative ranks \[-1\]",
        ),
        (lambda: DeviceMesh(None, [0], init_backend=False), TypeError, "a string like 'cpu' or 'cuda', not None"),
        (lambda: DeviceMesh("cuda:0", [0], init_backend=False), ValueError, "without an index, not 'cuda:0'"),
        (lambda: describe((2, 2), ("dp",)), ValueError, r"DeviceMesh\(.*\) has 2 axes, but 1 names: \('dp',\)"),
        (lambda: describe((2, 2), ("dp", "dp")), ValueError, r"\('dp', 'dp'\) of DeviceMesh\(.*\) repeat"),
        (lambda: describe((2, 2), ("dp", 1)), TypeError, r"strings like .*, not \('dp', 1\)"),
        (lambda: describe((2,), "x"), TypeError, "strings like .*, not 'x'"),
        (lambda: describe((2,), 3), TypeError, "strings like .*, not 3"),
        (lambda: describe((2,), ("None",)), ValueError, r'DeviceMesh\(.*"None" \(not sharded\)'),
        (lambda: DeviceMesh("cpu", [0], rank=0), ValueError, "takes init_backend=False"),
    ],
)
def test_mistakes_in_building(build, error, message):
    with pytest.raises(error, match=message):
        build()


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda mesh: mesh["pp"], ValueError, "{mesh} has no axis 'pp'"),
        (lambda mesh: mesh["tp", "tp"], ValueError, r"\('tp', 'tp'\) names an axis of {mesh} twice"),
        (lambda mesh: mesh[0], TypeError, r"takes axis names, .* not 0: {mesh}"),
        (lambda mesh: mesh[()], TypeError, r"takes axis names, .* not \(\): {mesh}"),
        (lambda mesh: describe((2, 2))["axis0"], ValueError, "has no axis names, .* give mesh_dim_names"),
        (lambda mesh: mesh.size(2), ValueError, "{mesh} has no axis 2; its axes are 0 to 1"),
        (lambda mesh: mesh.size(-3), ValueError, "{mesh} has no axis -3"),
        (lambda mesh: mesh.size(1.0), TypeError, "an axis of {mesh} is a name or an index, not 1.0"),
        (lambda mesh: mesh.size(True), TypeError, "not True"),
        (lambda mesh: mesh.line(("tp", 1)), ValueError, r"\('tp', 1\) names an axis of {mesh} twice"),
        (lambda mesh: mesh.line(()), ValueError, "no axis of {mesh} was given"),
        (
            lambda mesh: mesh.get_group(),
            ValueError,
            r"{mesh} has 2 axes: say which, get_group\('dp'\), or get_group\(\('dp', 'tp'\)\)",
        ),
        (lambda mesh: mesh.get_local_rank(), ValueError, r"say which, get_local_rank\('dp'\)"),
        (lambda mesh: mesh.coordinate_of(8), ValueError, "rank 8 is not part of {mesh}"),
        (lambda mesh: mesh.line("tp", rank=8), ValueError, "rank 8 is not part of {mesh}"),
        (
            lambda mesh: mesh.unflatten("tp", (3, 2), ("a", "b")),
            ValueError,
            r"axis 'tp' of {mesh} has 4 ranks .* \(3, 2\)",
        ),
        (
            lambda mesh: mesh.unflatten("tp", (2, 2), ("a",)),
            ValueError,
            r"{mesh} split into \(2, 2\) takes 2 names, not \('a',\)",
        ),
        (lambda mesh: mesh.unflatten("tp", (2, 2)), ValueError, "takes 2 names, not None"),
        (
            lambda mesh: mesh.unflatten("tp", (2, 2), ("dp", "b")),
            ValueError,
            r"\('dp', 'dp', 'b'\) of DeviceMesh\(.*repeat",
        ),
        (lambda mesh: mesh.flatten("None"), ValueError, "cannot name an axis"),
        (lambda mesh: DeviceMesh.concatenate([]), ValueError, "at least one mesh"),
        (lambda mesh: DeviceMesh.concatenate([mesh["dp"], "tp"]), TypeError, "concatenate takes meshes, .*, not 'tp'"),
        (lambda mesh: DeviceMesh.concatenate([describe((2,)), describe((2,))]), ValueError, "are not independent"),
        (lambda mesh: DeviceMesh.concatenate([mesh["dp"], mesh]), ValueError, "{mesh} are not independent"),
        (
            lambda mesh: DeviceMesh.concatenate([mesh["dp"], describe((2,), ("x",))]),
            ValueError,
            r"one root; .*dp=2.* out of {mesh}, but .*x=2",
        ),
        (
            lambda mesh: mesh.get_group("tp"),
            RuntimeError,
            "{mesh} was asked for a group, but this process has joined no world",
        ),
        (
            lambda mesh: describe((2,), rank=1).get_group(),
            RuntimeError,
            "describes what rank 1 sees; rank 0 has no group",
        ),
    ],
)
def test_mistakes_in_using(use, error, message):
    mesh = describe((2, 4), ("dp", "tp"))
    shown = r"DeviceMesh\('cpu', \(dp=2, tp=4\), ranks=\[\[0, 1, 2, 3\], \[4, 5, 6, 7\]\]\)"
    with pytest.raises(error, match=message.replace("{mesh}", shown)):
        use(mesh)


# -------------------------------------------------------------------- worlds


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
