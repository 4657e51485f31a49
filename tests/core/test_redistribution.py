"""Every layout to every layout: values, blocks and gradients against one process, on real processes."""

from __future__ import annotations

import copy
import itertools
import pickle
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel import CommRecorder, DTensor, Layout, Partial, Replicate, Shard
from hyper_parallel.core.dtensor.device_mesh import init_device_mesh
from hyper_parallel.platform import get_platform
from tests.core.layout_cases import Summands, block_of, every_layout, moves, reduce_stacked
from tests.frameworks import (
    assert_close,
    backward,
    dist,
    distribute_tensor,
    dtype_of,
    equal,
    from_local,
    grad,
    grad_of,
    known_names,
    leaf,
    needs_second_gradients,
    on_mindspore,
    ours,
    requires_grad,
    same_bits,
    theirs,
)
from tests.world import run_on_ranks, small_or_sweep

MESHES = [(2,), (4,), (2, 2), (2, 4), (4, 2), (2, 2, 2)]


def size_of(mesh_shape):
    return torch.Size(mesh_shape).numel()


# ---------------------------------------------------------------- the property


def check_moves(mesh_shape, cases, rank_list=None):
    mesh = init_device_mesh("cpu", mesh_shape, rank_list=rank_list)
    coordinate = mesh.get_coordinate()
    for shape, source_spec, target_spec in cases:
        source, target = Layout.of(mesh, *source_spec), Layout.of(mesh, *target_spec)
        where = f"{shape}: {source} -> {target}"
        summands = Summands(mesh_shape, source_spec[1], shape)
        value = summands.value()
        weight = torch.arange(1.0, value.numel() + 1, dtype=torch.float64).reshape(shape)
        value.backward(weight)
        own = block_of(summands.of(coordinate).detach(), source)

        plain = from_local(own, mesh, source, shape=shape)
        moved = plain.redistribute(mesh, target)
        assert moved.layout is target and moved.shape == shape, where
        assert moved.local_shape == target.local_shape(shape), where
        if not target.has_partial:
            assert equal(moved.to_local(), block_of(value, target)), where
        assert equal(moved.full_tensor(), value), where
        assert equal(plain.to_local(), own), where

        block = leaf(own)
        moved = from_local(block, mesh, source, shape=shape).redistribute(mesh, target)
        whole = moved.full_tensor()
        assert equal(whole, value), where
        backward(whole, weight)
        assert_close(grad_of(block), block_of(summands.of(coordinate).grad, source), msg=where)


def num_examples(on_torch):
    """Plans are the same on every framework; where operators are slow, fewer are carried out."""
    return 1 if on_mindspore else on_torch


@pytest.mark.parametrize("mesh_shape", small_or_sweep(MESHES, MESHES[:3] if on_mindspore else MESHES), ids=str)
def test_any_layout_to_any_other(worlds, mesh_shape):
    world = worlds(size_of(mesh_shape))

    @settings(max_examples=num_examples(2 if len(mesh_shape) > 1 else 3), deadline=None, derandomize=True)
    @given(st.lists(moves(len(mesh_shape)), min_size=14, max_size=20))
    def check(cases):
        world.run(check_moves, mesh_shape, cases)

    check()


def check_every_pair(mesh_shape, shape):
    mesh = init_device_mesh("cpu", mesh_shape)
    whole = torch.arange(1.0, torch.Size(shape).numel() + 1).reshape(shape)
    layouts = [Layout.of(mesh, *spec) for spec in every_layout(len(mesh_shape), len(shape))]
    for source in layouts:
        start = distribute_tensor(whole, mesh, source)
        for target in layouts:
            moved = start.redistribute(mesh, target)
            if target.has_partial:
                moved = moved.redistribute(mesh, target.gradient())
            assert equal(moved.to_local(), block_of(whole, moved.layout)), f"{source} -> {target}"
    return len(layouts)


def test_every_pair_of_layouts_of_a_matrix(worlds):
    assert worlds(4).run(check_every_pair, (2, 2), (5, 3)) == [18] * 4


# ---------------------------------------------------------------- dtypes

