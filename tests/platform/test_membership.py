"""Any rank of any world in one process that has joined none: groups, meshes, layouts, collectives, gradients."""

from __future__ import annotations

import contextlib

import pytest
import torch

from hyper_parallel import Partial, Replicate, Shard, init_device_mesh
from hyper_parallel.platform import EXISTING_COMM_GROUPS, get_platform
from hyper_parallel.platform.shared.membership import Member, as_member, current_member
from tests.frameworks import backward, collectives, distribute_tensor, from_local, grad_of, on_mindspore, ours

platform = get_platform()


def member_of(rank, world_size):
    return Member(rank, world_size, platform.silent_group)


def silent(rank, world_size):
    return as_member(member_of(rank, world_size))


def on_meta():
    """Where operators on tensors without memory run."""
    if not on_mindspore:
        return contextlib.nullcontext()
    import mindspore

    return mindspore.DeviceCtx("meta")


def without_memory(*shape):
    return platform.empty(shape, dtype=ours(torch.float32), device="meta")


def rows_of(length, num_parts, place):
    """How many of ``length`` rows are in a part."""
    part = -(-length // num_parts)
    return max(0, min(part, length - place * part))


# ---------------------------------------------------------------- who am I


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (0, 2), (5, 8), (4095, 4096)])
def test_a_member_answers_for_the_process(rank, world_size):
    with silent(rank, world_size) as member:
        assert current_member() is member
        assert (platform.get_rank(), platform.get_world_size()) == (rank, world_size)
        assert platform.get_group_local_rank() == rank
        assert platform.get_process_group_ranks() == list(range(world_size))
        assert platform.get_backend() == "pretend"
        assert platform.world_generation() == member.generation
        assert platform.create_group(range(world_size)) is member.world_group
    assert current_member() is None
    assert (platform.get_rank(), platform.get_world_size(), platform.get_process_group_ranks()) == (0, 1, [0])


def test_members_are_nested_and_come_back():
    outer, inner = member_of(3, 4), member_of(1, 16)
    with as_member(outer):
        mine = platform.create_group([1, 3])
        with as_member(inner):
            assert (platform.get_rank(), platform.get_world_size()) == (1, 16)
            assert platform.get_created_group([1, 3]) is None
        assert current_member() is outer
        assert platform.create_group([3, 1]) is mine
        with pytest.raises(ZeroDivisionError), as_member(inner):
            raise ZeroDivisionError
        assert (platform.get_rank(), platform.world_generation()) == (3, outer.generation)
    assert current_member() is None


@pytest.mark.parametrize(("rank", "world_size"), [(2, 2), (-1, 2), (0, 0)])
def test_a_rank_is_one_of_its_world(rank, world_size):
    with pytest.raises(ValueError, match=f"a world of {world_size} ranks has ranks 0 to {world_size - 1}, not {rank}"):
        member_of(rank, world_size)


# ---------------------------------------------------------------- groups


def test_groups_belong_to_a_member():
    before = dict(EXISTING_COMM_GROUPS)
    first, second = member_of(0, 4), member_of(1, 4)
    with as_member(first):
        group = platform.create_group([0, 1])
        assert dict(EXISTING_COMM_GROUPS) == {(0, 1): group}
        assert (platform.get_group_local_rank(group), platform.get_process_group_ranks(group)) == (0, [0, 1])
        assert platform.get_global_rank(group, 1) == 1
    with as_member(second):
        assert not EXISTING_COMM_GROUPS
        assert platform.create_group([0, 1]) is not group
        assert platform.get_group_local_rank(platform.create_group([0, 1])) == 1
    assert dict(EXISTING_COMM_GROUPS) == before


def test_groups_are_split_and_left():
    with silent(5, 8):
        part = platform.split_group(None, [[0, 2, 4], [1, 3, 5]])
        assert platform.get_process_group_ranks(part) == [1, 3, 5]
        assert platform.split_group(None, [[0, 2], [1, 3]]) is None
        nested = platform.split_group(part, [[1, 2], [0]])
        assert platform.get_process_group_ranks(nested) == [3, 5]
        group = platform.create_group([4, 5])
        platform.destroy_process_group(group)
        assert platform.get_created_group([4, 5]) is None
        assert platform.create_group([4, 5]) is not group


