"""Ranks as threads: the same numbers as processes, each rank's own state, and failures that are told at once."""

from __future__ import annotations

import random
import re
import threading
import time
import warnings

import numpy as np
import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.platform import EXISTING_COMM_GROUPS
from hyper_parallel.platform.shared import membership
from hyper_parallel.testing import Deadlock, threads

only_on = "torch"  # a record of operators per process, as MindSpore has, lets only one rank in

platform = hp.get_platform()


def line_of(text: str) -> int:
    """Where in this file the marked line is."""
    with open(__file__) as source:
        return next(number for number, line in enumerate(source, 1) if line.rstrip().endswith(f"# {text}"))


# ---- what runs ----


def train_a_step() -> tuple[float, list[torch.Tensor]]:
    mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    x, weight = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((7, 6), (6, 5)))
    mine = [
        hp.distribute_tensor(x.detach(), mesh, [hp.Shard(0), hp.Replicate()]).requires_grad_(),
        hp.distribute_tensor(weight.detach(), mesh, [hp.Replicate(), hp.Shard(1)]).requires_grad_(),
    ]
    loss = (mine[0] @ mine[1]).tanh().sum()
    loss.backward()
    plain = (x @ weight).tanh().sum()
    plain.backward()
    for cut, whole in zip(mine, (x, weight), strict=True):
        torch.testing.assert_close(cut.grad.full_tensor(), whole.grad, rtol=1e-12, atol=1e-12)
    return loss.full_tensor().item(), plain.item()


def test_a_step_is_that_of_one_device_and_the_world_stays_for_the_next():
    world = threads(4)
    for _ in range(2):
        for mine, plain in world.run(train_a_step):
            assert mine == pytest.approx(plain, rel=1e-14)


def test_a_decorated_function_runs_on_every_rank():
    @threads(3)
    def ranks(offset, *, scale=1):
        """What it does."""
        return scale * platform.get_rank() + offset

    assert ranks(5, scale=2) == [5, 7, 9]
    assert (ranks.__name__, ranks.__doc__) == ("ranks", "What it does.")
    assert current_rank_outside() == (0, 1)


def current_rank_outside() -> tuple[int, int]:
    return platform.get_rank(), platform.get_world_size()


def every_collective() -> None:
    rank, size = platform.get_rank(), platform.get_world_size()
    data = torch.arange(size * 2.0) + rank
    everybody = [torch.arange(size * 2.0) + other for other in range(size)]
    for op, fold in {"sum": sum, "max": lambda all_: torch.stack(all_).amax(0), "avg": lambda a: sum(a) / size}.items():
        torch.testing.assert_close(platform.all_reduce(data.clone(), None, op=op), fold(everybody))
    gathered, handle = platform.all_gather_into_tensor(data, None, True)
    handle.wait()
    torch.testing.assert_close(gathered, torch.cat(everybody))
    own = platform.reduce_scatter_tensor(data.to(torch.bfloat16), None)
    torch.testing.assert_close(own.float(), sum(everybody)[2 * rank : 2 * rank + 2])
    received, handle = platform.all_to_all_single(data, data.shape, None, True)
    handle.wait()
    torch.testing.assert_close(received, torch.cat([one[2 * rank : 2 * rank + 2] for one in everybody]))
    rows = torch.full((rank + size, 1), float(rank))
    splits = [1] * (size - 1) + [rank + 1]
    output = [1 if rank < size - 1 else other + 1 for other in range(size)]
    received, _ = platform.all_to_all_single(rows, (sum(output), 1), None, False, output, splits)
    assert received[:, 0].tolist() == [float(other) for other in range(size) for _ in range(output[other])]
    assert platform.broadcast(torch.tensor(rank), size - 1, None).item() == size - 1
    lists = platform.all_gather_into_tensors([data, torch.tensor([rank])], None)
    assert lists[1].tolist() == list(range(size))
    right, left = (rank + 1) % size, (rank - 1) % size
    box = torch.empty(1)
    handles = [platform.irecv(box, left, None, 3), platform.isend(torch.tensor([float(rank)]), right, None, 3)]
    for handle in handles:
        handle.wait()
    assert box.item() == left
    if rank == 0:
        platform.send_object_list([{"from": 0}, 1], right)
    elif rank == 1:
        found = [None, None]
        assert platform.recv_object_list(found) == 0
        assert found == [{"from": 0}, 1]
    platform.barrier()
    handle = platform.barrier(async_op=True)
    while not handle.is_completed():  # others run meanwhile
        pass


