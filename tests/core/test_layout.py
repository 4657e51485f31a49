"""Placements and layouts: both spellings, interning, who holds what, texts and mistakes; no processes."""

from __future__ import annotations

import copy
import json
import math
import pickle
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel import DeviceMesh, Layout, Partial, Replicate, Shard
from hyper_parallel.core.dtensor.device_mesh import init_device_mesh
from hyper_parallel.core.dtensor.layout import chunk_interval
from hyper_parallel.core.dtensor.placement_types import REDUCE_OPS, Placement
from hyper_parallel.core.utils import compute_local_shape_and_global_offset
from tests.core.layout_cases import layout_specs
from tests.frameworks import torch

only_on = "torch"  # once is enough: no framework takes part

MESHES = [(2,), (4,), (2, 2), (2, 4), (4, 2), (2, 2, 2), (3, 1, 2)]
NAMES = ("dp", "cp", "tp")


def describe(shape, **options):
    return init_device_mesh("cpu", shape, mesh_dim_names=NAMES[: len(shape)], init_backend=False, **options)


@st.composite
def layouts(draw, reductions=REDUCE_OPS):
    mesh = describe(draw(st.sampled_from(MESHES)))
    return Layout.of(mesh, *draw(layout_specs(mesh.ndim, draw(st.integers(0, 3)), reductions)))


def shapes_for(layout):
    return st.tuples(*[st.sampled_from((0, 1, 2, 3, 5, 7, 8, 13)) for _ in range(layout.ndim)])


# ---------------------------------------------------------------- properties of any layout


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.data())
def test_blocks_tile_the_tensor_exactly(data):
    layout = data.draw(layouts())
    shape = data.draw(shapes_for(layout))
    mesh = layout.mesh
    cut = [axis for axes in layout.shard_axes for axis in axes]
    copies = math.prod(size for axis, size in enumerate(mesh.shape) if axis not in cut)
    times_held = np.zeros(shape, dtype=int)
    for coordinate in np.ndindex(mesh.shape):
        offsets, lengths = layout.local_region(shape, coordinate)
        assert (lengths, offsets) == (layout.local_shape(shape, coordinate), layout.local_offset(shape, coordinate))
        times_held[tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))] += 1
        rank = int(mesh.mesh[coordinate])
        assert compute_local_shape_and_global_offset(shape, mesh, layout, rank) == (lengths, offsets)
    assert (times_held == copies).all()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(layouts())
def test_every_spelling_leads_back(layout):
    mesh, ndim = layout.mesh, layout.ndim
    assert Layout.from_placements(mesh, layout.placements, ndim) is layout
    assert Layout.resolve(mesh, list(layout.placements), ndim) is layout
    assert Layout.resolve(mesh, layout, ndim) is layout
    assert Layout.from_aliases(mesh, layout.alias_tensor_map, layout.partials) is layout
    assert Layout.from_dict(json.loads(json.dumps(layout.to_dict()))) is layout
    assert pickle.loads(pickle.dumps(layout)) is layout
    assert copy.copy(layout) is layout and copy.deepcopy([layout])[0] is layout
    for position, alias in zip(layout.tensor_map, layout.alias_tensor_map, strict=True):
        positions = () if position == -1 else (position,) if isinstance(position, int) else position
        aliases = () if alias == "None" else (alias,) if isinstance(alias, str) else alias
        assert tuple(mesh.mesh_dim_names[mesh.ndim - 1 - place] for place in positions) == aliases


@settings(max_examples=100, deadline=None, derandomize=True)
@given(layouts())
def test_the_layout_of_the_gradient(layout):
    gradient = layout.gradient()
    assert gradient.shard_axes == layout.shard_axes and not gradient.has_partial
    assert gradient.gradient() is gradient
    assert (gradient is layout) == (not layout.has_partial)
    for mine, its in zip(layout.placements, gradient.placements, strict=True):
        assert its == (Replicate() if mine.is_partial() else mine)
    assert layout.replicated().is_replicated
    assert layout.with_partials(layout.partials) is layout


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(0, 40), st.integers(1, 9))
def test_the_cut_is_that_of_torch_chunk(size, parts):
    blocks = [block.numel() for block in torch.arange(size).chunk(parts)] if size else []
    blocks += [0] * (parts - len(blocks))
    assert [chunk_interval(size, parts, index)[1] for index in range(parts)] == blocks
    starts = [chunk_interval(size, parts, index)[0] for index in range(parts)]
    assert starts == [sum(blocks[:index]) for index in range(parts)]


