"""``from_local``: blocks that fit, blocks that do not, and the gradients that are handed to the block."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from hyper_parallel import CommRecorder, DTensor, Partial, Replicate, Shard
from hyper_parallel.core.dtensor import shard_sizes
from hyper_parallel.core.dtensor.device_mesh import init_device_mesh
from hyper_parallel.platform import get_platform
from tests.frameworks import backward, dist, distribute_tensor, equal, from_local, grad_of, leaf, ours, write
from tests.world import run_on_ranks

SIZES_DIFFER = (
    r"from_local under Layout.* got local tensors of different sizes \(rank 0: .*rank 1: .*Pass the global shape"
)


def rank_and_mesh(*shape):
    shape = shape or (dist.get_world_size(),)
    return dist.get_rank(), init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])


# ---------------------------------------------------------------- blocks that fit


@run_on_ranks(2, 4)
def test_equal_blocks_need_no_shape():
    rank, mesh = rank_and_mesh()
    made = from_local(torch.full((2, 3), float(rank)), mesh, [Shard(0)])
    assert made.shape == (2 * mesh.size(), 3)
    assert equal(made.full_tensor(), torch.arange(mesh.size()).repeat_interleave(2)[:, None].expand(-1, 3).float())
    assert DTensor(ours(torch.zeros(2, 3)), mesh, ("None", "dp")).shape == (2, 3 * mesh.size())
    assert from_local(torch.zeros(2, 3), mesh).layout.is_replicated


@run_on_ranks(4)
def test_uneven_blocks_with_a_shape_or_a_check():
    rank, mesh = rank_and_mesh()
    block = torch.arange(5)[2 * rank : 2 * rank + 2]
    for made in (
        from_local(block, mesh, [Shard(0)], shape=(5,)),
        from_local(block, mesh, [Shard(0)], run_check=True),
        DTensor(ours(block), mesh, [Shard(0)], shape=(5,)),
    ):
        assert made.shape == (5,)
        assert equal(made.full_tensor(), torch.arange(5))


@run_on_ranks(4)
def test_a_check_finds_the_shape_of_blocks_cut_twice_in_any_order():
    rank, mesh = rank_and_mesh(2, 2)
    whole = torch.arange(21).reshape(7, 3)
    for placements in (
        [Shard(0), Shard(0)],
        [Shard(0, order=1), Shard(0, order=0)],
        [Shard(1), Shard(0)],
        [Replicate(), Shard(0)],
        [Shard(1), Partial("max")],
    ):
        block = distribute_tensor(whole, mesh, placements).to_local()
        made = from_local(block, mesh, placements, run_check=True)
        assert made.shape == (7, 3) and equal(made.full_tensor(), whole), (rank, placements)


@run_on_ranks(2)
def test_the_block_is_the_memory_of_the_tensor():
    _, mesh = rank_and_mesh()
    block = ours(torch.zeros(3))
    made = from_local(block, mesh, [Shard(0)])
    write(block, 7.0)
    assert equal(made.full_tensor(), torch.full((6,), 7.0))
    assert made.to_local().data_ptr() == block.data_ptr()
    assert type(block) is get_platform().Tensor


@run_on_ranks(2)
def test_strides_of_a_block_are_its_own():
    rank, mesh = rank_and_mesh()
    block = torch.arange(6.0).reshape(2, 3).T + rank
    made = from_local(block, mesh, [Shard(0)], shape=(6, 2), stride=(2, 1))
    assert equal(made.full_tensor(), torch.cat([block - rank, block - rank + 1]))


# ---------------------------------------------------------------- blocks that do not


def raised_by_all(make, message):
    """The error text, which every rank must see."""
    with pytest.raises((ValueError, RuntimeError), match=message) as caught:
        make()
    dist.barrier()  # nobody hangs, and nobody has left a collective half done
    return str(caught.value)


@run_on_ranks(2)
def test_sizes_that_differ_are_found_in_backward():
    rank, mesh = rank_and_mesh()
    fine = leaf(torch.ones(2))
    whole = from_local(fine, mesh, [Shard(0)], shape=(4,)).full_tensor()
    local = from_local(fine, mesh, [Replicate()]).to_local(grad_placements=[Partial()])
    from_local(torch.ones(1 + rank), mesh, [Shard(0)])
    raised_by_all(lambda: backward(whole.sum() + local.sum()), SIZES_DIFFER)


@run_on_ranks(2)
def test_pending_summands_of_different_sizes():
    rank, mesh = rank_and_mesh()
    made = from_local(torch.ones(2 + rank), mesh, [Partial()])
    raised_by_all(made.full_tensor, SIZES_DIFFER)


@run_on_ranks(2)
def test_copies_of_different_sizes():
    rank, mesh = rank_and_mesh()
    uses = {
        "full_tensor": lambda made: (made + 1).full_tensor(),
        "cut": lambda made: made.redistribute(placements=[Shard(0)]).full_tensor(),
        "op": lambda made: (made + distribute_tensor(torch.ones(4, 2), mesh, [Shard(0)])).full_tensor(),
    }
    for use in uses.values():
        made = from_local(torch.ones(4 + rank, 2), mesh, [Replicate()])
        raised_by_all(lambda made=made, use=use: use(made), r"rank 0: \(4, 2\), rank 1: \(5, 2\)")
    made = from_local(torch.ones(4, *(2,) * rank), mesh)
    raised_by_all(made.full_tensor, r"rank 0: \(4,\), rank 1: \(4, 2\)")


@run_on_ranks(4)
def test_sizes_on_a_mesh_of_two_axes():
    rank, mesh = rank_and_mesh(2, 2)
    made = from_local(torch.ones(3, 2 if rank == 3 else 1), mesh, ("None", "tp"))
    text = raised_by_all(made.full_tensor, SIZES_DIFFER)
    assert "rank 2: (3, 1), rank 3: (3, 2)" in text


@run_on_ranks(2)
def test_a_different_number_of_dims():
    rank, mesh = rank_and_mesh()
    block = torch.ones(2) if rank else torch.ones(2, 3)
    made = from_local(block, mesh, [Shard(0)])
    assert "rank 0: (2, 3), rank 1: (2,)" in raised_by_all(made.full_tensor, SIZES_DIFFER)
    raised_by_all(
        lambda: from_local(block, mesh, [Shard(0)], run_check=True),
        r"differ in dims or dtype \(rank 0: \(2, 3\)",
    )


@run_on_ranks(2)
@pytest.mark.parametrize("spelling", ["placements", "aliases"])
def test_a_rank_whose_block_cannot_be_cut_leaves_nobody_waiting(spelling):
    rank, mesh = rank_and_mesh()
    placements = [Shard(1)] if spelling == "placements" else ("None", "dp")
    block = torch.ones(2) if rank else torch.ones(2, 3)
    for run_check in (False, True):
        if rank == 1:
            message = (
                r"from_local: the local tensor of shape \(2,\) on rank 1: .*(the tensor has 1 dims|a tensor of 1 dims)"
            )
            raised_by_all(functools.partial(from_local, block, mesh, placements, run_check=run_check), message)
        else:
            message = r"rank 0: \(2, 3\), rank 1: \(2,\)"
            make = functools.partial(from_local, block, mesh, placements, run_check=run_check)
            raised_by_all(lambda make=make: make().full_tensor(), message)


@run_on_ranks(4)
def test_a_check_lists_the_sizes_that_no_tensor_has():
    rank, mesh = rank_and_mesh()
    text = raised_by_all(
        lambda: from_local(torch.ones(1 if rank == 1 else 2), mesh, [Shard(0)], run_check=True),
        "no tensor is sharded into these local tensors",
    )
    assert "rank 0: (2,), rank 1: (1,), rank 2: (2,), rank 3: (2,)" in text
    assert "they give (7,), which is sharded into (2,), (2,), (2,), (1,)" in text


@run_on_ranks(4)
def test_a_check_compares_copies_and_dtypes():
    rank, mesh = rank_and_mesh(2, 2)
    raised_by_all(
        lambda: from_local(torch.tensor([float(rank == 2)]), mesh, [Replicate(), Shard(0)], run_check=True),
        "ranks 0 and 2 should hold equal values and do not",
    )
    raised_by_all(
        lambda: from_local(torch.ones(2, dtype=torch.int32 if rank else None), mesh, ("dp",), run_check=True),
        r"(?i)differ in dims or dtype .*float32, .*int32",
    )


@run_on_ranks(2)
def test_a_shape_that_the_block_does_not_have():
    rank, mesh = rank_and_mesh()
    raised_by_all(
        lambda: from_local(torch.ones(3), mesh, [Shard(0)], shape=(4,)),
        rf"a tensor of shape \(4,\) under Layout.* has a local tensor of shape \(2,\) on rank {rank}, got \(3,\)",
    )
    raised_by_all(
        lambda: from_local(torch.ones(3), mesh, [Shard(0)], shape=(4, 2)),
        rf"shape=\(4, 2\) has 2 dims, but the local tensor on rank {rank} has 1: \(3,\)",
    )


@run_on_ranks(2)
def test_what_is_no_block():
    _, mesh = rank_and_mesh()
    with pytest.raises(TypeError, match="takes this rank's local tensor as a plain tensor, got list"):
        from_local([1, 2], mesh, [Shard(0)])
    with pytest.raises(TypeError, match="takes this rank's local tensor as a plain tensor, got DTensor"):
        from_local(from_local(torch.ones(2), mesh), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="from_local needs a mesh: pass device_mesh=, or call it inside 'with mesh:'"):
        from_local(torch.ones(2), None, [Shard(0)])
    with pytest.raises(TypeError, match="device_mesh must be a hyper_parallel DeviceMesh, got tuple"):
        from_local(torch.ones(2), (2,), [Shard(0)])
    with mesh:
        assert from_local(torch.ones(2), None, [Shard(0)]).shape == (4,)


@run_on_ranks(2)
def test_the_comparison_of_sizes_is_seen_and_bounded():
    _, mesh = rank_and_mesh()
    with CommRecorder() as recorder:
        for _ in range(100):
            from_local(torch.ones(2), mesh, [Shard(0)])
        from_local(torch.ones(2), mesh)
        from_local(torch.ones(2), mesh, [Shard(0)], shape=(4,))
    assert {(record.op, record.asked_by) for record in recorder.records} == {
        ("all_gather_into_tensor", "from_local compares sizes")
    }
    assert len(recorder.records) == 101
    assert len(shard_sizes._checks) <= 32


@run_on_ranks(2)
def test_sizes_that_no_cut_gives_are_errors_at_the_first_communication():
    rank, mesh = rank_and_mesh()
    uses = {
        "full_tensor": lambda made: made.full_tensor(),
        "redistribute": lambda made: made.redistribute(placements=[Shard(1)]),
        "async": lambda made: made.redistribute(async_op=True),
        "op": lambda made: (made * 2).full_tensor(),
        "ops": lambda made: (made.abs() + 1).exp().redistribute(placements=[Replicate()]),
        "sum": lambda made: made.sum().full_tensor(),
        "item": lambda made: made.sum().item(),
    }
    for rows, (name, use) in itertools.product(([1, 3], [0, 2], [2, 3]), uses.items()):
        made = from_local(torch.ones(rows[rank], 2), mesh, [Shard(0)])
        text = raised_by_all(lambda made=made, use=use: use(made), SIZES_DIFFER)
        assert f"rank 0: ({rows[0]}, 2), rank 1: ({rows[1]}, 2)" in text, name


# ---------------------------------------------------------------- gradients


@run_on_ranks(2)
def test_gradients_by_the_law():
    rank, mesh = rank_and_mesh()
    weight = torch.arange(6.0)
    for placement, expected in ((Shard(0), weight[3 * rank : 3 * rank + 3]), (Replicate(), weight[:3])):
        block = leaf(torch.ones(3))
        whole = from_local(block, mesh, [placement]).full_tensor()
        backward(whole, weight[: len(whole)])
        assert equal(grad_of(block), expected)


@run_on_ranks(4)
def test_grad_placements_of_every_edge():
    rank, mesh = rank_and_mesh()
    placements = [Replicate(), Shard(0), Partial()]
    weight = torch.arange(1.0, 9)
    for value, asked in itertools.product(placements, placements):
        block = leaf(torch.ones(2 if value == Shard(0) else 8))
        if (asked == Shard(0)) != (value == Shard(0)):  # The gradient would have another shape than the block.
            with pytest.raises(
                ValueError, match=r"from_local: grad_placements .* the gradient of a local tensor has its shape"
            ):
                from_local(block, mesh, [value], grad_placements=[asked])
            with pytest.raises(
                ValueError, match=r"to_local: grad_placements .* the gradient of a local tensor has its shape"
            ):
                from_local(block, mesh, [value]).to_local(grad_placements=[asked])
            continue
        made = from_local(block, mesh, [value], grad_placements=[asked])
        backward(made.full_tensor(), weight)
        given = from_local(grad_of(block), mesh, [asked]).full_tensor()
        assert equal(given, weight), (value, asked)

    # to_local: each rank uses its own part of a whole value
    start = from_local(torch.ones(8), mesh).requires_grad_()
    backward((start.to_local(grad_placements=[Partial()])[2 * rank : 2 * rank + 2] * (rank + 1)).sum())
    assert equal(start.grad.to_local(), torch.arange(1.0, 5).repeat_interleave(2))

    # full_tensor: the same
    start = from_local(torch.ones(2), mesh, [Shard(0)]).requires_grad_()
    backward((start.full_tensor(grad_placements=[Partial()]) * (rank + 1)).sum())
    assert equal(start.grad.full_tensor(), torch.full((8,), 10.0))
    start.grad = None
    backward((start.full_tensor() * 3).sum())
    assert equal(start.grad.full_tensor(), torch.full((8,), 3.0))
