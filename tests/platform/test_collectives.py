"""Collectives on plain tensors: every dtype, op, stride and size against the same computation in one process."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from hyper_parallel.platform import get_platform
from tests.frameworks import collectives, dist, groups, known_dtypes, on_mindspore, platform_module
from tests.world import run_on_ranks

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
FLOAT8 = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]
INTEGERS = [torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64]
COMPLEX = [torch.complex64, torch.complex128, torch.complex32]
REDUCIBLE = known_dtypes(FLOATS + FLOAT8 + INTEGERS + COMPLEX + [torch.bool])
ALL_DTYPES = known_dtypes([*REDUCIBLE, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2])
MIXED = [torch.float32, torch.bfloat16, torch.int16, torch.float8_e4m3fn, torch.complex64, torch.bool]
LAYOUTS = ["contiguous", "transposed", "strided", "empty", "scalar"]
NUMPY_OPS = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
    "any": np.logical_or,
    "all": np.logical_and,
}


def ops_of(dtype: torch.dtype) -> list[str]:
    if dtype.is_complex:
        return ["sum", "avg", "prod"]
    if dtype is torch.bool:
        return ["sum", "prod", "max", "min", "band", "bor", "bxor", "any", "all"]
    if dtype.is_floating_point:
        return ["sum", "avg", "prod", "max", "min"]
    return ["sum", "prod", "max", "min", "band", "bor", "bxor"]


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """The contiguous tensor of ``rank``, which every rank can make. Sums of floats are exact in float32."""
    random = torch.Generator().manual_seed(1000 * salt + rank)
    bits = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=random)
    if dtype is torch.bool:
        return bits[..., 0] > 127
    if dtype.is_complex or dtype.is_floating_point:
        if dtype is torch.float4_e2m1fn_x2 or dtype is torch.float8_e8m0fnu:
            return bits.reshape(-1).view(dtype).reshape(shape)
        steps = torch.randint(-200, 201, (*shape, 2), generator=random).double() / 16
        numbers = torch.view_as_complex(steps).to(torch.complex64) if dtype.is_complex else steps[..., 0]
        return numbers.to(dtype).contiguous()
    return bits.reshape(-1).view(dtype).reshape(shape)


def laid_out(data: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values with the strides that ``layout`` asks for."""
    if layout == "transposed" and data.dim() > 1:
        return data.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "strided":
        wide = torch.zeros((*data.shape[:-1], 2 * data.shape[-1]), dtype=torch.uint8).to(torch.float32)
        wide = (
            wide.to(data.dtype) if data.dtype is not torch.float4_e2m1fn_x2 else wide.to(torch.uint8).view(data.dtype)
        )
        strided = wide[..., ::2]
        return strided.copy_(data)
    return data.clone()


def shape_of(layout: str, rows: int = 4) -> tuple[int, ...]:
    return {"empty": (0, 3), "scalar": ()}.get(layout, (rows, 3))


