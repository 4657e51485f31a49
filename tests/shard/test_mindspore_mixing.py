"""What MindSpore does not hand to ``__fallback__``: indexing, assignment, lists of tensors, plain with distributed,
operators without a rule. All forms give the values of one device, or an error that says what to write."""

from __future__ import annotations

import threading

import mindspore as ms
import mindspore.mint.nn.functional as F
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

import hyper_parallel as hp
from tests.world import run_on_ranks


def values(*shape: int) -> np.ndarray:
    return np.random.RandomState(len(shape) + shape[0]).rand(*shape).astype(np.float32)


def layouts(ndim: int) -> list[hp.Placement]:
    return [hp.Replicate(), *(hp.Shard(dim) for dim in range(ndim)), hp.Partial()]


def placed(array: np.ndarray, mesh: hp.DeviceMesh, placement: hp.Placement) -> hp.DTensor:
    return hp.distribute_tensor(Tensor(array), mesh, [placement])


def line() -> hp.DeviceMesh:
    return hp.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))


def same(mine: hp.DTensor, plain: Tensor, what: str) -> None:
    assert isinstance(mine, hp.DTensor), f"{what}: a {type(mine).__name__}"
    whole = mine.full_tensor()
    assert whole.dtype == plain.dtype, f"{what}: {whole.dtype} instead of {plain.dtype}"
    np.testing.assert_allclose(whole.asnumpy(), plain.asnumpy(), 1e-5, 1e-5, err_msg=what)


INDICES = {
    "a row": 1,
    "the last row": -1,
    "an element": (1, 2),
    "a range": slice(1, 4),
    "every other": slice(None, None, 2),
    "a range of columns": (slice(None), slice(1, None)),
    "no rows": slice(2, 2),
    "an ellipsis": (Ellipsis, 0),
    "a new dim": (slice(None), None, 1),
    "a list": [0, 4, 2],
    "a list and a range": (slice(1, 3), [2, 0]),
    "all": Ellipsis,
}


@run_on_ranks(2)
def test_reading_by_position_in_all_forms():
    mesh, array = line(), values(5, 3)
    ids, mask = np.array([3, 0, 3]), values(5, 3) > 0.5
    for placement in layouts(2):
        x = placed(array, mesh, placement)
        for what, index in INDICES.items():
            same(x[index], Tensor(array[index]), f"{what} under {placement}")
        whole_ids, whole_mask = (placed(one, mesh, hp.Replicate()) for one in (ids, mask))
        same(x[whole_ids], Tensor(array[ids]), f"rows by a tensor under {placement}")
        same(x[whole_ids, 1], Tensor(array[ids, 1]), f"elements by a tensor under {placement}")
        same(x[whole_mask], Tensor(array[mask]), f"elements by a mask under {placement}")
        rows = [row.full_tensor().asnumpy() for row in x]
        np.testing.assert_allclose(rows, array, 1e-6)
        assert len(x) == 5


@run_on_ranks(2)
def test_writing_by_position_in_all_forms():
    mesh, array = line(), values(5, 3)
    for placement in layouts(2)[:3]:
        for what, index in INDICES.items():
            x, wanted = placed(array, mesh, placement), array.copy()
            x[index] = 7.0
            wanted[index] = 7.0
            same(x, Tensor(wanted), f"a number into {what} under {placement}")
            x, wanted = placed(array, mesh, placement), array.copy()
            if wanted[index].size:
                new = wanted[index] * 0 - 1
                x[index] = placed(new, mesh, hp.Replicate())
                wanted[index] = new
                same(x, Tensor(wanted), f"a tensor into {what} under {placement}")
        mask = array > 0.5
        x, wanted = placed(array, mesh, placement), array.copy()
        x[placed(mask, mesh, hp.Replicate())] = 0.0
        wanted[mask] = 0.0
        same(x, Tensor(wanted), f"a number through a mask under {placement}")