def test_only_members_make_a_group():
    with silent(5, 8):
        with pytest.raises(ValueError, match="rank 5 is not one of them"):
            platform.create_group([0, 1])
        with pytest.raises(ValueError, match="the ranks of this world are 0 to 7"):
            platform.create_group([5, 8])


def test_a_pretend_world_is_neither_joined_nor_left():
    with silent(2, 3):
        for function in (platform.init_process_group, platform.destroy_process_group):
            with pytest.raises(
                RuntimeError, match=rf"{function.__name__}: this thread is rank 2 of a pretend world of 3"
            ):
                function()
        assert platform.get_rank() == 2


@pytest.mark.skipif(not on_mindspore, reason="PyTorch has worlds of threads")
def test_threads_are_refused_with_the_reason():
    from hyper_parallel.testing import threads

    with pytest.raises(RuntimeError, match="its record of operators for backward is one per process"):
        threads(2).run(platform.get_rank)


# ---------------------------------------------------------------- communication


def test_every_rank_gave_what_this_one_gave():
    with silent(2, 4):
        data = torch.arange(8.0).reshape(4, 2)
        assert torch.equal(collectives.all_reduce(data.clone(), None), data * 4)
        assert torch.equal(collectives.all_reduce(data.clone(), None, op="avg"), data)
        assert torch.equal(collectives.all_reduce(data.clone(), None, True, "max")[0], data)
        assert torch.equal(collectives.all_gather_into_tensor(data, None), data.repeat(4, 1))
        assert torch.equal(collectives.reduce_scatter_tensor(data, None), data[2:3] * 4)
        assert torch.equal(collectives.broadcast(data.clone(), 0, None), data)
        assert torch.equal(collectives.all_to_all_single(data, (4, 2), None)[0], data[2:3].repeat(4, 1))
        out = torch.zeros(16, 2)
        assert collectives.all_gather_into_tensor(data, None, out=out) is out
        assert torch.equal(out, data.repeat(4, 1))
        column = data.t()[1]  # with strides
        assert torch.equal(collectives.all_gather_into_tensor(column, None), column.repeat(4))
        assert collectives.all_reduce(torch.tensor([True, False]), None, op="sum").tolist() == [True, False]


def test_uneven_parts_come_in_their_sizes():
    with silent(1, 3):
        data = torch.arange(6.0).reshape(6, 1)
        output, handle = collectives.all_to_all_single(data, (7, 1), None, True, [3, 2, 2], [1, 2, 3])
        handle.wait()
        assert output.flatten().tolist() == [1, 2, 1, 1, 2, 1, 2]
        output, _ = collectives.all_to_all_single(data[:4], (4, 1), None, False, [2, 0, 2], [2, 0, 2])
        assert output.flatten().tolist() == [0, 0, 0, 0]


def test_messages_of_nobody():
    with silent(1, 3):
        collectives.isend(torch.ones(2), 2).wait()
        received = torch.ones(2)
        collectives.irecv(received, 0).wait()
        assert received.tolist() == [0, 0]
        with pytest.raises(RuntimeError, match="a silent world cannot say who sends first; name the source"):
            collectives.irecv(received)
        platform.barrier()
        assert platform.barrier(async_op=True).wait()


def test_objects():
    with silent(1, 3):
        objects = [None] * 3
        mine = {"rank": 1}
        platform.all_gather_object(objects, mine)
        assert objects == [mine] * 3
        assert objects[0] is not objects[1]
        platform.send_object_list([mine], 0)
        with pytest.raises(RuntimeError, match="only rank 2 knows the objects that it would send here"):
            platform.recv_object_list([None], 2)
        with pytest.raises(RuntimeError, match="only another rank knows the objects"):
            platform.recv_object_list([None])


def test_tensors_without_memory():
    with silent(2, 4), on_meta():
        data = without_memory(8, 3)
        shapes = [
            tuple(result.shape)
            for result in (
                platform.all_reduce(data, None),
                platform.all_gather_into_tensor(data, None),
                platform.reduce_scatter_tensor(data, None, True)[0],
                platform.broadcast(data, 0, None),
                platform.all_to_all_single(data, (2, 3, 4), None)[0],
                platform.all_to_all_single(data, (6, 3), None, False, [1, 2, 2, 1], [2, 2, 2, 2])[0],
                *platform.all_gather_into_tensors([data, without_memory(3)], None),
                *platform.reduce_scatter_tensors([data], None),
                platform.p2p_exchange(data, 0),
                platform.all_gather_into_tensor(data, platform.create_group([2])),
            )
        ]
        platform.isend(data, 0).wait()
        platform.irecv(data, 0).wait()
    assert shapes == [(8, 3), (32, 3), (2, 3), (8, 3), (2, 3, 4), (6, 3), (32, 3), (12,), (2, 3), (8, 3), (8, 3)]


