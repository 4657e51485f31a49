"""Process groups: joining and leaving the world, and groups that are made in any order by their members alone."""

from __future__ import annotations

from datetime import timedelta
from itertools import permutations

import pytest
import torch

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.platform import EXISTING_COMM_GROUPS
from tests.frameworks import collectives, dist, groups
from tests.world import run_on_ranks

# Each rank's order of making groups, all different, with cycles: whoever waits for a group's other members hangs.
CYCLES = [
    {0: [(0, 1), (0, 2)], 1: [(1, 2), (0, 1)], 2: [(0, 2), (1, 2)], 3: []},
    {0: [(0, 3), (0, 1)], 1: [(0, 1), (1, 2)], 2: [(1, 2), (2, 3)], 3: [(2, 3), (0, 3)]},
    {
        0: [(0, 1, 2), (0, 1), (0, 3)],
        1: [(1, 3), (0, 1), (0, 1, 2), (1,)],
        2: [(2, 3), (0, 1, 2)],
        3: [(0, 3), (1, 3), (2, 3)],
    },
]


@run_on_ranks(4)
@pytest.mark.parametrize("cycle", CYCLES)
def test_groups_are_made_in_any_order(cycle):
    rank = dist.get_rank()
    made = {ranks: groups.make_group(ranks) for ranks in cycle[rank]}
    for ranks in sorted(made):
        total = collectives.all_reduce(torch.tensor([float(rank + 1)]), made[ranks])
        assert total.item() == sum(member + 1 for member in ranks)


@run_on_ranks(4)
def test_creating_does_not_wait_for_the_others():
    rank = dist.get_rank()
    if rank == 0:
        group = groups.make_group([0, 1])
    dist.barrier()  # Met by rank 0 only if it did not wait for rank 1, which makes the group after it.
    if rank == 1:
        group = groups.make_group([1, 0])
    if rank < 2:
        assert collectives.all_reduce(torch.ones(3), group).tolist() == [2, 2, 2]


@run_on_ranks(4)
def test_first_uses_in_a_cycle_do_not_wait_for_each_other():
    """A group in use that is not complete yet must not keep its rank from making the groups that others wait for."""
    rank = dist.get_rank()
    ring = [tuple(sorted((rank, (rank + 1) % 4))), tuple(sorted((rank, (rank - 1) % 4)))]
    if rank % 2:
        ring.reverse()
    for ranks in ring:
        total = collectives.all_reduce(torch.tensor([rank]), groups.make_group(ranks))
        assert total.item() == sum(ranks)


@run_on_ranks(4)
def test_isend_to_a_new_peer_does_not_wait_for_it():
    """The middle one turns to the sender last; a first ``isend`` that waited for it would wait for ever."""
    rank = dist.get_rank()
    for sender, middle, last in permutations(range(3)):
        if rank == 3:
            continue
        group = groups.make_group([0, 1, 2])
        message, received = torch.tensor([float(rank)]), torch.empty(1)
        if rank == sender:
            for work in [collectives.isend(message, peer, group) for peer in (middle, last)]:
                work.wait()
        elif rank == middle:
            for peer in (last, sender):
                collectives.irecv(received, peer, group).wait()
                assert received.item() == peer
        else:
            collectives.irecv(received, sender, group).wait()
            assert received.item() == sender
            collectives.isend(message, middle, group).wait()


@run_on_ranks(4)
def test_many_groups_of_one_set_and_of_all_subsets():
    rank, total = dist.get_rank(), 0
    for mask in sorted(range(1, 16), key=lambda mask: (mask * 7 + rank * 5) % 16):
        ranks = [member for member in range(4) if mask >> member & 1]
        if rank in ranks:
            get_platform().create_group(ranks)
    for mask in range(1, 16):
        ranks = [member for member in range(4) if mask >> member & 1]
        if rank in ranks:
            group = get_platform().get_created_group(ranks)
            assert get_platform().get_process_group_ranks(group) == ranks
            assert collectives.all_reduce(torch.tensor(rank), group).item() == sum(ranks)
            total += 1
    assert total == 8
    again = [groups.make_group([0, 1]) for _ in range(3)] if rank < 2 else []
    assert len({id(group) for group in again}) == len(again)
    for group in reversed(again):
        assert collectives.all_gather_into_tensor(torch.tensor(rank), group).tolist() == [0, 1]


