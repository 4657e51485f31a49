"""The dispatcher's memory of planned calls, for calls of PyTorch: two that need different plans never share one, and
threads may use it at once."""

import itertools
import threading

import torch
import torch.nn.functional as F

import hyper_parallel as hp
from hyper_parallel.core.shard.dispatching import dispatch
from tests.shard.validator import tensor
from tests.world import run_on_ranks


def _pairs() -> dict[str, list]:
    """Calls of one tensor that differ in one small thing, to be made one after the other."""
    grows = torch.tensor(1)
    return {
        "None or a number": [lambda x: x.sum(None), lambda x: x.sum(0), lambda x: x.sum((0, 1)), lambda x: x.sum(())],
        "a keyword by name": [lambda x: torch.clamp(x, min=0.5), lambda x: torch.clamp(x, max=0.5)],
        "a keyword or a position": [lambda x: torch.clamp(x, 0.5), lambda x: torch.clamp(x, None, 0.5)],
        "a float by what it means": [
            lambda x, p=p: torch.linalg.vector_norm(x, p, 0) for p in (2.0, 1.0, float("inf"))
        ],
        "a float that gives the shape": [
            lambda x, s=s: F.interpolate(x[None], scale_factor=s, mode="linear") for s in (2.0, 3.0, 0.5)
        ],
        "floats that give the shape": [
            lambda x, s=s: F.interpolate(x[None, None], scale_factor=(s, 2.0)) for s in (2.0, 3.0, 1.5)
        ],
        "a dtype": [lambda x, d=d: x.sum(0, dtype=d) for d in (torch.float64, torch.float32, torch.int64)],
        "the dtype of the tensor": [lambda x, d=d: x.to(d).view(torch.int32) for d in (torch.float32, torch.int32)],
        "a slice by a tensor that changes": [lambda x: x[: grows.add_(1)] for _ in range(3)],
        "a tuple or a list of another length": [lambda x, s=s: x.repeat(*s) for s in ((2, 1), (1, 2), (2, 1, 1))],
        "one tensor twice": [
            lambda x: x * x,
            lambda x: x * (x + 1),
            lambda x: torch.cat([x, x]),
            lambda x: torch.cat([x]),
        ],
        "a string": [lambda x, e=e: torch.einsum(e, x, x) for e in ("ij,ij->", "ij,ij->i", "ij,ij->ji", "ij,kj->ik")],
        "a reduction by name": [lambda x, r=r: F.mse_loss(x, x * 2, reduction=r) for r in ("mean", "sum", "none")],
    }


@run_on_ranks(2)
def test_calls_that_differ_in_one_thing_do_not_share_a_plan() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    whole = tensor(5, 3)
    for placement in (hp.Shard(0), hp.Shard(1), hp.Replicate(), hp.Partial()):
        for what in _pairs():
            plain_calls, our_calls = _pairs()[what], _pairs()[what]
            for number, (theirs, mine) in enumerate(zip(plain_calls, our_calls, strict=True)):
                x = hp.distribute_tensor(whole.clone(), mesh, [placement])
                want = theirs(whole.clone())
                found = mine(x)
                where = f"{what}, call {number} under {placement}"
                assert tuple(found.shape) == tuple(want.shape), (
                    f"{where}: {tuple(found.shape)}, not {tuple(want.shape)}"
                )
                torch.testing.assert_close(found.full_tensor(), want, msg=lambda text, where=where: f"{where}: {text}")


@run_on_ranks(2)
def test_threads_plan_at_once() -> None:
    """Many threads make the same new calls while the memory is emptied again and again."""
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    values = [tensor(rows, 4, seed=rows) for rows in range(1, 7)]
    start = threading.Barrier(8)
    failures: list[str] = []
    limit = dispatch._MAX_CALLS
    dispatch._MAX_CALLS = 7

    def work(number: int) -> None:
        start.wait()
        try:
            for turn, value in itertools.product(range(20), values):
                x = hp.DTensor.from_local(value, mesh, [hp.Replicate()], shape=tuple(value.shape))
                found, want = ((one * 2 + turn).T.reshape(-1)[(number + turn) % 3 :].sum() for one in (x, value))
                if tuple(found.shape) != () or not torch.equal(found.to_local(), want):
                    failures.append(f"thread {number}, turn {turn}, {tuple(value.shape)}")
        except Exception as error:
            failures.append(f"thread {number}: {error!r}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        dispatch._MAX_CALLS = limit
    assert not failures, failures[:5]


@run_on_ranks(2)
def test_keywords_in_any_order() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    a, b, c = tensor(4, 4), tensor(4, 4, seed=1), tensor(4, 4, seed=2)
    calls = [
        (torch.mm, {"mat2": a, "input": b}),
        (torch.div, {"other": a, "input": b}),
        (torch.div, {"input": b, "other": a}),
        (torch.addmm, {"mat2": a, "mat1": b, "input": c}),
        (F.linear, {"bias": a[0], "weight": b, "input": c}),
        (torch.where, {"other": a, "condition": b > 0, "input": c}),
        (F.mse_loss, {"target": a, "input": b}),
        (torch.lerp, {"weight": a, "end": b, "input": c}),
    ]
    for func, named in calls:
        for layouts in itertools.product([hp.Replicate(), hp.Shard(0), hp.Partial()], repeat=len(named)):
            ours = {
                name: hp.distribute_tensor(
                    value, mesh, [layout if value.is_floating_point() or layout != hp.Partial() else hp.Shard(0)]
                )
                for (name, value), layout in zip(named.items(), layouts, strict=True)
            }
            found = func(**ours).full_tensor()
            torch.testing.assert_close(found, func(**named), msg=lambda t, f=func, la=layouts: f"{f} under {la}: {t}")