@run_on_ranks(2)
def test_lists_of_tensors():
    mesh, one, two = line(), values(4, 3), values(3, 4).T.copy()
    calls = {
        "stack": lambda a, b: ops.stack([a, b], 1),
        "stack of a tuple": lambda a, b: ops.stack((a, b)),
        "Stack": lambda a, b: ops.Stack(1)([a, b]),
        "concat": lambda a, b: ops.concat([a, b], 1),
        "cat": lambda a, b: ops.cat((a, b)),
        "mint.cat": lambda a, b: mint.cat([a, b]),
        "Concat": lambda a, b: ops.Concat(1)((a, b)),
        "addn": lambda a, b: ops.addn([a, b, a]),
        "hstack": lambda a, b: ops.hstack((a, b)),
        "meshgrid": lambda a, b: ops.meshgrid(a[0], b[1])[0],
        "Meshgrid": lambda a, b: ops.Meshgrid("ij")((a[0], b[1]))[1],
    }
    for first in layouts(2):
        for second in layouts(2):
            a, b = placed(one, mesh, first), placed(two, mesh, second)
            for what, call in calls.items():
                same(call(a, b), call(Tensor(one), Tensor(two)), f"{what} under {first}, {second}")


@run_on_ranks(2)
def test_operators_without_a_rule():
    mesh, array = line(), values(4, 3)
    calls = {
        "softsign": ops.softsign,
        "tanhshrink": ops.tanhshrink,
        "cov": ops.cov,
        "igamma": lambda a: ops.igamma(a, a + 1),
        "xdivy": lambda a: ops.xdivy(a, a + 1),
        "lrn": lambda a: ops.lrn(a.reshape(1, 4, 3, 1), 2),
        "L2Normalize": lambda a: ops.L2Normalize(1)(a),
        "ReverseSequence": lambda a: ops.reverse_sequence(a, placed_like(a, np.array([2, 3, 1, 2])), 1),
        "matrix_band_part": lambda a: ops.matrix_band_part(a, 1, 1),
        "unique": lambda a: ops.unique(ops.round(a * 2).reshape(-1))[0],
        "nn.GLU": lambda a: nn.GLU(0)(a),
    }

    def placed_like(like: Tensor, array: np.ndarray) -> Tensor:
        return placed(array, mesh, hp.Replicate()) if isinstance(like, hp.DTensor) else Tensor(array)

    for placement in layouts(2):
        for what, call in calls.items():
            same(call(placed(array, mesh, placement)), call(Tensor(array)), f"{what} under {placement}")


@run_on_ranks(2)
def test_plain_tensors_are_refused_with_what_to_write():
    mesh, array = line(), values(4, 4)
    plain = Tensor(array)
    ids = np.array([1, 3])
    for placement in layouts(2)[:3]:
        x = placed(array, mesh, placement)
        row = placed(ids, mesh, hp.Shard(0))
        calls = {
            "x + plain": lambda x=x: x + plain,
            "plain + x": lambda x=x: plain + x,
            "x * array": lambda x=x: x * array,
            "x - list": lambda x=x: x - array.tolist(),
            "x @ plain": lambda x=x: x @ plain,
            "plain @ x": lambda x=x: plain @ x,
            "plain.mul(x)": lambda x=x: plain.mul(x),
            "x.add(plain)": lambda x=x: x.add(plain),
            "mint.add(plain, x)": lambda x=x: mint.add(plain, x),
            "where(plain, x, x)": lambda x=x: ops.where(plain > 0, x, x),
            "linear(plain, x)": lambda x=x: F.linear(plain, x),
            "stack": lambda x=x: ops.stack([plain, x]),
            "cat": lambda x=x: mint.cat([x, plain]),
            "concat": lambda x=x: ops.concat((plain, x)),
            "mse_loss": lambda x=x: ops.mse_loss(x, plain),
            "plain.copy_(x)": lambda x=x: plain.copy_(x),
            "x[plain]": lambda x=x: x[Tensor(ids)],
            "plain[x]": lambda row=row: plain[row],
            "x[...] = plain": lambda x=x: x.__setitem__(Ellipsis, plain),
            "plain[0] = x": lambda x=x: plain.__setitem__(0, x[0]),
        }
        for what, call in calls.items():
            with pytest.raises((RuntimeError, TypeError), match="distribute_tensor"):
                call()
                raise AssertionError(f"{what} under {placement} was not refused")
        np.testing.assert_array_equal(plain.asnumpy(), array)
        same(x + Tensor(2.0), Tensor(array + 2), "a plain number-like tensor")
        same(2 - x, Tensor(2 - array), "a number before")
        with pytest.raises(TypeError):
            x + "a word"
        assert (x == None) is False  # noqa: E711