@run_on_ranks(4)
def test_create_group():
    platform, rank = get_platform(), dist.get_rank()
    mine = [0, 2] if rank % 2 == 0 else [3, 1]
    group = platform.create_group(mine)
    assert platform.create_group(mine[::-1]) is group
    assert platform.get_created_group(mine[::-1]) is group
    assert platform.get_process_group_ranks(group) == sorted(mine)
    assert platform.get_group_local_rank(group) == sorted(mine).index(rank)
    assert [platform.get_global_rank(group, place) for place in range(2)] == sorted(mine)
    assert platform.get_backend(group) == platform.get_backend()
    assert platform.create_group(range(4)) is groups.make_group(range(4))
    assert platform.get_created_group([0, 1, 2]) in (None, platform.get_created_group([2, 1, 0]))
    platform.barrier(group)
    platform.barrier(group, async_op=True).wait()
    alone = platform.create_group([rank])
    assert alone.size() == 1
    assert platform.barrier(alone) is None
    assert platform.barrier(alone, async_op=True).wait()
    others = [r for r in range(4) if r != rank]
    with pytest.raises(ValueError, match=f"rank {rank} is not one of them; only the members"):
        groups.make_group(others)
    with pytest.raises(ValueError, match="ranks of this world are 0 to 3"):
        groups.make_group([rank, 4])
    with pytest.raises(ValueError, match="each named once"):
        groups.make_group([rank, rank])
    with pytest.raises(ValueError, match="has no rank 2; it has 0 to 1"):
        groups.get_global_rank(group, 2)
    with pytest.raises(TypeError, match="not a str"):
        groups.get_process_group_ranks("world")


@run_on_ranks(4)
def test_mark_created_groups():
    platform, rank = get_platform(), dist.get_rank()
    ranks = (0, 3) if rank in (0, 3) else (1, 2)
    before = EXISTING_COMM_GROUPS.pop(ranks, None)
    group = groups.make_group(ranks)
    platform.mark_created_groups([group])
    assert platform.create_group(ranks) is group
    if before is not None:
        EXISTING_COMM_GROUPS[ranks] = before


@run_on_ranks(4)
def test_split_group():
    rank = dist.get_rank()
    half = groups.split_group(split_ranks=[[3, 1], [0, 2]], group_desc="halves", timeout=timedelta(seconds=100))
    assert groups.get_process_group_ranks(half) == ([1, 3] if rank % 2 else [0, 2])
    assert collectives.all_reduce(torch.tensor(rank), half).item() == (4 if rank % 2 else 2)
    # Ranks of the parent group, not of the world.
    quarter = groups.split_group(half, [[1], [0]])
    assert groups.get_process_group_ranks(quarter) == [rank]
    some = groups.split_group(None, [[1, 2]])
    assert (some is None) == (rank in (0, 3))
    if some is not None:
        assert collectives.all_gather_into_tensor(torch.tensor(rank), some).tolist() == [1, 2]
    for wrong in ([[0, 1], [1, 2]], [[0], []], [[0, 4]], [[-1]]):
        with pytest.raises(ValueError, match="do not overlap, and name ranks of the parent group, 0 to 3"):
            groups.split_group(None, wrong)
    with pytest.raises(ValueError, match="split_ranks is missing"):
        groups.split_group()


@run_on_ranks(2)
def test_a_second_world_is_an_error():
    with pytest.raises(RuntimeError, match=r"already rank \d of a world of 2 \(backend \w+\); call destroy"):
        groups.init_process_group()


@run_on_ranks(2)
def test_destroying_a_group_forgets_it():
    platform, rank = get_platform(), dist.get_rank()
    for _ in range(3):
        group = platform.create_group([rank])
        platform.destroy_process_group(group)
        assert platform.get_created_group([rank]) is None


def test_without_a_world():
    assert (groups.get_rank(), groups.get_world_size()) == (0, 1)
    assert (groups.get_group_local_rank(), groups.get_process_group_ranks()) == (0, [0])
    for call in (groups.barrier, groups.destroy_process_group, lambda: collectives.all_reduce(torch.ones(1), None)):
        with pytest.raises(RuntimeError, match=r"no process group yet; call init_process_group\(\) first"):
            call()


def test_missing_environment_is_named(monkeypatch):
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=r"does not say .*; start the program with torchrun") as caught:
        groups.init_process_group()
    assert all(name in str(caught.value) for name in names)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ValueError, match="does not say MASTER_PORT; "):
        groups.init_process_group(rank=0, world_size=1)
