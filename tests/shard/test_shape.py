"""Operators that rearrange, stretch, join and split dims, under every layout."""

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.shard.dispatching.strict_mode import strict
from tests.shard.validator import Sample, assert_valid, tensor
from tests.world import run_on_ranks

only_on = "torch"  # calls PyTorch's operators one by one; MindSpore's own: test_mindspore_rules.py

ORDER = [
    Sample("transpose", (tensor(5, 3, 2), 0, -1)),
    Sample("transpose", (tensor(5, 3),), {"dim0": 0, "dim1": 1}),
    Sample("swapaxes", (tensor(5, 3),), {"axis0": 0, "axis1": 1}),
    Sample("Tensor.t", (tensor(5, 3),)),
    Sample("Tensor.t", (tensor(5),)),
    Sample("adjoint", (tensor(2, 5, 3),)),
    Sample(getattr, (tensor(5, 3), "T"), label="T"),
    Sample(getattr, (tensor(2, 5, 3), "mT"), label="mT"),
    Sample(getattr, (tensor(2, 5, 3), "mH"), label="mH"),
    Sample(getattr, (tensor(5, 3), "H"), label="H"),
    Sample("permute", (tensor(5, 3, 2), (2, 0, 1))),
    Sample("Tensor.permute", (tensor(5, 3, 2), -1, 0, 1)),
    Sample("movedim", (tensor(5, 3, 2), 0, 2)),
    Sample("movedim", (tensor(5, 3, 2), (0, 1), (-1, 0))),
    Sample("moveaxis", (tensor(5, 3), 0, 1)),
]
STRETCH = [
    Sample("Tensor.expand", (tensor(5, 1), 2, -1, 3)),
    Sample("Tensor.expand", (tensor(5, 3), (5, 3))),
    Sample("Tensor.expand_as", (tensor(5, 1), tensor(5, 3, dtype=torch.int64))),
    Sample("broadcast_to", (tensor(3), (5, 3))),
    Sample("broadcast_tensors", (tensor(5, 1), tensor(3, seed=1))),
    Sample("Tensor.repeat", (tensor(5, 3), 2, 1, 2)),
    Sample("tile", (tensor(5, 3), (2,))),
    Sample("tile", (tensor(5, 3), (2, 1, 1))),
    Sample("repeat_interleave", (tensor(4, 3), 2, 0)),
    Sample("repeat_interleave", (tensor(5, 3), 3), {"dim": -1}),
    Sample("repeat_interleave", (tensor(4, 3), 2)),
    Sample("repeat_interleave", (tensor(4, 3), 2), {"dim": 0, "output_size": 8}),
    Sample("repeat_interleave", (tensor(4, 3), torch.tensor([1, 0, 2, 1])), {"dim": 0}),
    Sample("meshgrid", (tensor(4), tensor(3, seed=1)), {"indexing": "ij"}),
    Sample("meshgrid", ([tensor(4), tensor(3, seed=1)],), {"indexing": "xy"}),
    Sample("cartesian_prod", (tensor(4), tensor(3, seed=1))),
    Sample("block_diag", (tensor(2, 3), tensor(3, 2))),
]
JOIN = [
    Sample("cat", ([tensor(5, 3), tensor(2, 3, seed=1)],)),
    Sample("cat", ([tensor(5, 3), tensor(5, 2, seed=1)],), {"dim": -1}),
    Sample("concat", ([tensor(5, 3), tensor(0)],)),
    Sample("stack", ([tensor(5, 3), tensor(5, 3, seed=1)],)),
    Sample("stack", ([tensor(5, 3), tensor(5, 3, seed=1)], -1)),
    Sample("hstack", ([tensor(5), tensor(3, seed=1)],)),
    Sample("hstack", ([tensor(5, 2), tensor(5, 3, seed=1)],)),
    Sample("vstack", ([tensor(5), tensor(2, 5, seed=1)],)),
    Sample("dstack", ([tensor(5), tensor(5, seed=1)],)),
    Sample("dstack", ([tensor(4, 3), tensor(4, 3, 2, seed=1)],)),
    Sample("column_stack", ([tensor(5), tensor(5, 2, seed=1)],)),
]
SPLIT = [
    Sample("split", (tensor(5, 3), 2)),
    Sample("split", (tensor(5, 4), [1, 3], -1)),
    Sample("Tensor.split", (tensor(5, 3), 2), {"dim": 1}),
    Sample("split_with_sizes", (tensor(5, 3), [2, 3])),
    Sample("chunk", (tensor(5, 3), 2)),
    Sample("Tensor.chunk", (tensor(5, 3), 2, 1)),
    Sample("tensor_split", (tensor(5, 3), 3)),
    Sample("tensor_split", (tensor(5, 3), (1, 2)), {"dim": 1}),
    Sample("hsplit", (tensor(5, 4), 2)),
    Sample("vsplit", (tensor(4, 3), 2)),
    Sample("dsplit", (tensor(2, 3, 4), [1, 2])),
    Sample("unbind", (tensor(3, 4),)),
    Sample("unbind", (tensor(3, 2), -1)),
    Sample("narrow", (tensor(5, 3), 0, 1, 3)),
    Sample("narrow", (tensor(5, 3), 0, 0, 5)),
    Sample("Tensor.unfold", (tensor(5, 7), 1, 3, 2)),
    Sample("nn.functional.unfold", (tensor(2, 3, 4, 4), 2)),
]
MOVE = [
    Sample("roll", (tensor(5, 3), 2)),
    Sample("roll", (tensor(5, 3), (1, 2), (0, 1))),
    Sample("roll", (tensor(5, 3), 1), {"dims": 1}),
    Sample("flip", (tensor(5, 3), (0,))),
    Sample("Tensor.flip", (tensor(5, 3), 0, 1)),
    Sample("fliplr", (tensor(5, 3),)),
    Sample("flipud", (tensor(5, 3),)),
    Sample("rot90", (tensor(4, 3, 2), 1, (0, 1))),
    Sample("nn.functional.pad", (tensor(5, 3), (1, 2))),
    Sample("nn.functional.pad", (tensor(5, 3), (0, 0, 1, -1)), {"value": 2.5}),
    Sample("nn.functional.pad", (tensor(2, 3, 5), (2, 1)), {"mode": "reflect"}),
    Sample("nn.functional.pad", (tensor(2, 3, 5), (2, 1)), {"mode": "circular"}),
]
DIAGONAL = [
    Sample("tril", (tensor(5, 4),)),
    Sample("tril", (tensor(2, 5, 4), -1)),
    Sample("triu", (tensor(5, 7),), {"diagonal": 2}),
    Sample("Tensor.triu_", (tensor(5, 4), 1)),
    Sample("diagonal", (tensor(5, 3, 2),)),
    Sample("diagonal", (tensor(5, 3, 4), 1, -1, 0)),
    Sample("diag", (tensor(5),)),
    Sample("diag", (tensor(5, 3), 1)),
    Sample("diag_embed", (tensor(2, 3),)),
    Sample("diag_embed", (tensor(5, 3), 1, 0, 2)),
    Sample("diagonal_scatter", (tensor(4, 3, 2), tensor(2, 3, seed=1))),
    Sample("select_scatter", (tensor(4, 3), tensor(3, seed=1), 0, 2)),
    Sample("slice_scatter", (tensor(6, 3), tensor(2, 3, seed=1)), {"dim": 0, "start": 1, "end": 5, "step": 2}),
    Sample("as_strided", (tensor(5, 3), (2, 2), (3, 1), 1)),
]
FAMILIES = {"order": ORDER, "stretch": STRETCH, "join": JOIN, "split": SPLIT, "move": MOVE, "diagonal": DIAGONAL}