@run_on_ranks(2)
def test_new_tensors_like_a_distributed_one():
    mesh, array = line(), values(5, 3)
    for placement in layouts(2):
        x = placed(array, mesh, placement)
        same(ops.full_like(x, 3.0), Tensor(np.full((5, 3), 3.0, np.float32)), "full_like")
        same(ops.full_like(x, 3, dtype=ms.int32), Tensor(np.full((5, 3), 3, np.int32)), "full_like of integers")
        same(ops.zeros_like(x), Tensor(array * 0), "zeros_like")
        same(ops.ones_like(x), Tensor(array * 0 + 1), "ones_like")
        same(x.new_zeros((2, 2)), Tensor(np.zeros((2, 2), np.float32)), "new_zeros")


@run_on_ranks(2)
def test_positions_have_the_dtype_of_the_plain_call():
    mesh, array = line(), values(5, 3)
    calls = {
        "argmax": lambda a: ops.argmax(a, 0),
        "argmin": lambda a: ops.argmin(a, 0),
        "argmin of all": lambda a: ops.argmin(a),
        "x.argmax": lambda a: a.argmax(0),
        "x.argmin": lambda a: a.argmin(1),
        "x.argmin of all": lambda a: a.argmin(),
        "max": lambda a: ops.max(a, 0)[1],
        "min": lambda a: ops.min(a, 1)[1],
        "mint.max": lambda a: mint.max(a, 0)[1],
        "ArgMaxWithValue": lambda a: ops.ArgMaxWithValue(0)(a)[0],
        "topk": lambda a: ops.topk(a, 2, 0)[1],
        "sort": lambda a: ops.sort(a, 0)[1],
        "argsort": lambda a: ops.argsort(a, 1),
    }
    for placement in layouts(2):
        for what, call in calls.items():
            same(call(placed(array, mesh, placement)), call(Tensor(array)), f"{what} under {placement}")


@run_on_ranks(2)
def test_batch_norm_layers_move_their_statistics_as_on_one_device():
    mesh, array = line(), values(5, 4, 2, 3)
    plain = nn.BatchNorm2d(4)
    plain.set_train()
    wanted = plain(Tensor(array))
    for placement in layouts(4)[:-1]:
        layer = nn.BatchNorm2d(4)
        layer.set_train()
        hp.distribute_module(layer, mesh)
        mine = layer(placed(array, mesh, placement))
        same(mine, wanted, f"under {placement}")
        for name in ("moving_mean", "moving_variance"):
            same(getattr(layer, name), getattr(plain, name), f"{name} under {placement}")


def test_plain_functions_are_as_before_also_when_compiled():
    array = values(4, 3)

    @ms.jit
    def compiled(a):
        return ops.mse_loss(a, a + 1) + mint.add(a, a).sum() + ops.var(a)

    def plain(a):
        return ops.mse_loss(a, a + 1) + mint.add(a, a).sum() + ops.var(a)

    assert ops.mse_loss.__name__ == "mse_loss"
    np.testing.assert_allclose(compiled(Tensor(array)).asnumpy(), plain(Tensor(array)).asnumpy(), 1e-5)


@run_on_ranks(2)
def test_planning_does_not_use_the_meta_device_while_other_threads_run():
    """It is that of the whole process: the operators of other threads would get no memory."""
    mesh, array = line(), values(6, 3)
    idle = threading.Event()
    thread = threading.Thread(target=idle.wait)
    thread.start()
    device_context, ms.DeviceCtx = ms.DeviceCtx, None
    try:
        x = placed(array, mesh, hp.Shard(0))
        same(ops.cumsum(x.reshape(2, 9) * 1.5, 1), ops.cumsum(Tensor(array).reshape(2, 9) * 1.5, 1), "with a thread")
    finally:
        ms.DeviceCtx = device_context
        idle.set()
        thread.join()
