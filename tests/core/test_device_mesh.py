"""Device meshes: the arithmetic of ranks and axes, without processes."""

from __future__ import annotations

import contextlib
import copy
import doctest
import itertools
import math
import pickle
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
