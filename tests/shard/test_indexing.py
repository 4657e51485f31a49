"""Reading and writing parts of tensors by position, under every layout."""

import operator
from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.dtensor.comm_recorder import CommRecorder
from hyper_parallel.core.shard.dispatching.strict_mode import strict
from hyper_parallel.core.shard.rules.index_writing import _part_of_range
from tests.shard.validator import Sample, assert_valid, tensor
from tests.world import run_on_ranks

only_on = "torch"  # calls PyTorch's operators one by one; MindSpore's own: test_mindspore_rules.py


def ints(*values: Any) -> torch.Tensor:
    return torch.tensor(values)


def read(index: Any, x: torch.Tensor | None = None, label: str = "") -> Sample:
    return Sample(operator.getitem, (tensor(5, 4, 3) if x is None else x, index), label=f"x[{label or index}]")


def setitem_(x: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    x[index] = value
    return x


def write(index: Any, value: Any, label: str = "") -> Sample:
    return Sample(setitem_, (tensor(5, 4, 3), index, value), label=f"x[{label or index}] = {label and 'value'}")


BASIC = [
    read(0),
    read(-1),
    read((2, 3)),
    read((slice(None), 1)),
    read((Ellipsis, 2)),
    read(slice(1, 4)),
    read(slice(None, None, 2)),
    read((slice(1, 10, 3), slice(0, 4), None)),
    read(None),
    read(Ellipsis),
    read(()),
    read((slice(3, 3), 0)),
    read((4, Ellipsis, slice(0, 1))),
    read(3, tensor(5, 2) > 0, "3 of bool"),
    read(1, torch.arange(5), "1 of int"),
    read(0, tensor(1, 4), "0 of 1"),
]
BY_TENSOR = [
    read(ints(0, 4, -1, 0), label="vector"),
    read(ints([0, 4], [2, 2]), label="matrix"),
    read((slice(None), ints(3, 0)), label=":, vector"),
    read((Ellipsis, ints(2, 0, 1)), label="..., vector"),
    read((ints(0, 1), ints(2, 3)), label="vector, vector"),
    read((ints([0], [1]), ints(2, 3, 1)), label="column, vector"),
    read((ints(0, 1), slice(None), ints(2, 0)), label="vector, :, vector"),
    read((0, ints(1, 3)), label="0, vector"),
    read((None, ints(1, 3), slice(0, 2)), label="None, vector, 0:2"),
    read([0, 2, 4]),
    read((slice(None), [1, -1])),
    read(tensor(5, 4, 3) > 0, label="mask"),
    read(tensor(5) > 0, label="mask of rows"),
    read((slice(None), tensor(4) > 0), label=":, mask"),
    read([True, False, True, True, False]),
    read(True),
    read(torch.tensor(2), label="0-dim"),
    read((ints(0, 3),), tensor(4, 0), "vector of empty"),
]
WRITE = [
    write(0, 1.5),
    write((slice(1, 4), 2), 0.5),
    write((slice(None, None, 2), slice(1, 3)), 2.0),
    write(slice(1, 4), tensor(3, 4, 3, seed=1), "1:4"),
    write((slice(0, 5, 2), slice(None), 1), tensor(3, 4, seed=1), "::2, :, 1"),
    write((slice(1, None, 3),), tensor(1, 3, seed=1), "1::3 stretched"),
    write(3, tensor(4, 3, seed=1), "3"),
    write((3, 0), tensor(3, seed=1), "3, 0"),
    write((Ellipsis, 1), tensor(5, 1, seed=1), "..., 1 stretched"),
    write((0, 0, 0), tensor(seed=1), "0, 0, 0"),
    write(Ellipsis, tensor(seed=1), "... 0-dim"),
    write((None, 2), tensor(1, 4, 3, seed=1), "None, 2"),
    write(slice(2, 2), tensor(0, 4, 3, seed=1), "nothing"),
    write(slice(1, 3), tensor(1, 1, 2, 4, 3, seed=1), "1:3 with leading ones"),
]
WRITE_BY_TENSOR = [
    write(tensor(5, 4, 3) > 0, 0.0, "mask"),
    write(tensor(5, 4) > 0, tensor(seed=1), "mask of rows"),
    write(tensor(5) > 0, tensor(4, 3, seed=1), "mask and rows"),
    write(ints(0, 3), 7.0, "vector"),
    write(ints(0, 3), tensor(2, 4, 3, seed=1), "vector, rows"),
    write((slice(None), ints(3, 1)), tensor(2, 3, seed=1), ":, vector"),
    write((ints(0, 1), ints(2, 3)), tensor(2, 3, seed=1), "vector, vector"),
    write((ints(0, 1), slice(1, 3)), 4.0, "vector, 1:3"),
    write((1, [0, 2]), 4.0),
    write([0, 2], tensor(4, 3, seed=1), "list"),
]
ALONG_DIM = [
    Sample("index_select", (tensor(5, 3), 0, ints(4, 0, 0))),
    Sample("index_select", (tensor(2, 5, 3), 1, ints(4, 1))),
    Sample("Tensor.index_select", (tensor(5, 3),), {"dim": -1, "index": ints(2)}),
    Sample("gather", (tensor(5, 3), 0, ints([0, 4, 2], [1, 1, 3]))),
    Sample("gather", (tensor(2, 5), 1, ints([0, 4, 2], [1, 1, 3]))),
    Sample("gather", (tensor(5, 3), 1, ints([0, 2], [1, 1]))),
    Sample("gather", (tensor(5), 0, torch.zeros(2, 0, dtype=torch.int64))),
    Sample("gather", (tensor(), 0, ints(0))),
    Sample("take_along_dim", (tensor(5, 3), ints([0, 2, 1], [1, 4, 3]), 0)),
    Sample("take_along_dim", (tensor(5, 3), ints([0, 2, 1, 1]), 1)),
    Sample("take_along_dim", (tensor(5, 3), ints(3, 7))),
    Sample("take", (tensor(5, 3), ints([0, 14], [3, -1]))),
    Sample("select", (tensor(5, 3), 0, 3)),
    Sample("Tensor.select", (tensor(5, 3), -1, -1)),
    Sample("nn.functional.one_hot", (ints(0, 3, 1), 5)),
    Sample("nn.functional.one_hot", (ints([0, 3], [1, 1]),)),
]
EMBEDDING = [
    Sample("nn.functional.embedding", (ints([0, 4, 2], [1, 4, 3]), tensor(5, 3))),
    Sample("nn.functional.embedding", (ints(0, 4, 2, 1, 4), tensor(5, 4), 4)),
    Sample("nn.functional.embedding", (ints(0, 3), tensor(5, 4)), {"padding_idx": -2}),
    Sample("nn.functional.embedding", (ints(0, 0, 4), tensor(5, 4)), {"scale_grad_by_freq": True}),
    Sample("nn.functional.embedding", (ints(0, 0, 4), tensor(5, 4)), {"max_norm": 1.0}, False),
    Sample("embedding", (tensor(1, 4), ints(0, 0))),
    Sample("nn.functional.embedding_bag", (ints([0, 4], [1, 1]), tensor(5, 4))),
]
SCATTER = [
    Sample("scatter", (tensor(5, 3), 0, ints([0, 4, 2], [1, 1, 3]), tensor(2, 3, seed=1))),
    Sample("scatter", (tensor(5, 3), 1, ints([0], [2], [1], [1], [0]), 2.5)),
    Sample("scatter", (tensor(2, 3), 1, ints([0, 2], [1, 1]), tensor(2, 2, seed=1)), {"reduce": "multiply"}, False),
    Sample("Tensor.scatter_", (tensor(5, 3), 0, ints([0, 4, 2]), tensor(1, 3, seed=1))),
    Sample("scatter_add", (tensor(5, 3), 0, ints([0, 0, 2], [0, 4, 2]), tensor(2, 3, seed=1))),
    Sample("Tensor.scatter_add_", (tensor(4, 3), 1, ints([0], [1], [1], [2]), tensor(4, 1, seed=1))),
    Sample("scatter_reduce", (tensor(5, 3), 0, ints([0, 0, 2], [0, 4, 2]), tensor(2, 3, seed=1), "amax")),
    Sample("scatter_reduce", (tensor(5, 3), 0, ints([0, 0, 2]), tensor(1, 3, seed=1), "mean"), {"include_self": False}),
    Sample("scatter_reduce", (tensor(5, 3), 0, ints([0, 0, 2]), tensor(1, 3, seed=1)), {"reduce": "prod"}),
    Sample("index_add", (tensor(5, 3), 0, ints(4, 0, 4), tensor(3, 3, seed=1))),
    Sample("index_add", (tensor(5, 3), 1, ints(2, 0), tensor(5, 2, seed=1)), {"alpha": 2}),
    Sample("Tensor.index_add_", (tensor(5, 3), 0, ints(1, 1), tensor(2, 3, seed=1))),
    Sample("index_copy", (tensor(5, 3), 0, ints(4, 0), tensor(2, 3, seed=1))),
    Sample("index_fill", (tensor(5, 3), 0, ints(4, 0), 1.5)),
    Sample("index_fill", (tensor(5, 3), 1, ints(2), tensor(seed=1))),
    Sample("index_reduce", (tensor(5, 3), 0, ints(4, 0), tensor(2, 3, seed=1), "amin")),
    Sample("index_reduce", (tensor(2, 3).bfloat16(), 1, ints(1, 0), tensor(2, 2).bfloat16(), "prod"), gradients=False),
    Sample("index_put", (tensor(5, 3), (ints(4, 0), ints(1, 1)), tensor(2, seed=1))),
    Sample("index_put", (tensor(5, 3), (ints(4, 0),), tensor(3, seed=1)), {"accumulate": True}),
    Sample("Tensor.index_put_", (tensor(5, 3), (ints(4, 0),), tensor(2, 3, seed=1))),
    Sample("put", (tensor(5, 3), ints(4, 14), tensor(2, seed=1))),
    Sample("masked_fill", (tensor(5, 3), tensor(5, 3) > 0, 1.5)),
    Sample("masked_scatter", (tensor(5, 3), tensor(5, 3) > 0, tensor(5, 3, seed=1))),
    Sample("masked_select", (tensor(5, 3), tensor(5, 3) > 0)),
]
ORDERED = [
    Sample("sort", (tensor(5, 3),)),
    Sample("sort", (tensor(5, 3), 0, True)),
    Sample("sort", (tensor(5, 3),), {"stable": True, "dim": 0}),
    Sample("argsort", (tensor(5, 3),), {"dim": 0, "descending": True}),
    Sample("msort", (tensor(5, 3),)),
    Sample("topk", (tensor(5, 3), 2)),
    Sample("topk", (tensor(5, 3), 3, 0)),
    Sample("kthvalue", (tensor(5, 3), 2)),
    Sample("kthvalue", (tensor(5, 3), 2, 0), {"keepdim": True}),
    Sample("cumsum", (tensor(5, 3), 0)),
    Sample("cumsum", (tensor(5, 3),), {"dim": -1}),
    Sample("Tensor.cumsum_", (tensor(5, 3), 1)),
    Sample("cumprod", (tensor(5, 3), 0)),
    Sample("cummax", (tensor(5, 3), 0)),
    Sample("cummin", (tensor(5, 3), 1)),
    Sample("logcumsumexp", (tensor(5, 3), 0)),
    Sample("diff", (tensor(5, 3),)),
    Sample("diff", (tensor(5, 3), 2, 0)),
    Sample("diff", (tensor(5, 3),), {"dim": 0, "prepend": tensor(1, 3, seed=1)}),
    Sample("searchsorted", (torch.arange(5.0), tensor(4, 3))),
    Sample("searchsorted", (tensor(4, 5).sort(-1).values, tensor(4, 3)), {"right": True}),
    Sample("bucketize", (tensor(5, 3), torch.arange(3.0))),
    Sample("histc", (tensor(5, 3), 4), {"min": -2, "max": 2}, False),
    Sample("histc", (tensor(5, 3), 4), {}, False),
    Sample("bincount", (ints(0, 2, 2, 5),)),
    Sample("bincount", (ints(4, 2, 0, 2, 1),), {"minlength": 7}),
    Sample("Tensor.bincount", (ints(4, 2, 0), tensor(3)), gradients=False),
    Sample("unique", (ints(3, 1, 3, 2),)),
    Sample("nonzero", (tensor(5, 3) > 0,)),
    Sample("argwhere", (tensor(5, 3) > 0,)),
    Sample("where", (tensor(5, 3) > 0,)),
]
FAMILIES = {
    "basic": BASIC,
    "by_tensor": BY_TENSOR,
    "write": WRITE,
    "write_by_tensor": WRITE_BY_TENSOR,
    "along_dim": ALONG_DIM,
    "embedding": EMBEDDING,
    "scatter": SCATTER,
    "ordered": ORDERED,
}


@pytest.mark.parametrize("family", FAMILIES)
def test_same_as_one_device(worlds, family: str) -> None:
    assert_valid(worlds, FAMILIES[family])


@pytest.mark.parametrize("bounds", [(0, 7, 1), (1, 6, 2), (2, 7, 3), (5, 2, 1), (6, 7, 1)])
@pytest.mark.parametrize("num_blocks", [1, 2, 3, 4, 9])
def test_parts_of_a_range_make_it_up(bounds: tuple[int, int, int], num_blocks: int) -> None:
    whole = list(range(7))
    size = -(-7 // num_blocks)
    found, order = [], []
    for start in range(0, 7, size):
        block = whole[start : start + size]
        entry, (first, count) = _part_of_range(bounds, start, len(block))
        found += block[entry]
        order += range(first, first + count)
    assert found == whole[slice(*bounds)]
    assert order == list(range(len(found)))


@run_on_ranks(2)
def test_elements_of_a_cut_dim_cost_nothing() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    x = hp.distribute_tensor(tensor(5, 4), mesh, [hp.Shard(0)])
    rows = hp.distribute_tensor(ints(0, 4, 4), mesh, [hp.Replicate()])
    table = hp.distribute_tensor(tensor(5, 4), mesh, [hp.Shard(1)])
    with strict(implicit_redistribution=True), hp.CommRecorder() as recorder:
        pending = [
            x[3],
            x.select(0, -1),
            x[1, 1:3],
            x[rows],
            x.index_select(0, rows),
            torch.nn.functional.embedding(rows, x),
        ]
        cut = [torch.nn.functional.embedding(rows, table), table[rows], table[1:3]]
        x[1:3] = 0.5
    assert recorder.records == []
    with hp.CommRecorder() as recorder:
        x[4] = x[0]
        x[3] += 1
        x[3] += x[1] * 2
    assert recorder.counts == {"all_reduce": 3}  # of one row each
    assert all(each.placements == (hp.Partial(),) for each in pending)
    assert [each.placements for each in cut] == [(hp.Shard(1),)] * 3
    expected = tensor(5, 4)
    expected[1:3] = 0.5
    expected[4] = expected[0]
    expected[3] += 1
    expected[3] += expected[1] * 2
    assert torch.equal(x.full_tensor(), expected)
    table.t()[:, 2] += 1  # written to itself: the framework allows it where the memory is the same to the stride
    again = tensor(5, 4)
    again.t()[:, 2] += 1
    assert torch.equal(table.full_tensor(), again)


@run_on_ranks(2)
def test_wrong_use_says_what_to_write() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    x = hp.distribute_tensor(tensor(5, 4), mesh, [hp.Shard(0)])
    with pytest.raises(RuntimeError, match=r"getitem: a plain tensor of shape \(2,\).*distribute_tensor"):
        x[ints(0, 1)]
    with pytest.raises(RuntimeError, match=r"setitem: a plain tensor of shape \(4,\).*distribute_tensor"):
        x[0] = tensor(4)
    with pytest.raises(IndexError, match=r"getitem on distributed tensors of global shape \(5, 4\).*out of bounds"):
        x[5]
    pending = hp.DTensor.from_local(tensor(4, 4), mesh, [hp.Partial()])
    with pytest.raises(RuntimeError, match=r"setitem cannot write into .*partial value.*reduce_partial"):
        pending[0] = 1.0


@run_on_ranks(2)
def test_bincount_of_shards_is_a_partial_sum() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    x = hp.distribute_tensor(torch.tensor([0, 1, 1, 5, 0]), mesh, [hp.Shard(0)])
    with CommRecorder() as recorder:
        counts = torch.bincount(x, minlength=4)
    assert counts.placements == (hp.Partial(),) and recorder.counts == {"all_reduce": 1}
    assert counts.full_tensor().tolist() == [2, 2, 0, 0, 0, 1]
    assert torch.bincount(x, minlength=x.sum()).full_tensor().tolist() == [2, 2, 0, 0, 0, 1, 0]
    one = [hp.distribute_tensor(torch.tensor([value]), mesh, [hp.Shard(0)]) for value in (1, 0.5)]
    weighed = torch.bincount(*one).full_tensor()  # a rank without values counts whole numbers
    assert weighed.dtype == torch.float32 and weighed.tolist() == [0, 0.5]
    bad = hp.distribute_tensor(torch.tensor([0, 1, -1]), mesh, [hp.Shard(0)])
    with pytest.raises(RuntimeError, match="non-negative"):  # on every rank, not on that with the bad value alone
        torch.bincount(bad)