@pytest.mark.parametrize("num_ranks", [2, 3, 5])
def test_every_collective_and_message(num_ranks):
    threads(num_ranks).run(every_collective)


def test_two_groups_of_the_same_ranks_are_two():
    def program():
        first, second = (platform.split_group(None, [[0, 1]]) for _ in range(2))
        one, two = torch.ones(1), torch.ones(1) * 10
        order = (first, one, second, two) if platform.get_rank() == 0 else (second, two, first, one)
        handles = [platform.all_reduce(tensor, group, True)[1] for group, tensor in (order[:2], order[2:])]
        for handle in handles:
            handle.wait()
        return one.item(), two.item()

    assert threads(2).run(program) == [(2, 20), (2, 20)]


# ---- each rank's own state ----


def test_random_numbers_are_those_of_each_rank():
    def draw():
        torch.manual_seed(platform.get_rank())
        random.seed(platform.get_rank())
        np.random.seed(platform.get_rank())
        hp.manual_seed(3)
        mesh = hp.init_device_mesh("cpu", (2,))
        drawn = []
        for _ in range(3):
            drawn += [torch.rand(()).item(), random.random(), np.random.rand()]
            platform.barrier()
            drawn.append(hp.rand((2, 2), mesh, [hp.Shard(0)]).full_tensor().sum().item())
        return drawn

    assert threads(2).run(draw) == [threads(1).run(alone, rank)[0] for rank in range(2)]


def alone(rank):
    """What a rank draws when nobody else does."""
    torch.manual_seed(rank)
    random.seed(rank)
    np.random.seed(rank)
    hp.manual_seed(3)
    mesh = hp.init_device_mesh("cpu", (1,))
    drawn = []
    for _ in range(3):
        drawn += [torch.rand(()).item(), random.random(), np.random.rand()]
        drawn.append(hp.rand((2, 2), mesh, [hp.Replicate()]).full_tensor().sum().item())
    return drawn


def test_settings_recorders_and_warnings_are_those_of_each_rank():
    def program():
        rank = platform.get_rank()
        if rank == 0:
            torch.set_default_dtype(torch.float64)
        with warnings.catch_warnings(record=True) as caught, hp.CommRecorder() as recorder:
            warnings.simplefilter("error" if rank else "always")
            platform.all_reduce(torch.ones(1, dtype=torch.float32), None)
            if rank:
                with pytest.raises(UserWarning):
                    warnings.warn("once", stacklevel=1)
            else:
                warnings.warn("once", stacklevel=1)
            platform.barrier()
        return torch.ones(1).dtype, len(recorder.records), len(caught)

    before = (torch.get_default_dtype(), warnings.filters[:], torch.get_rng_state())
    assert threads(2).run(program) == [(torch.float64, 1, 1), (torch.float32, 1, 0)]
    assert (torch.get_default_dtype(), warnings.filters[:]) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])


def test_state_that_a_rank_declares_begins_as_it_was_in_every_rank_and_run(monkeypatch):
    """The module of it was imported by the first rank."""
    monkeypatch.setattr(membership, "_states", [*membership._states])
    state = ["first"]

    def rank():
        if platform.get_rank() == 0 and len(membership._states) == declared:
            membership.list_belongs_to_rank(state)
        found, state[0] = state[0], "later"
        return found

    declared = len(membership._states)
    assert [threads(2).run(rank) for _ in range(2)] == [["first", "first"], ["first", "first"]]


