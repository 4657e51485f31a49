"""Plans between layouts: which steps are taken, that every rank finds the same ones, and what is remembered."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel import Layout, Partial, Replicate, Shard
from hyper_parallel.core.dtensor.device_mesh import init_device_mesh
from hyper_parallel.core.dtensor.redistribution_plan import COMMUNICATING, changed_axes, plan_redistribution
from tests.core.layout_cases import every_layout, layout_specs

only_on = "torch"  # once is enough: no framework takes part

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()


def describe(shape, **options):
    return init_device_mesh("cpu", shape, init_backend=False, **options)


def plan(mesh_shape, before, after, shape=(64, 32)):
    mesh = describe(mesh_shape)
    source, target = (Layout.from_placements(mesh, placements, len(shape)) for placements in (before, after))
    return plan_redistribution(source, target, shape)


def kinds_and_axes(steps):
    return [(step.kind, step.axes) for step in steps]


@pytest.mark.parametrize(
    ("before", "after", "steps"),
    [
        ([S0, R], [S0, R], []),
        ([S0, R], [R, R], [("all_gather", (0,))]),
        ([S0, S0], [R, R], [("all_gather", (0, 1))]),
        ([Shard(0, 1), Shard(0, 0)], [R, R], [("all_gather", (1, 0))]),
        ([R, R], [S0, S1], [("slice", (0,)), ("slice", (1,))]),
        ([R, R], [S0, S0], [("slice", (0, 1))]),
        ([S0, R], [S1, R], [("all_to_all", (0,))]),
        ([S0, S0], [S1, S1], [("all_to_all", (0, 1))]),
        ([S0, S0], [S0, S1], [("all_to_all", (1,))]),
        ([S0, S0], [S0, R], [("all_gather", (1,))]),
        ([P, R], [R, R], [("all_reduce", (0,))]),
        ([P, P], [R, R], [("all_reduce", (0, 1))]),
        ([P, R], [S0, R], [("reduce_scatter", (0,))]),
        ([P, P], [S1, S1], [("reduce_scatter", (0, 1))]),
        ([P, S0], [R, S0], [("all_reduce", (0,))]),
        ([R, R], [P, R], [("spread", (0,))]),
        ([S0, R], [P, R], [("embed", (0,))]),
        ([Partial("max"), P], [R, R], [("all_reduce", (1,)), ("all_reduce", (0,))]),
        ([P, Partial("max")], [R, R], [("all_reduce", (1,)), ("all_reduce", (0,))]),
    ],
    ids=str,
)
def test_the_steps_that_one_would_write_by_hand(before, after, steps):
    found = plan((2, 4), before, after).steps
    assert (
        sorted(kinds_and_axes(found)) == sorted(steps)
        if steps and steps[0][0] == "slice"
        else (kinds_and_axes(found) == steps)
    )


@pytest.mark.parametrize(
    ("before", "after"),
    [([S0, S0], [Shard(0, 1), Shard(0, 0)]), ([S0, S0], [R, S0]), ([S0, R], [R, S0]), ([S0, S1], [S1, S0])],
    ids=str,
)
def test_one_exchange_where_no_collective_fits(before, after):
    steps = plan((2, 2), before, after, (1024, 1024)).steps
    assert len([step for step in steps if step.kind in COMMUNICATING]) == 1
    assert not any(step.target.is_replicated for step in steps)


def test_never_a_detour_through_the_whole_tensor():
    mesh = describe((2, 2, 2))
    layouts = [Layout.of(mesh, *spec) for spec in every_layout(3, 2, ())]
    shape = (1024, 1024)
    for source, target in itertools.product(layouts, repeat=2):
        if source.is_replicated or target.is_replicated:
            continue
        steps = plan_redistribution(source, target, shape).steps
        assert not any(step.target.is_replicated for step in steps), f"{source} -> {target}"
        assert len(steps) <= 3, f"{source} -> {target}"


@st.composite
def plan_cases(draw):
    mesh_shape = draw(st.sampled_from([(4,), (2, 3), (3, 2, 2), (2, 2, 2, 2), (1, 4), (8, 1, 2)]))
    shape = draw(st.sampled_from([(), (5,), (7, 3), (64, 48), (0, 4), (2, 3, 5), (512, 512)]))
    return mesh_shape, shape, *(draw(layout_specs(len(mesh_shape), len(shape))) for _ in range(2))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(plan_cases())
def test_steps_lead_from_the_one_to_the_other_in_a_lawful_way(case):
    mesh_shape, shape, before, after = case
    mesh = describe(mesh_shape)
    source, target = Layout.of(mesh, *before), Layout.of(mesh, *after)
    found = plan_redistribution(source, target, shape)
    assert plan_redistribution(source, target, shape) is found
    here = source
    for step in found.steps:
        assert step.source is here and step.target is not here
        pending, still_pending = here.partials, step.target.partials
        assert set(step.axes) >= set(changed_axes(here.shard_axes, step.target.shard_axes))
        for axis in range(mesh.ndim):
            if pending[axis] != still_pending[axis]:  # see Note [Pending reductions of different kinds]
                op = pending[axis] or still_pending[axis]
                later = {other for other in still_pending[axis + 1 :] if other is not None}
                assert later <= {op} or later | {op} <= {"sum", "avg"}
        here = step.target
    assert here is target
    assert found.cost >= 0 and (found.cost > 0 or source is target)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(plan_cases())
def test_every_rank_finds_the_same_plan(case):
    mesh_shape, shape, before, after = case
    plans = []
    for rank in (0, 1, 3):
        mesh = describe(mesh_shape, rank=rank)
        plans.append(plan_redistribution(Layout.of(mesh, *before), Layout.of(mesh, *after), shape))
    assert kinds_and_axes(plans[0].steps) == kinds_and_axes(plans[1].steps) == kinds_and_axes(plans[2].steps)


def test_what_is_remembered_is_bounded():
    mesh = describe((2,))
    source, target = Layout.of(mesh, ((0,),)), Layout.of(mesh, ((),))
    for size in range(1500):
        plan_redistribution(source, target, (size,))
    assert 0 < len(source.plans) <= 1024


def test_mistakes():
    one, two = describe((2,)), describe((4,))
    with pytest.raises(ValueError, match=r"a plan needs one mesh, got Layout.*axis0=2.* and Layout.*axis0=4"):
        plan_redistribution(Layout.of(one, ((0,),)), Layout.of(two, ((0,),)), (8,))
    with pytest.raises(ValueError, match=r"do not both describe a tensor of shape \(8, 8\)"):
        plan_redistribution(Layout.of(one, ((0,),)), Layout.of(one, ((),)), (8, 8))