DTYPES = known_names(
    [
        *(
            "bool",
            "uint8",
            "int8",
            "int16",
            "int32",
            "int64",
            "uint16",
            "uint32",
            "uint64",
            "float16",
            "bfloat16",
            "float32",
        ),
        *("float64", "complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
    ]
)


@run_on_ranks(4)
def test_every_dtype_keeps_its_bits():
    mesh = init_device_mesh("cpu", (2, 2))
    ways = [
        ([Shard(0), Shard(1)], [Replicate(), Replicate()]),
        ([Shard(0), Shard(0)], [Shard(1), Replicate()]),
        ([Shard(0), Replicate()], [Shard(1), Shard(1)]),
        ([Replicate(), Shard(1)], [Shard(0), Shard(0)]),
        ([Shard(0), Shard(1)], [Shard(1), Shard(0)]),
    ]
    for name in DTYPES:
        dtype = getattr(torch, name)
        values = torch.arange(-7, 8).reshape(5, 3)
        whole = (
            values % 2 == 0 if dtype is torch.bool else values.abs().to(dtype) if "uint" in name else values.to(dtype)
        )
        for before, after in ways:
            moved = distribute_tensor(whole, mesh, before).redistribute(mesh, after)
            assert dtype_of(moved) is dtype
            assert same_bits(moved.full_tensor(), whole), f"{name}: {before} -> {after}"
            assert same_bits(moved.to_local(), block_of(whole, moved.layout)), name


@run_on_ranks(4)
@pytest.mark.parametrize(
    ("dtype", "ops"),
    [
        pair
        for pair in [
            ("bool", ("all", "any", "max", "min", "sum", "prod")),
            ("int64", ("sum", "max", "min", "prod")),
            ("int16", ("sum", "max", "min", "prod")),
            ("uint8", ("sum", "max")),
            ("float16", ("sum", "avg", "max", "min", "prod")),
            ("bfloat16", ("sum", "avg", "max", "min", "prod")),
            ("float8_e4m3fn", ("sum", "max")),
            ("complex64", ("sum", "avg", "prod")),
        ]
        if known_names(pair[:1])
    ],
)
def test_pending_reductions_of_every_dtype(dtype, ops):
    kind = getattr(torch, dtype)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    row, column = mesh.get_coordinate()
    numbers = torch.tensor([[[1, 0, 2], [3, 1, 1]], [[2, 1, 0], [1, 1, 4]]])  # by place on tp, then rows of 3
    numbers = torch.stack([numbers, numbers + 1])  # by place on dp
    for op in ops:
        summands = (numbers > 0 if kind is torch.bool else numbers).to(kind)
        stacked = summands.to(torch.complex128 if kind.is_complex else torch.float64)
        if kind is torch.bool:
            op_on_numbers = {"all": "min", "any": "max", "sum": "max", "prod": "min"}.get(op, op)
        else:
            op_on_numbers = op
        over_tp = reduce_stacked(stacked[row], op_on_numbers).to(kind)
        pending = from_local(summands[row, column], mesh, [Replicate(), Partial(op)])
        assert same_bits(pending.redistribute(mesh, [Replicate(), Replicate()]).to_local(), over_tp)
        scattered = pending.redistribute(mesh, [Replicate(), Shard(1)])
        assert same_bits(scattered.to_local(), block_of(over_tp, scattered.layout))
        both = from_local(summands[row, column], mesh, [Partial(op), Partial(op)]).full_tensor()
        expected = reduce_stacked(stacked.flatten(0, 1), op_on_numbers).to(kind)
        assert same_bits(both, expected), op


@run_on_ranks(2)
def test_reductions_that_a_dtype_has_not_are_errors():
    mesh = init_device_mesh("cpu", (2,))
    with pytest.raises(ValueError, match=r"(?i)all reduces bools, not (torch\.)?float32"):
        from_local(torch.ones(2), mesh, [Partial("all")]).full_tensor()
    with pytest.raises(ValueError, match=r"(?i)the average of (torch\.)?int64 is not a (torch\.)?int64"):
        from_local(torch.ones(2, dtype=torch.int64), mesh, [Partial("avg")]).full_tensor()


# ---------------------------------------------------------------- bits of replicas


@run_on_ranks(8)
def test_replicas_have_equal_bits_after_merged_reductions():
    mesh = init_device_mesh("cpu", (2, 2, 2))
    generator = torch.Generator().manual_seed(mesh.get_rank())
    own = ours(torch.randn(7, 5, generator=generator) * 10 ** torch.randint(-3, 4, (7, 5), generator=generator))
    for pending in ([0, 1, 2], [0, 1], [0, 2], [1, 2]):
        placements = [Partial() if axis in pending else Replicate() for axis in range(3)]
        if len(pending) < 3:  # whole on one axis: its ranks must start with equal values
            own = from_local(own, mesh, [Partial("avg")] * 3).full_tensor() * (
                1 + sum(mesh.get_coordinate()[axis] for axis in pending)
            )
        for target in ([Replicate()] * 3, [Replicate(), Replicate(), Shard(0)], [Shard(1), Replicate(), Shard(0)]):
            reduced = from_local(own, mesh, placements).redistribute(mesh, target)
            whole = reduced.full_tensor()
            gathered = [None] * 8
            dist.all_gather_object(gathered, theirs(whole))
            assert all(same_bits(other, whole) for other in gathered), (pending, target)


# ---------------------------------------------------------------- other orders of ranks, parts of the world


@pytest.mark.parametrize(
    ("mesh_shape", "rank_list"), [((2, 2), [3, 1, 0, 2]), ((4,), [2, 0, 3, 1]), ((2, 2), [1, 0, 3, 2])], ids=str
)
def test_any_order_of_ranks(worlds, mesh_shape, rank_list):
    @settings(max_examples=num_examples(2), deadline=None, derandomize=True)
    @given(st.lists(moves(len(mesh_shape)), min_size=10, max_size=16))
    def check(cases):
        worlds(4).run(check_moves, mesh_shape, cases, rank_list)

    check()


def check_on_a_part_of_the_world(rank_list, mesh_shape):
    mesh = init_device_mesh("cpu", mesh_shape, rank_list=rank_list)
    whole = torch.arange(15.0).reshape(5, 3).requires_grad_()
    cut = distribute_tensor(whole, mesh, [Shard(0)] * len(mesh_shape))
    if mesh.get_coordinate() is None:
        assert cut.shape == (5, 3) and cut.local_shape == (0, 0)
        with pytest.raises(RuntimeError, match=r"rank \d is not part of DeviceMesh.*cannot redistribute on it"):
            cut.full_tensor()
        return
    moved = cut.redistribute(placements=[Shard(1)] * len(mesh_shape))
    assert equal(moved.full_tensor(), whole)
    backward(moved.full_tensor(), torch.ones(5, 3))
    assert equal(cut.grad.full_tensor(), torch.ones(5, 3))


@pytest.mark.parametrize(("rank_list", "mesh_shape"), [([0, 2], (2,)), ([3, 1, 2], (3,)), ([1], (1,))], ids=str)
def test_a_mesh_over_a_part_of_the_world(worlds, rank_list, mesh_shape):
    worlds(4).run(check_on_a_part_of_the_world, rank_list, mesh_shape)


@run_on_ranks(2)
def test_a_mesh_of_one_rank_costs_nothing():
    mesh = init_device_mesh("cpu", (1, 1), rank_list=[get_platform().get_rank()])
    whole = torch.arange(6.0).reshape(2, 3)
    with CommRecorder() as recorder:
        for before, after in itertools.product(every_layout(2, 2, ("sum", "max")), repeat=2):
            start = from_local(whole, mesh, Layout.of(mesh, *before))
            assert equal(start.redistribute(mesh, Layout.of(mesh, *after)).full_tensor(), whole)
    assert recorder.records == []


# ---------------------------------------------------------------- what torch 2.13 gets wrong


@run_on_ranks(4)
def test_five_rows_cut_twice_come_back():
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(10.0).reshape(5, 2).requires_grad_()
    cut = distribute_tensor(whole, mesh, [Shard(0), Shard(0)])
    assert cut.local_shape == ((2, 2), (1, 2), (1, 2), (1, 2))[dist.get_rank()]
    assert equal(cut.full_tensor(), whole)
    for axis_kept in (0, 1):
        half = [Shard(0), Replicate()] if axis_kept == 0 else [Replicate(), Shard(0)]
        moved = cut.redistribute(mesh, half)
        assert equal(moved.to_local(), block_of(whole, moved.layout))
        assert equal(moved.full_tensor(), whole)
    weight = torch.arange(10.0).reshape(5, 2) ** 2
    backward(cut.full_tensor(), weight)
    assert equal(cut.grad.full_tensor(), weight)


# ---------------------------------------------------------------- launched, not awaited


@run_on_ranks(4)
def test_an_asynchronous_redistribution_completes_itself():
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(15.0).reshape(5, 3)
    ways = [
        ([Shard(0), Shard(0)], [Replicate(), Replicate()]),
        ([Shard(0), Shard(0)], [Shard(1), Shard(0)]),
        ([Replicate(), Replicate()], [Shard(0), Replicate()]),
        ([Partial(), Shard(1)], [Replicate(), Replicate()]),
        ([Shard(0), Replicate()], [Partial(), Replicate()]),
        ([Shard(0), Shard(1)], [Shard(0), Shard(1)]),
    ]
    uses = {
        "full_tensor": lambda moved: moved.full_tensor(),
        "to_local": lambda moved: from_local(moved.to_local(), mesh, moved.layout, shape=(5, 3)).full_tensor(),
        "wait": lambda moved: moved.wait().full_tensor(),
        "operator": lambda moved: (moved * 2).full_tensor() / 2,
        "second of an operator": lambda moved: (distribute_tensor(whole * 0, mesh, moved.layout) + moved).full_tensor(),
        "redistribute": lambda moved: moved.redistribute(mesh, [Shard(1), Replicate()]).full_tensor(),
        "data": lambda moved: moved.data.full_tensor(),
        **({} if on_mindspore else {"detach": lambda moved: moved.detach().full_tensor()}),
    }
    for before, after in ways:
        for name, use in uses.items():
            for needs_grad in (True,) if name == "operator" else (False, True):
                start = distribute_tensor(whole, mesh, before).requires_grad_(needs_grad)
                moved = start.redistribute(mesh, after, async_op=True)
                assert isinstance(moved, DTensor) and moved.shape == (5, 3) and moved.requires_grad is needs_grad
                used = use(moved)
                assert equal(used, whole), (before, after, name)
                assert type(moved) is DTensor and moved.wait() is moved
                if requires_grad(used):
                    backward(used.sum())
                    assert equal(start.grad.full_tensor(), torch.ones(5, 3)), (before, after, name)


@run_on_ranks(2)
def test_an_asynchronous_redistribution_is_launched_at_once_and_waited_for_later():
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(6.0)
    cut = distribute_tensor(whole, mesh, [Shard(0)])
    with CommRecorder() as recorder:
        several = [cut.redistribute(async_op=True) for _ in range(3)]
        assert [record.op for record in recorder.records] == ["all_gather_into_tensor"] * 3
        assert all(type(moved) is not DTensor for moved in several)
    assert equal(several[2].full_tensor(), whole)
    assert equal(copy.deepcopy(several[0]).full_tensor(), whole)
    assert equal(pickle.loads(pickle.dumps(several[1])).full_tensor(), whole)
    assert re.search(r"2\.,? +3\.,? +4\.", repr(cut.redistribute(async_op=True)))


@run_on_ranks(4)
def test_an_asynchronous_move_to_another_mesh():
    mesh, other = init_device_mesh("cpu", (2, 2)), init_device_mesh("cpu", (4,))
    whole = torch.arange(15.0).reshape(5, 3)
    for placements in ([Shard(1)], [Partial()]):
        start = distribute_tensor(whole, mesh, [Shard(0), Partial()]).requires_grad_()
        moved = start.redistribute(other, placements, async_op=True)
        assert equal(moved.full_tensor(), whole)
        backward(moved.full_tensor(), whole)
        assert equal(start.grad.full_tensor(), whole)


# ---------------------------------------------------------------- gradients


@needs_second_gradients
@run_on_ranks(4)
def test_a_redistribution_can_be_differentiated_twice():
    mesh = init_device_mesh("cpu", (2, 2))
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(5, 3, dtype=torch.float64, generator=generator)
    mixed = torch.randn(5, 3, dtype=torch.float64, generator=generator)

    reference = values.clone().requires_grad_()
    (first,) = torch.autograd.grad((reference**3 * mixed).sum(), reference, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), reference)

    pairs = [pair for pair in itertools.product(every_layout(2, 2), repeat=2) if not any(pair[0][1])]
    for before, after in pairs[::5]:
        source, target = Layout.of(mesh, *before), Layout.of(mesh, *after)
        start = distribute_tensor(values, mesh, source).requires_grad_()
        cubed = (start**3).redistribute(mesh, target).full_tensor()
        (gradient,) = grad((cubed * ours(mixed)).sum(), [start], create_graph=True)
        assert gradient.layout is source and gradient.requires_grad
        assert_close(gradient.full_tensor(), first)
        backward((gradient.full_tensor() ** 2).sum())
        assert_close(start.grad.full_tensor(), second, msg=f"{source} -> {target}")


@needs_second_gradients
@run_on_ranks(2, 4)
def test_a_pending_sum_can_be_differentiated_twice():
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank = dist.get_rank()
    number = leaf(torch.tensor(2.0, dtype=torch.float64))
    whole = from_local(number, mesh)
    # Every rank raises the one number to a power of its own; the value is the sum over the ranks.
    varying = whole.to_local(grad_placements=[Partial()]) ** (rank + 2)
    total = from_local(varying, mesh, [Partial()]).full_tensor()

    reference = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)
    expected = sum(reference ** (other + 2) for other in range(mesh.size()))
    for _ in range(3):
        assert total.item() == pytest.approx(expected.item())
        (total,) = grad(total, [number], create_graph=True)
        (expected,) = torch.autograd.grad(expected, reference, create_graph=True)
