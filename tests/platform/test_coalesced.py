"""Gathers and reduce-scatters into memory that is given, and of lists of tensors in one call."""

from __future__ import annotations

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.platform import get_platform
from tests.frameworks import on_mindspore, ours, theirs
from tests.world import run_on_ranks

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool)


def _value(rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    whole = torch.arange(torch.Size(shape).numel()).reshape(shape) + 10 * rank
    return whole % 2 == 0 if dtype is torch.bool else whole.to(dtype)


def _same(found, wanted) -> None:
    torch.testing.assert_close(theirs(found), wanted, rtol=0, atol=0)


@run_on_ranks(1, 2, 3)
@pytest.mark.parametrize("async_op", [False, True])
def test_results_are_written_into_given_memory(async_op):
    platform = get_platform()
    rank, size = platform.get_rank(), platform.get_world_size()
    group = platform.create_group(range(size))
    for dtype in DTYPES:
        for shape in ((2, 3), (1,), (0, 4), (size * 2, 1)):
            mine = _value(rank, shape, dtype)
            everybody = [_value(other, shape, dtype) for other in range(size)]
            out = ours(torch.zeros((shape[0] * size, *shape[1:]), dtype=dtype))
            given = platform.all_gather_into_tensor(ours(mine), group, async_op, out=out)
            result = given[0] if async_op else given
            if async_op:
                given[1].wait()
            assert result is out
            _same(out, torch.cat(everybody))
            if dtype is torch.bool:
                continue
            wide = [value.repeat(size, *[1] * (len(shape) - 1)) for value in everybody]
            out = ours(torch.zeros(shape, dtype=dtype))
            given = platform.reduce_scatter_tensor(ours(wide[rank]), group, async_op, "sum", out=out)
            if async_op:
                given[1].wait()
            assert (given[0] if async_op else given) is out
            total = sum(value.double() for value in wide)[rank * shape[0] : (rank + 1) * shape[0]]
            _same(out, total.to(dtype))


@run_on_ranks(1, 2, 3)
@pytest.mark.parametrize("with_out", [False, True])
@pytest.mark.parametrize("async_op", [False, True])
def test_lists_are_one_call(async_op, with_out):
    platform = get_platform()
    rank, size = platform.get_rank(), platform.get_world_size()
    group = platform.create_group(range(size))
    kinds = [((2, 3), torch.float32), ((5,), torch.float32), ((0, 2), torch.float32), ((1, 1), torch.bfloat16)]
    everybody = [[_value(other, shape, dtype) for shape, dtype in kinds] for other in range(size)]
    out = [ours(torch.zeros((shape[0] * size, *shape[1:]), dtype=dtype)) for shape, dtype in kinds]
    with hp.CommRecorder() as recorder:
        given = platform.all_gather_into_tensors(
            [ours(value) for value in everybody[rank]], group, async_op, out=out if with_out else None
        )
    results = given[0] if async_op else given
    if async_op:
        given[1].wait()
    for place, result in enumerate(results):
        assert not with_out or result is out[place]
        _same(result, torch.cat([values[place] for values in everybody]))
    if size > 1:  # One call; on MindSpore one for each dtype.
        assert sum(recorder.counts.values()) == (2 if on_mindspore else 1), recorder.table()
    wide = [[value.repeat(size, *[1] * (value.ndim - 1)) for value in values] for values in everybody]
    given = platform.reduce_scatter_tensors([ours(value) for value in wide[rank]], group, async_op, "sum")
    results = given[0] if async_op else given
    if async_op:
        given[1].wait()
    for place, (result, (shape, dtype)) in enumerate(zip(results, kinds, strict=True)):
        total = sum(values[place].double() for values in wide)[rank * shape[0] : (rank + 1) * shape[0]]
        _same(result, total.to(dtype))
    assert platform.all_gather_into_tensors([], group) == []


@run_on_ranks(2)
def test_memory_that_does_not_fit_is_refused():
    platform = get_platform()
    group = platform.create_group(range(2))
    data = ours(torch.zeros(2, 3))
    for wrong in (torch.zeros(2, 3), torch.zeros(4, 3, dtype=torch.float64), torch.zeros(3, 4).t()):
        with pytest.raises(ValueError, match=r"all_gather_into_tensor .*out must be contiguous.* shape \(4, 3\)"):
            platform.all_gather_into_tensor(data, group, out=ours(wrong))
    with pytest.raises(TypeError, match="out must be a tensor, got"):
        platform.all_gather_into_tensor(data, group, out="memory")
    with pytest.raises(ValueError, match=r"all_gather_into_tensors.*1 tensors but 0 in out"):
        platform.all_gather_into_tensors([data], group, out=[])
    with pytest.raises(ValueError, match=r"reduce_scatter_tensors.*cannot be cut into 2 equal parts"):
        platform.reduce_scatter_tensors([ours(torch.zeros(3))], group)