def test_groups_and_meshes_are_those_of_each_rank():
    def program():
        mesh = hp.init_device_mesh("cpu", (2,))
        group = mesh.get_group()
        assert platform.get_created_group([0, 1]) is group
        return mesh, id(group), len(EXISTING_COMM_GROUPS), platform.get_backend()

    outside, groups = hp.init_device_mesh("cpu", (2,), init_backend=False), dict(EXISTING_COMM_GROUPS)
    (first, *_), (second, *_) = found = threads(2).run(program)
    assert first != second and first != outside and len({first, second, outside}) == 3
    assert [one[2:] for one in found] == [(1, "pretend")] * 2
    assert found[0][1] != found[1][1] and dict(EXISTING_COMM_GROUPS) == groups
    with pytest.raises(RuntimeError, match="build the mesh in the function that runs on the ranks"):
        threads(2).run(outside.get_group)


def test_one_rank_runs_at_a_time():
    running = []

    def program():
        for _ in range(20):
            assert not running
            running.append(threading.get_ident())
            time.sleep(0.0001)
            running.pop()
            platform.barrier()

    threads(4).run(program)


# ---- what goes wrong ----


def test_groups_in_opposite_order_are_a_deadlock_that_names_ranks_groups_and_lines():
    def program():
        first, second = platform.create_group([0, 1, 2]), platform.split_group(None, [[0, 1, 2]])
        one, two = (first, second) if platform.get_rank() else (second, first)
        platform.all_reduce(torch.ones(2), one)  # the first of the two
        platform.all_reduce(torch.ones(2), two)

    world = threads(3)
    world.run(platform.barrier)
    start = time.perf_counter()
    with pytest.raises(Deadlock) as caught:
        world.run(program)
    assert time.perf_counter() - start < 5  # 0.002 s where nothing else runs
    text = str(caught.value)
    at = f"{__file__}:{line_of('the first of the two')}"
    assert text.startswith("no rank can go on:\n  rank 0: all_reduce(shape=(2,), dtype=torch.float32, op=sum)")
    assert text.count(at) == 3 and "waits for [1, 2]" in text and "waits for [0]" in text
    assert "the group [0, 1, 2] (the 2nd of these ranks)" in text
    assert world.run(platform.get_rank) == [0, 1, 2], "a new world"


def test_a_rank_that_ends_too_early_is_named():
    def program():
        if platform.get_rank() != 1:
            platform.all_reduce(torch.ones(1), None)

    with pytest.raises(Deadlock, match=r"rank 0: all_reduce.* waits for \[1\]\n.*rank 2: .*\n  rank 1 has ended"):
        threads(3).run(program)


def test_ranks_that_disagree_are_named_with_both_sides():
    def program():
        platform.all_reduce(torch.ones(2 + platform.get_rank()), None)  # other shapes

    start = time.perf_counter()
    with pytest.raises(RuntimeError) as caught:
        threads(2).run(program)
    assert time.perf_counter() - start < 5
    at = re.escape(f"{__file__}:{line_of('other shapes')}")
    sides = rf"  rank 0: all_reduce\(shape=\(2,\).*{at}\n  rank 1: all_reduce\(shape=\(3,\).*{at}"
    assert re.search(rf"disagree: not the same shape\n{sides}", str(caught.value))


