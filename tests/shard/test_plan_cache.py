"""The dispatcher's memory of planned calls: two calls that need different plans never share one, and it is bounded."""

from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.shard.dispatching import dispatch, plan_call
from tests.frameworks import assert_close, distribute_tensor, from_local, on_mindspore, ours, theirs
from tests.frameworks.functions import cat, softmax
from tests.shard.validator import tensor
from tests.world import run_on_ranks


def _placed(x: Any, values: torch.Tensor) -> Any:
    """The values as they can meet ``x``."""
    return distribute_tensor(values, x.device_mesh, None) if isinstance(x, hp.DTensor) else values


def _number(x: Any, number: int) -> Any:
    plain = torch.tensor(number)
    return ours(plain) if isinstance(x, hp.DTensor) else plain


PICKED = torch.tensor([1, 0, 1, 1, 0])
# Calls of one tensor that differ in one small thing, to be made one after the other.
CALLS = {
    "a number by value": [lambda x, n=n: x.sum(n) for n in (0, 1)],
    "a number and a truth": [lambda x: x.sum(1), lambda x: x.sum(1, True), lambda x: x.sum(1, False)],
    "a number and numbers": [lambda x: x.sum(), lambda x: x.sum(0), lambda x: x.sum((0, 1))],
    "the dtype of an index": [lambda x: x[_placed(x, PICKED.bool())], lambda x: x[_placed(x, PICKED)]],
    "a plain number as an index": [lambda x, n=n: x[_number(x, n)] for n in (0, 1, 4)],
    "an index and a list": [
        lambda x: x[1],
        lambda x: x[[1]],
        lambda x: x[(1,)],
        lambda x: x[1:2],
        lambda x: x[..., 1],
    ],
    "a slice": [lambda x, s=s: x[s] for s in (slice(1, 4), slice(1, None), slice(None, None, 2), slice(4, 1))],
    "a shape": [lambda x, s=s: x.reshape(s) for s in ((3, 5), (15,), (5, 3, 1), (-1,))],
    "one tensor twice": [lambda x: x * x, lambda x: x * (x + 1), lambda x: cat([x, x]), lambda x: cat([x])],
    "a dim": [lambda x, d=d: softmax(x, d) for d in (0, 1, -1)],
    "a plain number": [lambda x, n=n: x * n for n in (2, 2.5, True)],
}


@run_on_ranks(2)
def test_calls_that_differ_in_one_thing_do_not_share_a_plan() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    whole = tensor(5, 3)
    for placement in (hp.Shard(0), hp.Shard(1), hp.Replicate(), hp.Partial()):
        for what, calls in CALLS.items():
            for number, call in enumerate(calls):
                found, want = call(distribute_tensor(whole, mesh, [placement])), call(whole)
                where = f"{what}, call {number} under {placement}"
                assert tuple(found.shape) == tuple(want.shape), where
                assert_close(found.full_tensor(), want, msg=lambda text, where=where: f"{where}: {text}")


@run_on_ranks(2)
def test_a_pending_sum_is_rounded_once() -> None:
    """Copying a pending sum of fractions into whole numbers cannot be done part by part; between floats it can."""
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    halves = from_local(torch.full((4,), 0.75), mesh, [hp.Partial()], shape=(4,))
    for dtype in (torch.float64, torch.int64, torch.float32):
        target = distribute_tensor(torch.zeros(4, dtype=dtype), mesh, [hp.Replicate()])
        target.copy_(halves)
        assert theirs(target.full_tensor()).tolist() == [1.5 if dtype.is_floating_point else 1] * 4
        pending = from_local(torch.zeros(4, dtype=dtype), mesh, [hp.Partial()], shape=(4,))
        if on_mindspore and not dtype.is_floating_point:  # it does not tell whether another tensor shares the memory
            with pytest.raises(RuntimeError, match=r"copy_ cannot write into .*reduce_partial\(\) first"):
                pending.copy_(halves)
            continue
        pending.copy_(halves)  # whole numbers: the sum of the target, which nobody shares, is done first
        assert theirs(pending.full_tensor()).tolist() == [1.5 if dtype.is_floating_point else 1] * 4


@run_on_ranks(2)
def test_the_memory_is_bounded() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    x = distribute_tensor(tensor(5, 3), mesh, [hp.Shard(0)])
    limits = dispatch._MAX_CALLS, plan_call._MAX_SHAPES
    dispatch._MAX_CALLS = plan_call._MAX_SHAPES = 10
    tables = (dispatch._calls, dispatch._direct, plan_call._shapes)
    for table in tables:  # Earlier tests of this world have filled them.
        table.clear()
    try:
        for shift in range(40):
            take = (slice(shift % 5), slice(shift // 5 % 3, None, 1 + shift // 20))
            assert_close(x[take].full_tensor(), tensor(5, 3)[take])
            assert all(len(table) <= 10 for table in tables)
    finally:
        dispatch._MAX_CALLS, plan_call._MAX_SHAPES = limits


@pytest.mark.processes("plans of all ranks of a process are in one table")
@run_on_ranks(2)
def test_plans_are_forgotten_when_a_group_is_left() -> None:
    """In the next world this rank may have another place in an equal mesh."""
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    x = distribute_tensor(tensor(5, 3), mesh, [hp.Shard(0)])
    wanted = (x + x).reshape(5, 1, 3).full_tensor()
    assert dispatch._calls and dispatch._direct
    platform = hp.get_platform()
    platform.destroy_process_group(platform.create_group([platform.get_rank()]))
    assert not dispatch._calls and not dispatch._direct
    assert_close((x + x).reshape(5, 1, 3).full_tensor(), wanted)