def test_there_is_no_world_outside():
    with silent(0, 2):
        platform.barrier()
    with pytest.raises(RuntimeError, match="there is no process group yet; call init_process_group"):
        platform.barrier()


# ---------------------------------------------------------------- meshes, layouts, distributed tensors


@pytest.mark.parametrize("has_memory", [True, False])
@pytest.mark.parametrize("rank", range(6))
def test_any_rank_of_a_silent_world(rank, has_memory):
    """Two by three ranks, sizes that do not divide: every block has the size that arithmetic gives it."""
    dp, tp = divmod(rank, 3)
    with silent(rank, 6), contextlib.nullcontext() if has_memory else on_meta():
        mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
        assert mesh.get_coordinate() == (dp, tp)
        assert platform.get_process_group_ranks(mesh.get_group("tp")) == [3 * dp, 3 * dp + 1, 3 * dp + 2]
        whole = torch.arange(35.0).reshape(7, 5) if has_memory else without_memory(7, 5)

        placed = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
        assert tuple(placed.shape) == (7, 5)
        assert tuple(placed.to_local().shape) == (rows_of(7, 3, tp), 5)
        for placements, shape in [
            ([Replicate(), Shard(1)], (7, rows_of(5, 3, tp))),
            ([Shard(1), Replicate()], (7, rows_of(5, 2, dp))),
            ([Shard(0), Shard(1)], (rows_of(7, 2, dp), rows_of(5, 3, tp))),
            ([Replicate(), Replicate()], (7, 5)),
        ]:
            assert tuple(placed.redistribute(mesh, placements).to_local().shape) == shape
        addend = torch.ones(4, 6) if has_memory else without_memory(4, 6)
        scattered = from_local(addend, mesh, [Replicate(), Partial()]).redistribute(mesh, [Replicate(), Shard(1)])
        assert tuple(scattered.to_local().shape) == (4, 2)
        if has_memory:
            assert platform.tensor_to_numpy(scattered.to_local()).tolist() == [[3.0, 3.0]] * 4


@pytest.mark.parametrize("rank", range(3))
def test_gradients_of_any_rank(rank):
    with silent(rank, 3):
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        inputs = distribute_tensor(torch.ones(4, 6), mesh, [Replicate()]).requires_grad_()
        weight = distribute_tensor(torch.ones(6, 8), mesh, [Shard(1)]).requires_grad_()
        _check_gradients(inputs, weight, rank)


@pytest.mark.parametrize("rank", range(3))
def test_gradients_without_memory(rank):
    with silent(rank, 3), on_meta():
        mesh = init_device_mesh("cpu", (3,), mesh_dim_names=("tp",))
        inputs = distribute_tensor(without_memory(4, 6), mesh, [Replicate()]).requires_grad_()
        weight = distribute_tensor(without_memory(6, 8), mesh, [Shard(1)]).requires_grad_()
        _check_gradients(inputs, weight, rank)


def _check_gradients(inputs, weight, rank):
    outputs = inputs @ weight
    assert tuple(outputs.shape) == (4, 8)
    assert tuple(outputs.to_local().shape) == (4, rows_of(8, 3, rank))
    loss = (outputs * outputs).sum().full_tensor()
    assert tuple(loss.shape) == ()
    backward(loss)
    assert tuple(grad_of(inputs).redistribute(placements=[Replicate()]).to_local().shape) == (4, 6)
    assert tuple(grad_of(weight).to_local().shape) == (6, rows_of(8, 3, rank))


def test_a_mesh_belongs_to_the_rank_that_built_it():
    def build():
        return init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    first, second = member_of(0, 2), member_of(1, 2)
    with as_member(first):
        mesh = build()
        assert mesh.get_group("tp") is not None
        assert mesh == build()
    with as_member(second):
        other = build()
        assert mesh != other
        assert hash(mesh) != hash(other)
        with pytest.raises(RuntimeError, match=r"was built by another rank of this process, .* used on rank 1"):
            mesh.get_group("tp")
    with pytest.raises(RuntimeError, match="was built by another rank of this process, or outside of its ranks"):
        mesh.get_group("tp")