@pytest.mark.parametrize(
    ("mine", "problem"),
    [
        (lambda rank: platform.all_reduce(torch.ones(2), None, op=("sum", "max")[rank]), "not the same op"),
        (lambda rank: platform.all_reduce(torch.ones(2).to((torch.int32, torch.int64)[rank]), None), "same dtype"),
        (lambda rank: platform.broadcast(torch.ones(2), rank, None), "not the same src"),
        (lambda rank: platform.barrier() if rank else platform.all_reduce(torch.ones(2), None), "the same function"),
        (
            lambda rank: platform.all_to_all_single(
                torch.ones(4), (4,), None, False, [2, 2], [(2, 2), (3, 1)][rank] if rank else [2, 2]
            ),
            "this rank sends itself 1 rows but expects 2|group rank 1 sends 3 rows",
        ),
    ],
)
def test_what_ranks_can_disagree_about(mine, problem):
    with pytest.raises((RuntimeError, ValueError), match=problem):
        threads(2).run(lambda: mine(platform.get_rank()))


def test_a_message_of_another_size_is_refused():
    def program():
        if platform.get_rank():
            platform.irecv(torch.empty(3), 0).wait()
        else:
            platform.isend(torch.ones(2), 1)

    with pytest.raises(RuntimeError, match=r"not the same size\n  rank 0: isend\(dst=1, .*\n  rank 1: irecv\(src=0"):
        threads(2).run(program)


def test_what_nobody_joined_is_told_at_the_end():
    def program():
        if platform.get_rank() == 0:
            platform.all_reduce(torch.ones(1), None, True)
            platform.isend(torch.ones(1), 1)

    with pytest.raises(RuntimeError, match=r"never took part(.*\n)+  rank 0: all_reduce(.*\n)+?.*isend\(dst=1"):
        threads(2).run(program)


def test_the_first_error_is_raised_and_ends_the_others():
    ended = []

    def program():
        try:
            platform.barrier()
            if platform.get_rank() == 1:
                raise KeyError("mine")
            platform.barrier()
        finally:
            ended.append(platform.get_rank())

    world = threads(3)
    with pytest.raises(KeyError, match="mine") as caught:
        world.run(program)
    assert sorted(ended) == [0, 1, 2]
    assert "on rank 1 of 3" in getattr(caught.value, "__notes__", ["on rank 1 of 3"])
    assert world.run(platform.get_rank) == [0, 1, 2]


def test_a_wait_with_a_limit_ends_where_nobody_comes():
    from datetime import timedelta

    def program():
        if platform.get_rank() == 0:
            _, handle = platform.all_reduce(torch.ones(1), None, True)
            with pytest.raises(RuntimeError, match="Timed out"):
                handle.wait(timedelta(seconds=1))
        else:
            platform.irecv(torch.ones(1), 0).wait()

    with pytest.raises((Deadlock, RuntimeError)):
        threads(2).run(program)


def test_a_rank_that_does_not_come_back_is_ended_by_the_time_limit():
    stop = threading.Event()

    def program():
        if platform.get_rank() == 1:
            stop.wait()
        platform.barrier()

    with pytest.raises(TimeoutError, match=r"did not end within 0.2 s(.*\n)*rank 1:(.*\n)*.*stop.wait\(\)"):
        threads(2, timeout=0.2).run(program)
    stop.set()


def test_what_cannot_be_done_inside_is_refused():
    for wrong in (0, -1, "two"):
        with pytest.raises(ValueError, match=r"a world has one rank or more, as in threads\(2\)"):
            threads(wrong)

    def program():
        for refused in (platform.init_process_group, platform.destroy_process_group):
            with pytest.raises(RuntimeError, match="this thread is rank 0 of a pretend world of 1"):
                refused()
        with pytest.raises(RuntimeError, match="call it outside of the ranks"):
            threads(2).run(platform.get_rank)

    threads(1).run(program)


def test_the_fixture(pytester):
    pytester.makeconftest('pytest_plugins = ["hyper_parallel.testing.fixtures"]')
    pytester.makepyfile(
        """
        import hyper_parallel as hp

        def test_mine(on_threads):
            assert on_threads(3, lambda x: hp.get_platform().get_rank() + x, 1) == [1, 2, 3]
        """
    )
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=1)