# ---------------------------------------------------------------- spelling


def test_the_order_of_cutting_matters():
    mesh = describe((2, 2))
    first, second = (Layout.from_aliases(mesh, (axes,)) for axes in (("dp", "cp"), ("cp", "dp")))
    assert first is not second
    assert first.placements == (Shard(0), Shard(0))
    assert second.placements == (Shard(0, order=1), Shard(0, order=0))
    assert [first.local_offset((8,), place) for place in np.ndindex(2, 2)] == [(0,), (2,), (4,), (6,)]
    assert [second.local_offset((8,), place) for place in np.ndindex(2, 2)] == [(0,), (4,), (2,), (6,)]


def test_the_spelling_of_hyper_parallel_1():
    layout = Layout((2, 2), ("dp", "tp"), init_backend=False)
    assert layout("dp", "None").placements == (Shard(0), Replicate())
    assert layout(("tp", "dp"), "None").alias_tensor_map == (("tp", "dp"), "None")
    assert layout(("tp", "dp"), "None").tensor_map == ((0, 1), -1)
    assert layout("None", "tp").tensor_map == (-1, 0)
    assert layout([Shard(-1), Partial()], ndim=2) is layout(Shard(1), Partial(), ndim=2)
    assert layout().ndim == 0
    assert Layout((2, 2), ("dp", "tp"), [3, 1, 0, 2], False)("dp").mesh.rank_list == (3, 1, 0, 2)
    assert Layout.from_device_mesh(layout.mesh) is layout


def test_negative_dims_and_axes_without_names():
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], init_backend=False)
    assert Layout.from_placements(mesh, [Shard(-1), Shard(-2)], 2).shard_axes == ((1,), (0,))
    assert Layout.from_aliases(mesh, ("axis1", None)).placements == (Replicate(), Shard(0))
    assert Layout.resolve(init_device_mesh("cpu", (2,), init_backend=False), Shard(0), 1).shard_axes == ((0,),)


def test_equal_layouts_are_one_object_also_across_threads():
    mesh = describe((2, 4))
    made = []
    barrier = threading.Barrier(8)

    def make():
        barrier.wait()
        made.extend(Layout.of(describe((2, 4)), ((axis,), ())) for axis in (0, 1) for _ in range(200))

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {id(layout) for layout in made} == {id(Layout.of(mesh, ((axis,), ()))) for axis in (0, 1)}


def test_a_layout_of_another_rank_s_view_is_its_own():
    views = [Layout.of(describe((2, 2), rank=rank), ((0, 1),)) for rank in range(4)]
    assert [layout.local_offset((8,)) for layout in views] == [(0,), (2,), (4,), (6,)]


def test_a_layout_cannot_be_changed():
    layout = Layout.of(describe((2,)), ((0,),))
    with pytest.raises(AttributeError, match=r"a Layout cannot be changed .setting 'mesh'.; make a new one"):
        layout.mesh = None


def test_reprs_that_a_person_can_read():
    mesh = describe((2, 2, 2))
    layout = Layout.of(mesh, ((2, 0), ()), (None, "max", None))
    assert repr(layout) == "Layout(mesh (dp=2, cp=2, tp=2), dims [tp*dp, -], partial max over cp)"
    assert repr(Layout.from_device_mesh(mesh)) == "Layout(mesh (dp=2, cp=2, tp=2))"
    assert repr([Shard(1), Shard(0, 1), Replicate(), Partial(), Partial("avg")]) == (
        "[Shard(1), Shard(0, order=1), Replicate(), Partial(), Partial('avg')]"
    )