@pytest.mark.parametrize("family", FAMILIES)
def test_same_as_one_device(worlds, family: str) -> None:
    assert_valid(worlds, FAMILIES[family])


@run_on_ranks(2)
def test_pending_sums_and_other_dims_pass_without_communication() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    pending = hp.DTensor.from_local(tensor(4, 6), mesh, [hp.Partial()])
    cut = hp.distribute_tensor(tensor(5, 6), mesh, [hp.Shard(0)])
    with strict(implicit_redistribution=True), hp.CommRecorder() as recorder:
        still_pending = [
            torch.cat([pending, pending]),
            torch.stack([pending, pending], 1),
            pending.view(24),
            pending.T,
            pending.tril(),
            pending[1:3],
            pending.roll(1, 0),
            *pending.split(2),
            *pending.unbind(1),
            torch.nn.functional.pad(pending, (1, 1)),
        ]
        still_cut = [
            torch.cat([cut, cut], 1),
            torch.stack([cut, cut], 1),
            torch.hstack([cut, cut]),
            *cut.chunk(3, 1),
            cut.tril(),
            cut.roll(2, 1),
            cut.repeat(1, 2),
            torch.nn.functional.pad(cut, (1, 1)),
            cut.cumsum(1),
            cut.sort(1).values,
            cut.topk(2, 1).indices,
        ]
    assert recorder.records == []
    assert all(each.placements == (hp.Partial(),) for each in still_pending)
    assert all(each.placements == (hp.Shard(0),) for each in still_cut)


@run_on_ranks(2)
def test_only_what_must_be_whole_is_gathered() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    cut = hp.distribute_tensor(tensor(4, 6), mesh, [hp.Shard(0)])
    with hp.CommRecorder() as recorder:
        halves = cut.split(2)
    assert recorder.counts == {"all_gather_into_tensor": 1}
    assert all(half.layout.is_replicated for half in halves)
    with pytest.raises(RuntimeError, match=r"sort .*would redistribute"), strict(implicit_redistribution=True):
        cut.sort(0)