def reduced(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction in one process, in numbers wide enough to be exact, rounded once."""
    dtype = tensors[0].dtype
    if dtype is torch.bool or not (dtype.is_floating_point or dtype.is_complex):
        stacked = np.stack([tensor.numpy() for tensor in tensors])
        return torch.from_numpy(np.asarray(NUMPY_OPS[op].reduce(stacked, axis=0, dtype=stacked.dtype)))
    wide = torch.complex128 if dtype.is_complex else torch.float64
    stacked = np.stack(
        [tensor.to(torch.complex64 if dtype is torch.complex32 else wide).to(wide) for tensor in tensors]
    )
    total = NUMPY_OPS["sum" if op == "avg" else op].reduce(stacked, axis=0)
    result = torch.from_numpy(np.asarray(total / len(tensors) if op == "avg" else total))
    if dtype.is_complex:
        return result.to(torch.complex64).to(dtype) if dtype is torch.complex32 else result.to(dtype)
    return (result if dtype is torch.float64 else result.float()).to(dtype)


def same_bits(given: torch.Tensor, expected: torch.Tensor) -> bool:
    if given.shape != expected.shape or given.dtype != expected.dtype:
        return False
    given, expected = (x.contiguous().reshape(-1).view(torch.uint8) for x in (given, expected))
    return torch.equal(given, expected)


def equal(given: torch.Tensor, expected: torch.Tensor) -> bool:
    """Equal bits, or within a rounding where the computation in one process rounds at other places."""
    if same_bits(given, expected):
        return True
    if given.shape != expected.shape or given.dtype != expected.dtype:
        return False
    if given.dtype.is_floating_point and given.dtype.itemsize == 1:
        # Where both are NaN the sign may differ; a product may round differently in float32 and float64.
        return bool(torch.isclose(given.float(), expected.float(), rtol=0.13, atol=0.02, equal_nan=True).all())
    if not (given.dtype.is_floating_point or given.dtype.is_complex):
        return False
    if given.dtype is torch.complex32:
        given, expected = given.to(torch.complex64), expected.to(torch.complex64)
        precision = 2e-3
    else:
        precision = {torch.float16: 1e-3, torch.bfloat16: 8e-3}.get(given.dtype, 1e-6)
    return bool(torch.isclose(given, expected, rtol=precision, atol=0, equal_nan=True).all())


def one_way_or_the_other(call: Any, number: int, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The result of a collective, without and with ``async_op`` in turn."""
    if number % 2:
        return call(*args, **kwargs)
    result, handle = call(*args, async_op=True, **kwargs)
    handle.wait()
    assert handle.is_completed()
    return result


def cases_of(dtypes: list[torch.dtype], layouts: list[str]):
    """(number, dtype, layout, op): sums and maxima in every layout, the other ops in two."""
    number = 0
    for dtype in dtypes:
        for layout in layouts:
            for op in ops_of(dtype):
                if op in ("sum", "max") or layout in ("contiguous", "strided"):
                    number += 1
                    yield number, dtype, layout, op


@run_on_ranks(2, 4)
def test_all_reduce():
    rank, size = dist.get_rank(), dist.get_world_size()
    for number, dtype, layout, op in cases_of(REDUCIBLE, LAYOUTS):
        everyone = [values(r, shape_of(layout), dtype) for r in range(size)]
        expected = reduced(everyone, op)
        result = one_way_or_the_other(collectives.all_reduce, number, laid_out(everyone[rank], layout), None, op=op)
        is_exact = op != "prod" and not (dtype.is_floating_point and dtype.itemsize == 1)
        assert (same_bits if is_exact else equal)(result, expected), (dtype, layout, op, result, expected)


@run_on_ranks(2, 4)
def test_all_reduce_is_in_place_and_the_same_on_every_rank():
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in known_dtypes([*FLOATS, torch.float8_e5m2, torch.complex64, torch.int16, torch.bool]):
        for op in ops_of(dtype):
            whole = torch.zeros(7, 10).to(dtype)
            part = whole[1::2, ::3]
            torch.manual_seed(rank)
            noise = torch.randn(part.shape)
            part.copy_(noise.to(dtype) if dtype is not torch.bool else noise > 0)
            result = collectives.all_reduce(part, None, op=op)
            assert result is part
            copies = collectives.all_gather_into_tensor(whole.clone(), None).chunk(size)
            assert all(same_bits(copy, whole) for copy in copies), (dtype, op)
            assert not (whole[::2].float() if not dtype.is_complex else whole[::2]).any()
            assert not (whole[:, 1::3].float() if not dtype.is_complex else whole[:, 1::3]).any()


@run_on_ranks(4)
def test_low_precision_sums_are_rounded_once():
    """1 + 4 * 2^-9 is 1.0078125 in bfloat16; rounding after each addend would leave 1."""
    for dtype, tiny in ((torch.bfloat16, 2.0**-9), (torch.float16, 2.0**-12)):
        mine = torch.full((5,), 1.0 if dist.get_rank() == 0 else tiny * 4 / 3, dtype=dtype)
        expected = torch.full((5,), 1 + 3 * float(torch.tensor(tiny * 4 / 3, dtype=dtype))).to(dtype)
        assert expected[0] > 1
        assert torch.equal(collectives.all_reduce(mine.clone(), None), expected)
        assert torch.equal(collectives.reduce_scatter_tensor(mine.repeat(4), None), expected)


@run_on_ranks(2, 4)
def test_nan_wins_a_maximum_and_a_minimum_on_whatever_rank_it_is():
    rank, size = dist.get_rank(), dist.get_world_size()
    for dtype in FLOATS:
        for bad in range(size):
            mine = torch.tensor([rank - 1.5, -0.0, float("-inf"), float("inf")] * size, dtype=dtype)
            if rank == bad:
                mine[::3] = float("nan") if dtype.itemsize == 4 else -float("nan")
            everyone = collectives.all_gather_into_tensor(mine, None).view(size, -1)
            for op, expected in (("max", everyone.amax(0)), ("min", everyone.amin(0))):
                assert expected.isnan().any()
                whole = collectives.all_reduce(mine.clone(), None, op=op)
                assert torch.allclose(whole, expected, rtol=0, atol=0, equal_nan=True)
                part = collectives.reduce_scatter_tensor(mine, None, op=op)
                assert torch.allclose(part, expected.chunk(size)[rank], rtol=0, atol=0, equal_nan=True)


@run_on_ranks(2, 4)
def test_reduce_scatter():
    rank, size = dist.get_rank(), dist.get_world_size()
    for number, dtype, layout, op in cases_of(REDUCIBLE, LAYOUTS[:-1]):
        everyone = [values(r, shape_of(layout, 2 * size), dtype) for r in range(size)]
        expected = reduced(everyone, op).chunk(size)[rank] if everyone[0].numel() else everyone[0]
        mine = laid_out(everyone[rank], layout)
        result = one_way_or_the_other(collectives.reduce_scatter_tensor, number, mine, None, op=op)
        is_exact = op != "prod" and not (dtype.is_floating_point and dtype.itemsize == 1)
        assert (same_bits if is_exact else equal)(result, expected), (dtype, layout, op, result, expected)


def bytes_of(*tensors: torch.Tensor) -> bytes:
    return b"".join(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)


@run_on_ranks(2, 4)
def test_all_gather_and_broadcast_and_all_to_all_keep_the_bits():
    rank, size = dist.get_rank(), dist.get_world_size()
    for number, dtype in enumerate(ALL_DTYPES):
        for layout in LAYOUTS:
            if dtype is torch.float4_e2m1fn_x2 and layout in ("transposed", "strided"):
                continue  # PyTorch itself cannot copy it with strides.
            number += 1
            shape = shape_of(layout, 2 * size)
            everyone = [values(r, shape, dtype, salt=1) for r in range(size)]
            mine = laid_out(everyone[rank], layout)
            result = one_way_or_the_other(collectives.all_gather_into_tensor, number, mine, None)
            assert result.shape == ((size * shape[0], *shape[1:]) if shape else (size,))
            assert bytes_of(result) == bytes_of(*everyone), (dtype, layout)
            for src in (0, size - 1):
                data = laid_out(everyone[rank], layout)
                assert one_way_or_the_other(collectives.broadcast, number + src, data, src, None) is data
                assert bytes_of(data) == bytes_of(everyone[src]), (dtype, layout, src)
            if not shape:
                continue
            expected = bytes_of(*(tensor.reshape(size, -1)[rank] for tensor in everyone))
            for is_async, output_shape in enumerate((shape, (1, shape[0] * shape[1]))):
                result, work = collectives.all_to_all_single(mine, output_shape, None, bool(is_async))
                assert (work is None) == (not is_async)
                if work is not None:
                    work.wait()
                assert result.shape == output_shape
                assert bytes_of(result) == expected, (dtype, layout)


@run_on_ranks(2, 4)
def test_all_to_all_with_splits():
    rank, size = dist.get_rank(), dist.get_world_size()
    cases = [
        [[source + 2 * target for target in range(size)] for source in range(size)],
        [[(source + target) % 2 for target in range(size)] for source in range(size)],
        [[3 if source == 0 and target == size - 1 else 0 for target in range(size)] for source in range(size)],
        [[0] * size for _ in range(size)],
    ]
    for rows in cases:
        for dtype in known_dtypes(MIXED):
            everyone = [values(r, (sum(rows[r]), 2, 3), dtype) for r in range(size)]
            received = [rows[source][rank] for source in range(size)]
            expected = bytes_of(*(everyone[source].split(rows[source])[rank] for source in range(size)))
            for layout in ("contiguous", "transposed", "strided"):
                for async_op in (False, True):
                    output, work = collectives.all_to_all_single(
                        laid_out(everyone[rank], layout), (sum(received), 3, 2), None, async_op, received, rows[rank]
                    )
                    if async_op:
                        work.wait()
                    assert output.shape == (sum(received), 3, 2)
                    assert bytes_of(output) == expected, (rows, dtype, layout)


@run_on_ranks(2, 4)
def test_messages():
    rank, size = dist.get_rank(), dist.get_world_size()
    peer = rank ^ 1
    for dtype in ALL_DTYPES:
        for layout in LAYOUTS:
            if dtype is torch.float4_e2m1fn_x2 and layout in ("transposed", "strided"):
                continue
            shape = shape_of(layout)
            sent = laid_out(values(rank, shape, dtype, salt=2), layout)
            received = laid_out(values(rank, shape, dtype, salt=3), layout)
            works = [collectives.isend(sent, peer, tag=5), collectives.irecv(received, peer, tag=5)]
            for work in works:
                work.wait()
            assert same_bits(received, values(peer, shape, dtype, salt=2)), (dtype, layout)
    if rank == 0:
        seen = set()
        for _ in range(size - 1):
            data = torch.empty(2, 2).t()
            collectives.irecv(data).wait()
            assert data[0, 1] == 10 * data[0, 0]
            seen.add(int(data[0, 0]))
        assert seen == set(range(1, size))
    else:
        collectives.isend(torch.tensor([[rank, 10.0 * rank], [0.0, 0.0]]), 0).wait()


@run_on_ranks(2, 4)
def test_objects():
    rank, size = dist.get_rank(), dist.get_world_size()
    platform = get_platform()
    gathered: list = [None] * size
    collectives.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    assert gathered == [{"rank": r, "text": "x" * r} for r in range(size)]
    group = platform.create_group([0, 1]) if rank < 2 else None
    if rank == 0:
        collectives.send_object_list([1, "two", {3: None}], 1)
        collectives.send_object_list([b"sub"], 1, group)
        collectives.send_object_list([], 1)
        assert collectives.recv_object_list(from_any := [None, None]) == 1
        assert from_any == [(1,), {2}]
    elif rank == 1:
        received: list = [None] * 3
        assert collectives.recv_object_list(received, 0) == 0
        assert received == [1, "two", {3: None}]
        assert collectives.recv_object_list(received := [None], 0, group) == 0
        assert received == [b"sub"]
        assert collectives.recv_object_list([], 0) == 0
        collectives.send_object_list([(1,), {2}], 0)
    with pytest.raises(ValueError, match=rf"object_list has 1 places for {size} objects; pass \[None\] \* {size}"):
        collectives.all_gather_object([None], rank)


@dataclass
class GroupInfo:
    """As programs for HyperParallel 1.0 pass a group."""

    group: Any


@run_on_ranks(4)
def test_groups_of_some_ranks():
    rank = dist.get_rank()
    members = [0, 3] if rank in (0, 3) else [1, 2]
    group = get_platform().create_group(members)
    place = members.index(rank)
    for given in (group, GroupInfo(group), GroupInfo(GroupInfo(group))):
        assert collectives.all_reduce(torch.tensor([rank]), given).item() == 3
        assert collectives.all_gather_into_tensor(torch.tensor([rank]), given).tolist() == members
        assert collectives.reduce_scatter_tensor(torch.tensor([rank, 10.0]), given).item() == (20 if place else 3)
        for src in members:
            assert collectives.broadcast(torch.tensor([rank]), src, given).item() == src
        output, _ = collectives.all_to_all_single(torch.tensor([rank, rank + 10]), (2,), given)
        assert output.tolist() == [member + 10 * place for member in members]
        other = members[1 - place]
        received = torch.empty(1)
        work = collectives.irecv(received, other, given)
        collectives.isend(torch.tensor([float(rank)]), other, given).wait()
        work.wait()
        assert received.item() == other


@run_on_ranks(2)
def test_a_group_of_one_rank_communicates_nothing():
    rank = dist.get_rank()
    group = get_platform().create_group([rank])
    calls: list = []
    collectives.observers.append(calls.append)
    try:
        for dtype in REDUCIBLE:
            for layout in LAYOUTS:
                data = laid_out(values(rank, shape_of(layout), dtype), layout)
                before = laid_out(data, "contiguous")
                for op in ops_of(dtype):
                    assert collectives.all_reduce(data, group, op=op) is data
                assert collectives.broadcast(data, rank, group) is data
                gathered, handle = collectives.all_gather_into_tensor(data, group, True)
                assert handle.wait()
                assert handle.is_completed()
                assert same_bits(gathered, before.reshape(before.shape or (1,)))
                if data.dim():
                    results = [collectives.reduce_scatter_tensor(data, group)]
                    results.append(collectives.all_to_all_single(data, data.shape, group)[0])
                    rows = [data.shape[0]]
                    results.append(collectives.all_to_all_single(data, data.shape, group, True, rows, rows)[0])
                    for result in [*results, gathered]:
                        assert same_bits(result, before)
                        assert not result.numel() or result.data_ptr() != data.data_ptr()
        objects = [None]
        collectives.all_gather_object(objects, "mine", group)
        assert objects == ["mine"]
    finally:
        collectives.observers.clear()
    assert not calls
    with pytest.raises(ValueError, match="is this rank itself; copy the tensor"):
        collectives.isend(torch.ones(1), rank, group)
    with pytest.raises(ValueError, match="no other rank to receive from"):
        collectives.irecv(torch.ones(1), None, group)


@run_on_ranks(2)
def test_tensors_that_require_grad_are_data():
    rank = dist.get_rank()
    for dtype in (torch.float32, torch.bfloat16):
        leaf = torch.full((4, 2), float(rank + 1), dtype=dtype, requires_grad=True)
        for data in (leaf, leaf * 1, leaf.t()):
            assert not collectives.all_gather_into_tensor(data, None).requires_grad
            assert not collectives.reduce_scatter_tensor(data, None).requires_grad
            assert not collectives.all_to_all_single(data, data.shape, None)[0].requires_grad
        parameter = torch.nn.Parameter(torch.full((3, 2), float(rank + 1), dtype=dtype))
        for data in (parameter, parameter.t()):
            collectives.all_reduce(data, None, op="max")
            collectives.broadcast(data, 0, None)
        assert parameter.tolist() == [[2.0, 2.0]] * 3
        assert parameter.is_leaf
        assert parameter.requires_grad


@run_on_ranks(2)
def test_conjugated_and_shared_memory():
    rank = dist.get_rank()
    data = torch.tensor([1 + 2j, 3 - 1j]) * (rank + 1)
    assert collectives.all_reduce(data.clone().conj(), None).tolist() == [3 - 6j, 9 + 3j]
    assert collectives.all_gather_into_tensor(data.conj(), None)[:2].tolist() == [1 - 2j, 3 + 1j]
    assert collectives.reduce_scatter_tensor(data.conj(), None).tolist() == ([9 + 3j] if rank else [3 - 6j])
    assert collectives.all_gather_into_tensor(data.conj().imag, None)[:2].tolist() == [-2, 1]
    wide = torch.ones(1).expand(3)
    assert collectives.all_gather_into_tensor(wide, None).tolist() == [1] * 6
    for call in (
        lambda: collectives.all_reduce(wide, None),
        lambda: collectives.broadcast(wide, 0, None),
        lambda: collectives.irecv(wide, 1 - rank),
    ):
        with pytest.raises(ValueError, match=r"shape \(3,\) is expanded: several elements share memory; pass a"):
            call()


@run_on_ranks(2)
def test_several_in_flight_are_finished_in_any_order():
    rank = dist.get_rank()
    started = []
    for number in range(6):
        dtype = (torch.float32, torch.bfloat16)[number % 2]
        data = torch.full((50,), float(rank + number), dtype=dtype)
        started.append((number, *collectives.all_reduce(data, None, async_op=True)))
        started.append((number, *collectives.reduce_scatter_tensor(data.clone(), None, async_op=True)))
    for number, result, handle in reversed(started[::2]):
        handle.wait()
        handle.wait()
        assert result.float().unique().tolist() == [2 * number + 1]
    for _, _, handle in started[1::2]:
        handle.wait()


MISTAKES = [
    (lambda c: c.all_reduce(torch.ones(2, device="meta"), None), ValueError, r"shape \(2,\) is on meta, but the group"),
    (lambda c: c.broadcast(torch.ones(2, device="meta"), 0, None), ValueError, r"broadcast on rank \d of the group"),
    (lambda c: c.isend(torch.ones(2, device="meta"), 0), ValueError, r"isend on rank \d.*move it with .to\('cpu'\)"),
    (lambda c: c.all_reduce([1.0], None), TypeError, "all_reduce takes a tensor, not a list"),
    (lambda c: c.all_gather_into_tensor(3, None), TypeError, "all_gather_into_tensor takes a tensor, not a int"),
    (
        lambda c: c.all_reduce(torch.ones(2), None, op="mean"),
        ValueError,
        "there is no reduction 'mean'; there are sum,",
    ),
    (lambda c: c.all_reduce(torch.ones(2), None, op=["sum"]), ValueError, r"there is no reduction \['sum'\]"),
    (
        lambda c: c.all_reduce(torch.ones(2).int(), None, op="avg"),
        ValueError,
        r"average of (torch\.)?int32 .* cast to a float",
    ),
    (lambda c: c.reduce_scatter_tensor(torch.ones(4).bool(), None, op="avg"), ValueError, r"average of (torch\.)?bool"),
    (
        lambda c: c.all_reduce(torch.ones(2), None, op="band"),
        ValueError,
        r"shape \(2,\): band reduces integers and bools",
    ),
    (lambda c: c.all_reduce(torch.ones(2), None, op="any"), ValueError, r"any reduces bools.*write \(data != 0\)"),
    (lambda c: c.all_reduce(torch.ones(2) * 1j, None, op="max"), ValueError, r"no order.*reduce data.abs\(\)"),
    (
        lambda c: c.reduce_scatter_tensor(torch.ones(3, 2), None),
        ValueError,
        r"reduce_scatter_tensor on rank \d of the group \[0, 1\]: shape \(3, 2\) cannot be cut into 2 equal.*pad dim 0",
    ),
    (lambda c: c.reduce_scatter_tensor(torch.ones(()), None), ValueError, r"shape \(\) cannot be cut"),
    (
        lambda c: c.broadcast(torch.ones(1), 7, None),
        ValueError,
        r"src=7 is not in the group; src is a rank of the world",
    ),
    (lambda c: c.isend(torch.ones(1), 2), ValueError, r"isend on rank \d of the group \[0, 1\]: dst=2 is not in"),
    (lambda c: c.isend(torch.ones(1)), ValueError, "dst=None is not in the group"),
    (lambda c: c.irecv(torch.ones(1), dist.get_rank()), ValueError, "is this rank itself"),
    (lambda c: c.send_object_list([1], 9), ValueError, "send_object_list .* dst=9 is not in"),
    (lambda c: c.recv_object_list([1], 9), ValueError, "recv_object_list .* src=9 is not in"),
    (
        lambda c: c.all_to_all_single(torch.ones(3, 2), (3, 2), None),
        ValueError,
        r"shape \(3, 2\), output_shape \(3, 2\): without splits dim 0 of the input is cut into 2 equal parts",
    ),
    (lambda c: c.all_to_all_single(torch.ones(4, 2), (4, 3), None), ValueError, "both have as many elements"),
    (lambda c: c.all_to_all_single(torch.ones(()), (1,), None), ValueError, r"input of shape \(\)"),
    (
        lambda c: c.all_to_all_single(torch.ones(4, 2), (4, 2), None, False, [2, 2], [1, 1]),
        ValueError,
        r"input_splits \[1, 1\].*input_splits must be 2 numbers of rows, one per rank of the group, with sum 4",
    ),
    (
        lambda c: c.all_to_all_single(torch.ones(4, 2), (4, 2), None, False, [4], [2, 2]),
        ValueError,
        "output_splits must",
    ),
    (
        lambda c: c.all_to_all_single(torch.ones(4, 2), (4, 2), None, False, [5, -1], [2, 2]),
        ValueError,
        "output_splits must be 2",
    ),
    (
        lambda c: c.all_to_all_single(torch.ones(4, 2), (4, 3), None, False, [2, 2], [2, 2]),
        ValueError,
        "rows of the output must be as large",
    ),
    (
        lambda c: c.all_to_all_single(torch.ones(4), (3,), None, False, None, [2, 2]),
        ValueError,
        "give output_splits too",
    ),
    (
        lambda c: c.all_to_all_single(torch.ones(4), (4,), None, False, [1, 3], [3, 1]),
        ValueError,
        r"this rank sends itself \d rows but expects \d",
    ),
    (
        lambda c: c.all_to_all_single(torch.ones(()), (), None, False, [1, 0], [1, 0]),
        ValueError,
        "a scalar has no rows",
    ),
]


@run_on_ranks(2)
def test_mistakes_are_raised_before_anything_is_sent():
    """Each on one rank only: had it sent anything or waited for the other rank, the next collective would fail."""
    for number, (call, error, message) in enumerate(MISTAKES):
        if dist.get_rank() == number % 2:
            with pytest.raises(error, match=message):
                call(collectives)
    assert collectives.all_reduce(torch.ones(2), None).tolist() == [2, 2]


@run_on_ranks(2)
def test_observers_see_what_is_sent():
    rank, group = dist.get_rank(), get_platform().create_group([0, 1])
    seen: list[collectives.CollectiveCall] = []
    collectives.observers.append(seen.append)
    try:
        collectives.all_reduce(torch.ones(3, 2), None)
        collectives.all_gather_into_tensor(torch.ones(5).bfloat16(), group, True)[1].wait()
        collectives.reduce_scatter_tensor(torch.ones(4, 2).t().contiguous().t(), None)
        collectives.broadcast(torch.ones(()), 0, None)
        rows = [[0, 3], [1, 0]]
        received = [rows[0][rank], rows[1][rank]]
        collectives.all_to_all_single(
            torch.ones(sum(rows[rank]), 2), (sum(received), 2), None, False, received, rows[rank]
        )
        works = [collectives.isend(torch.ones(2).bool(), 1 - rank), collectives.irecv(torch.ones(2).bool(), 1 - rank)]
        for work in works:
            work.wait()
    finally:
        collectives.observers.clear()
    collectives.all_reduce(torch.ones(1), None)
    assert [(call.op, call.shape, call.num_bytes, call.async_op) for call in seen] == [
        ("all_reduce", (3, 2), 24, False),
        ("all_gather_into_tensor", (5,), 10, True),
        ("reduce_scatter_tensor", (4, 2), 32, False),
        ("broadcast", (), 4, False),
        ("all_to_all_single", (1, 2) if rank else (3, 2), 8 if rank else 24, False),
        ("isend", (2,), 2, True),
        ("irecv", (2,), 2, True),
    ]
    assert all(call.group is group for call in seen)
    assert "bfloat16" in str(seen[1].dtype).lower()


DISAGREEMENTS = [
    (
        lambda c, r: c.all_reduce(torch.ones(2 + r), None),
        r"not the same shape\n  rank 0: all_reduce\(shape=\(2,\), dtype",
    ),
    (lambda c, r: c.all_reduce(torch.ones(2, dtype=(torch.int32, torch.int64)[r]), None), "not the same dtype"),
    (
        lambda c, r: c.all_reduce(torch.ones(2), None, op=("sum", "max")[r]),
        r"not the same op\n.*op=sum\) at .*\.py:\d+\n.*op=max\) at .*\.py:\d+",
    ),
    (lambda c, r: c.broadcast(torch.ones(2), r, None), "not the same src"),
    (
        lambda c, r: c.all_reduce(torch.ones(2), None) if r else c.all_gather_into_tensor(torch.ones(2), None),
        "function",
    ),
    (lambda c, r: c.reduce_scatter_tensor(torch.ones(2 + r), None), "not the same shape"),
    (lambda c, r: c.all_gather_into_tensor(torch.ones(2, device=("cpu", "meta")[r]), None), "not the same device"),
    (
        lambda c, r: c.all_to_all_single(torch.ones(2), (2,), None, False, [1, 1], [1, 1] if r else [2, 0]),
        "group rank 0 sends 2 rows to group rank 0, which expects 1",
    ),
    (
        lambda c, r: c.all_to_all_single(
            torch.ones(2 - r, 2), (3, 2), None, False, [1, 2] if r else [1, 1], [1, 1 - r]
        ),
        "group rank 0 sends 1 rows to group rank 1, which expects 1|sends",
    ),
    (lambda c, r: c.all_to_all_single(torch.ones(2, 2 + r), (2, 2 + r), None, False, [1, 1]), "shape of a row"),
    (
        lambda c, r: c.all_reduce(torch.ones(2), None) if r else get_platform().barrier(),
        r"not the same function\n  rank 0: barrier\(\) at .*\.py:\d+\n  rank 1: all_reduce\(shape=\(2,\), .* at .*:\d+",
    ),
    (
        lambda c, r: c.all_gather_object([None] * 2, r) if r else get_platform().barrier(),
        r"not the same function\n  rank 0: barrier\(\) .*\n  rank 1: all_gather_object\(\) at .*\.py:\d+",
    ),
    (
        lambda c, r: c.broadcast(torch.ones(2), 0, None) if r else c.all_gather_object([None] * 2, r),
        r"not the same function\n  rank 0: all_gather_object\(\) .*\n  rank 1: broadcast\(",
    ),
]


@contextmanager
def comparing():
    """As with HYPER_PARALLEL_CHECK_COLLECTIVES=1."""
    modules = [collectives] if on_mindspore else [collectives, platform_module("messages")]
    for module in modules:
        module.COMPARES_RANKS = True
    try:
        yield
    finally:
        for module in modules:
            module.COMPARES_RANKS = False


@run_on_ranks(2)
def test_ranks_that_disagree_are_told_so():
    rank = dist.get_rank()
    with comparing():
        for call, message in DISAGREEMENTS:
            with pytest.raises(RuntimeError, match=r"ranks of the group \[0, 1\] disagree: .*") as raised:
                call(collectives, rank)
            assert raised.match(message)
            texts: list = [None] * 2
            collectives.all_gather_object(texts, str(raised.value))
            assert texts[0] == texts[1]
            assert "rank 0: " in texts[0]
            assert "rank 1: " in texts[0]
        # Those that agree go on.
        assert collectives.all_reduce(torch.ones(2), None).tolist() == [2, 2]
        get_platform().barrier()
        rows = [[0, 3], [1, 2]]
        received = [rows[0][rank], rows[1][rank]]
        output, _ = collectives.all_to_all_single(
            torch.full((3,), rank), (sum(received),), None, False, received, torch.tensor(rows[rank])
        )
        assert output.tolist() == ([0, 0, 0, 1, 1] if rank else [1])


@run_on_ranks(2)
def test_messages_of_objects_are_compared_by_their_receiver():
    rank = dist.get_rank()
    with comparing():
        if rank == 0:
            collectives.send_object_list([1, 2], 1)
            collectives.send_object_list(["from any"], 1)
        else:
            collectives.recv_object_list(received := [None, None], 0)
            assert received == [1, 2]
            assert collectives.recv_object_list(received := [None]) == 0
            assert received == ["from any"]
        # One side that is not told first, as on another host.
        group = groups.split_group(None, [[0, 1]])
        unseen = platform_module("group_facts").find_facts(group)[1].ledger if not on_mindspore else None
        if unseen is not None:
            unseen.send = unseen.receive = lambda *message: None
        message = (
            r"the ranks of the group \[0, 1\] disagree: not the same number of objects\n"
            r"  rank 0: send_object_list\(objects=2, peer=1\) at .*\.py:\d+\n"
            r"  rank 1: recv_object_list\(objects=1, peer=0\) at .*\.py:\d+"
        )
        if rank == 1:
            with pytest.raises(RuntimeError, match=message):
                collectives.recv_object_list([None], 0, group)
        elif on_mindspore:
            collectives.send_object_list([1, 2], 1, group)  # it does not wait for the receiver
        else:
            with pytest.raises(RuntimeError, match=message):
                collectives.send_object_list([1, 2], 1, group)
        get_platform().barrier()
        groups.destroy_process_group(group)
