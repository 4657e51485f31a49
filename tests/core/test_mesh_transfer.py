"""Tensors between meshes: other shapes over the same ranks, overlapping and disjoint ranks, with gradients."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hyper_parallel import (
    CommRecorder,
    DeviceMesh,
    Layout,
    Partial,
    Replicate,
    Shard,
    explain,
)
from hyper_parallel.core.dtensor.device_mesh import init_device_mesh
from tests.core.layout_cases import SHAPES, Summands, block_of, layout_specs
from tests.frameworks import (
    assert_close,
    backward,
    dist,
    distribute_tensor,
    equal,
    from_local,
    grad_of,
    leaf,
    on_mindspore,
    ours,
)
from tests.world import run_on_ranks

# (shape, ranks) of the two meshes
PAIRS = [
    (((2, 2), [0, 1, 2, 3]), ((4,), [0, 1, 2, 3])),
    (((2, 2), [0, 1, 2, 3]), ((2, 2), [3, 1, 0, 2])),
    (((4,), [2, 0, 3, 1]), ((2, 2), [0, 1, 2, 3])),
    (((2,), [0, 1]), ((2,), [2, 3])),
    (((2,), [0, 1]), ((3,), [1, 2, 3])),
    (((1,), [3]), ((2, 2), [0, 1, 2, 3])),
    (((2, 2), [0, 1, 2, 3]), ((1,), [2])),
]


@st.composite
def transfers(draw):
    """(pair of meshes, shape, source, target)."""
    pair = draw(st.sampled_from(PAIRS))
    shape = draw(SHAPES)
    exact = ("sum", "max", "min", "prod")  # the average of three is rounded
    return pair, shape, *(draw(layout_specs(len(mesh_shape), len(shape), exact)) for mesh_shape, _ in pair)


def check_transfers(cases):
    rank = dist.get_rank()
    for (first, second), shape, before, after in cases:
        meshes = [init_device_mesh("cpu", mesh_shape, rank_list=ranks) for mesh_shape, ranks in (first, second)]
        source, target = Layout.of(meshes[0], *before), Layout.of(meshes[1], *after)
        if rank not in first[1] and rank not in second[1]:
            continue
        where = f"{shape}: {source} -> {target}"
        summands = Summands(first[0], before[1], shape)
        value = summands.value()
        weight = torch.arange(1.0, value.numel() + 1, dtype=torch.float64).reshape(shape)
        value.backward(weight)
        inside = rank in first[1]
        own = (
            block_of(summands.of(meshes[0].get_coordinate()).detach(), source)
            if inside
            else torch.empty((0,) * len(shape), dtype=torch.float64)
        )
        own = leaf(own)
        moved = from_local(own, meshes[0], source, shape=shape).redistribute(meshes[1], target)
        assert moved.layout is target and moved.shape == shape, where
        if rank in second[1]:
            if not target.has_partial:
                assert equal(moved.to_local(), block_of(value, target)), where
            whole = moved.full_tensor()
            assert equal(whole, value), where
            backward(whole, weight)
        else:
            block = moved.to_local()
            backward(block, block * 0)
        if inside:
            expected = block_of(summands.of(meshes[0].get_coordinate()).grad, source)
            assert_close(grad_of(own), expected, msg=where)


def test_any_layout_of_one_mesh_to_any_of_another(worlds):
    @settings(max_examples=2 if on_mindspore else 4, deadline=None, derandomize=True)
    @given(st.lists(transfers(), min_size=16, max_size=24))
    def check(cases):
        worlds(4).run(check_transfers, cases)

    check()


def bytes_between(source_spec, target_spec, shape):
    meshes = [DeviceMesh("cpu", ranks) for ranks in (source_spec[0], target_spec[0])]
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).reshape(shape)
    start = distribute_tensor(whole, meshes[0], source_spec[1])
    with CommRecorder() as recorder:
        moved = start.redistribute(meshes[1], target_spec[1])
    if meshes[1].get_coordinate() is not None:
        assert equal(moved.to_local(), block_of(whole, moved.layout))
    assert {record.op for record in recorder.records} <= {"all_to_all_single"}
    return recorder.total_bytes, explain(start.layout, moved.layout, shape)


@pytest.mark.parametrize(
    ("source", "target", "num_elements"),
    [
        # Disjoint: everything crosses, once for each rank that holds it afterwards.
        (([0, 1], [Shard(0)]), ([2, 3], [Shard(0)]), 60),
        (([0, 1], [Shard(0)]), ([2, 3], [Replicate()]), 120),
        (([0, 1], [Replicate()]), ([2, 3], [Shard(1)]), 60),
        # Overlapping: what a rank holds already does not move.
        (([0, 1], [Shard(0)]), ([1, 2], [Shard(0)]), 60),
        (([0, 1], [Replicate()]), ([1, 2], [Shard(0)]), 30),
        # The same ranks under another shape: nothing but the difference.
        (([0, 1, 2, 3], [Shard(0)]), ([[0, 1], [2, 3]], [Shard(0), Shard(0)]), 0),
        (([0, 1, 2, 3], [Shard(0)]), ([[0, 1], [2, 3]], [Shard(0), Replicate()]), 60),
        (([0, 1, 2, 3], [Shard(0)]), ([3, 2, 1, 0], [Shard(0)]), 60),
    ],
    ids=str,
)
def test_each_byte_is_sent_once(worlds, source, target, num_elements):
    results = worlds(4).run(_bytes_or_nothing, source, target, (12, 5))
    assert sum(result[0] for result in results if result) == 4 * num_elements
    (text,) = {result[1] for result in results if result}
    assert f"{4 * num_elements} bytes in all" in text


def _bytes_or_nothing(source, target, shape):
    ranks = {*torch.tensor(source[0]).flatten().tolist(), *torch.tensor(target[0]).flatten().tolist()}
    return bytes_between(source, target, shape) if dist.get_rank() in ranks else None


@run_on_ranks(4)
def test_copies_share_the_work_of_sending():
    first, second = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    start = distribute_tensor(torch.arange(100.0), first, [Replicate()])
    with CommRecorder() as recorder:
        start.redistribute(second, [Shard(0)])
    assert recorder.total_bytes == (200 if dist.get_rank() < 2 else 0)


@run_on_ranks(4)
def test_a_rank_of_neither_mesh_may_not_ask():
    first, second = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [1, 2])
    start = distribute_tensor(torch.arange(4.0), first, [Shard(0)])
    if dist.get_rank() == 3:
        with pytest.raises(
            RuntimeError, match=r"rank 3 is part of neither DeviceMesh.* nor DeviceMesh.* holds nothing"
        ):
            start.redistribute(second, [Shard(0)])
    else:
        start.redistribute(second, [Shard(0)])


@run_on_ranks(4)
def test_training_across_two_meshes_gives_the_gradients_of_one_process():
    rank = dist.get_rank()
    stages = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(6, 6, dtype=torch.float64, generator=generator) for _ in range(2)]
    data = torch.randn(5, 6, dtype=torch.float64, generator=generator)
    plain = [weight.clone().requires_grad_() for weight in weights]
    ((data @ plain[0]).tanh() @ plain[1]).square().sum().backward()

    parameters = [
        distribute_tensor(weight, mesh, [Shard(1)]).requires_grad_()
        for weight, mesh in zip(weights, stages, strict=True)
    ]
    hidden = leaf(torch.zeros(5, 0, dtype=torch.float64))
    if rank < 2:
        hidden = (ours(data) @ parameters[0].full_tensor()).tanh()
        hidden = distribute_tensor(hidden, stages[0], [Shard(0)])
    else:
        hidden = from_local(hidden, stages[0], [Shard(0)], shape=(5, 6))
    passed = hidden.redistribute(stages[1], [Shard(0)])
    if rank < 2:
        block = passed.to_local()
        backward(block, block * 0)
        assert_close(parameters[0].grad.full_tensor(), plain[0].grad)
    else:
        output = passed.full_tensor() @ parameters[1].full_tensor()
        backward((output * output).sum())
        assert_close(parameters[1].grad.full_tensor(), plain[1].grad)


@run_on_ranks(4)
def test_scalars_move_too():
    meshes = [DeviceMesh("cpu", [[0, 1], [2, 3]]), DeviceMesh("cpu", [3, 2])]
    for before, after in itertools.product([Replicate(), Partial(), Partial("max")], repeat=2):
        start = distribute_tensor(torch.tensor(5.0), meshes[0], [before, Replicate()]).requires_grad_()
        moved = start.redistribute(meshes[1], [after])
        if dist.get_rank() > 1:
            assert moved.full_tensor() == 5
            backward(moved.full_tensor())
        else:
            backward(moved.to_local(), torch.tensor(0.0))
        # The maximum is attained on all ranks of the axis, which share the gradient.
        assert start.grad.to_local() == (0.5 if before == Partial("max") else 1)