def test_placements_answer_what_they_are():
    assert Shard(1).is_shard() and Shard(1).is_shard(1) and not Shard(1).is_shard(0)
    assert not Shard(1).is_replicate() and not Shard(1).is_partial()
    assert Replicate().is_replicate() and not Replicate().is_shard()
    assert Partial("max").is_partial() and Partial("max").is_partial("max") and not Partial("max").is_partial("sum")
    assert len({Shard(0), Shard(0), Partial(), Partial("sum"), Replicate(), Replicate()}) == 3
    assert all(isinstance(item, Placement) for item in pickle.loads(pickle.dumps([Shard(0), Replicate(), Partial()])))


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda mesh: Shard("0"), TypeError, "dim must be an int, got '0'"),
        (lambda mesh: Shard(True), TypeError, "dim must be an int, got True"),
        (lambda mesh: Shard(0, order="x"), TypeError, "order must be an int or None, got 'x'"),
        (lambda mesh: Partial("median"), ValueError, "the reductions are sum, avg, max, min, prod, all, any"),
        (lambda mesh: Layout.resolve(mesh, [Shard(0)], 2), ValueError, r"1 placements \[Shard\(0\)\] for the 2 axes"),
        (lambda mesh: Layout.resolve(mesh, [Shard(2), Replicate()], 2), ValueError, r"dim must be in \[-2, 1\]"),
        (lambda mesh: Layout.resolve(mesh, [Shard(0), Replicate()], 0), ValueError, "0 dims, .*use Replicate"),
        (lambda mesh: Layout.resolve(mesh, [Shard(0), "x"], 2), TypeError, "'x' on axis 'cp': use Shard"),
        (
            lambda mesh: Layout.resolve(mesh, ("dp",), 2),
            ValueError,
            "1 aliases .* for a tensor of 2 dims: give one per",
        ),
        (
            lambda mesh: Layout.resolve(mesh, ("dp", "dp"), 2),
            ValueError,
            "axis 'dp' .* shards dim 0 and dim 1: use it once",
        ),
        (lambda mesh: Layout.resolve(mesh, ("dp", "xx"), 2), ValueError, "has no axis 'xx'"),
        (lambda mesh: Layout.resolve(mesh, 5, 2), TypeError, "a sequence of placements or aliases, got 5"),
        (
            lambda mesh: Layout.of(mesh, ((0,),), ("sum", None)),
            ValueError,
            "shards dim 0 and has a partial sum: choose one",
        ),
        (lambda mesh: Layout.of(mesh, ((2,),)), ValueError, "axis 2 shards dim 0, but .* has 2 axes"),
        (lambda mesh: Layout.of(mesh, ((),), ("sum",)), ValueError, "1 partial reductions"),
        (lambda mesh: Layout.of(mesh, ((),), ("sum", "mean")), ValueError, "partial reduction 'mean'"),
        (
            lambda mesh: Layout.from_device_mesh(mesh).shard_axes,
            ValueError,
            "has no tensor yet; call it with one alias per",
        ),
        (lambda mesh: Layout.from_device_mesh(mesh)(Shard(0), Shard(0)), ValueError, "add ndim="),
        (lambda mesh: Layout.of(mesh, ((0,),)).local_shape((2, 2), (0, 0)), ValueError, "1 dims, not one of shape"),
        (lambda mesh: Layout.resolve(mesh, Layout.of(describe((4,)), ((),)), 1), ValueError, "is on another mesh than"),
        (lambda mesh: Layout.resolve(mesh, Layout.of(mesh, ((),)), 2), ValueError, "not describe a tensor of 2 dims"),
        (
            lambda mesh: Layout.resolve(mesh, [Shard(0, order=1), Shard(-1, order=1)], 1),
            ValueError,
            "axes of .* shard dim 0 .*: give each its own order, or none of them one",
        ),
        (
            lambda mesh: Layout.resolve(mesh, [Shard(0, order=1), Shard(0)], 1),
            ValueError,
            r"shard dim 0 \(dp: Shard\(0, order=1\), cp: Shard\(0\)\): give each its own order",
        ),
    ],
)
def test_mistakes_are_explained(make, error, message):
    with pytest.raises(error, match=message):
        make(describe((2, 2)))


def test_a_rank_outside_holds_nothing():
    mesh = describe((2,), rank_list=[1, 2], rank=0)
    assert compute_local_shape_and_global_offset((5, 3), mesh, [Shard(0)]) == ((0, 0), (0, 0))
    with pytest.raises(RuntimeError, match=r"rank 0 is not part of DeviceMesh.*so it holds no part of Layout"):
        Layout.of(mesh, ((0,), ())).local_shape((5, 3))
