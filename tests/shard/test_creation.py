"""New tensors like distributed ones, and conversions to other dtypes, under every layout."""

import copy
from typing import Any

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.core.shard.dispatching.strict_mode import strict
from tests.shard.validator import Sample, assert_valid, tensor
from tests.world import run_on_ranks

only_on = "torch"  # calls PyTorch's operators one by one; MindSpore's own: test_mindspore_rules.py

LIKE = [
    Sample("zeros_like", (tensor(5, 3),)),
    Sample("ones_like", (tensor(5, 3),), {"dtype": torch.int32}),
    Sample("full_like", (tensor(5, 3), 2.5)),
    Sample("Tensor.new_zeros", (tensor(5, 3), (5, 3))),
    Sample("Tensor.new_zeros", (tensor(5, 3), 2, 4)),
    Sample("Tensor.new_ones", (tensor(5, 2, 3), (5, 2, 4))),
    Sample("Tensor.new_ones", (tensor(5, 3), 2)),
    Sample("Tensor.new_full", (tensor(5, 3), (2, 2), 1.5)),
    Sample("Tensor.new_full", (tensor(5, 3),), {"size": (5, 3), "fill_value": 1.5}),
    Sample("Tensor.new_tensor", (tensor(5, 3), [1.0, 2.0])),
]
CONVERT = [
    *(Sample(f"Tensor.{name}", (tensor(5, 3, low=0.2),)) for name in ("double", "float", "half", "bfloat16")),
    *(Sample(f"Tensor.{name}", (tensor(5, 3, low=0.2),)) for name in ("int", "long", "short", "bool", "cpu")),
    Sample("Tensor.to", (tensor(5, 3), torch.float32)),
    Sample("Tensor.to", (tensor(5, 3), torch.int64)),
    Sample("Tensor.to", (tensor(5, 3), "cpu", torch.float32)),
    Sample("Tensor.to", (tensor(5, 3), tensor(2, dtype=torch.float32))),
    Sample("Tensor.to", (tensor(5, 3),), {"dtype": torch.float64, "copy": True}),
    Sample("Tensor.type", (tensor(5, 3), torch.float32)),
    Sample("Tensor.type", (tensor(5, 3), "torch.DoubleTensor")),
    Sample("Tensor.type_as", (tensor(5, 3), tensor(2, dtype=torch.int32))),
    Sample("Tensor.clone", (tensor(2, 3, 4, 4),), {"memory_format": torch.channels_last}),
    Sample("Tensor.contiguous", (tensor(2, 3, 4, 4),), {"memory_format": torch.channels_last}),
    Sample("complex", (tensor(5, 3), tensor(5, 3, seed=1)), {}, False),
    Sample("real", (torch.complex(tensor(5, 3), tensor(5, 3, seed=1)),), {}, False),
    Sample("imag", (torch.complex(tensor(5, 3), tensor(5, 3, seed=1)),), {}, False),
]


@pytest.mark.parametrize("samples", [LIKE, CONVERT], ids=["like", "convert"])
def test_same_as_one_device(worlds, samples: list[Sample]) -> None:
    assert_valid(worlds, samples)


@run_on_ranks(2)
def test_layouts_of_new_tensors() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    cut = hp.distribute_tensor(tensor(5, 3), mesh, [hp.Shard(0)])
    pending = hp.DTensor.from_local(tensor(5, 3), mesh, [hp.Partial()])
    with strict(implicit_redistribution=True), hp.CommRecorder() as recorder:
        like_cut = [torch.zeros_like(cut), torch.empty_like(cut), cut.new_empty(5, 3), cut.new_full((5, 3), 1.0)]
        whole = [torch.ones_like(pending), pending.new_ones(5, 3), cut.new_zeros(7), cut.new_tensor([1.0])]
        with_gradient = [torch.ones_like(cut, requires_grad=True), cut.new_ones(2, requires_grad=True)]
        still_pending = [pending.to(torch.float32), pending.half(), pending.clone(), pending.bfloat16()]
    assert recorder.records == []
    assert all(each.placements == (hp.Shard(0),) for each in like_cut)
    assert all(each.placements == (hp.Replicate(),) for each in whole)
    assert all(each.requires_grad and each.is_leaf for each in with_gradient)
    assert all(each.placements == (hp.Partial(),) for each in still_pending)
    assert torch.equal(whole[0].full_tensor(), torch.ones(5, 3, dtype=torch.float64))
    assert pending.int().placements == (hp.Replicate(),)
    assert torch.equal(pending.int().full_tensor(), (tensor(5, 3) * 2).int())
    with pytest.raises(TypeError, match="new_tensor: the data is a distributed tensor already"):
        cut.new_tensor(cut)


def _questions(x: Any) -> dict[str, Any]:
    one = x.sum()
    return {
        "len": len(x),
        "rows": [row.tolist() for row in x],
        "reversed": [row.tolist() for row in reversed(x)],
        "in": 100.0 in x,
        "bool": bool(one > 0),
        "float": float(one),
        "int": int(one),
        "format": f"{one:.3f}",
        "item": x[0, 0].item(),
        "tolist": x.tolist(),
        "numpy": x.detach().numpy().tolist(),
        "type": x.type(),
        "dim": x.dim(),
        "ndim": x.ndim,
        "size": (tuple(x.size()), x.size(-1), x.size(dim=0)),
        "numel": x.numel(),
        "nelement": x.nelement(),
        "ndimension": x.ndimension(),
        "index": [10, 20, 30, 40, 50][torch.ones_like(x).sum().long() // 15],
        "copied": copy.deepcopy(x.detach()).tolist(),
        "dlpack": torch.from_dlpack(x.detach()).tolist(),
    }


@run_on_ranks(2)
def test_numbers_to_fill_with_may_be_pending_and_functions_are_applied() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    plain = tensor(5, 3)
    x = hp.distribute_tensor(plain, mesh, [hp.Shard(0)])
    torch.testing.assert_close(torch.full_like(x, x.sum()).full_tensor(), torch.full_like(plain, plain.sum()))
    torch.testing.assert_close(x.new_full((2,), x.mean()).full_tensor(), plain.new_full((2,), plain.mean()))
    filled = x.new_full(size=(5, 3), fill_value=x.sum())
    torch.testing.assert_close(filled.full_tensor(), plain.new_full((5, 3), plain.sum()))
    x.apply_(lambda value: 2 * value)  # PyTorch does not count this as a write
    torch.testing.assert_close(x.map_(x, lambda one, other: one * other).full_tensor(), (2 * plain).square())


@run_on_ranks(2)
def test_questions_are_answered_for_the_whole() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    whole = tensor(5, 3)
    expected = _questions(whole)
    for placement in (hp.Shard(0), hp.Shard(1), hp.Replicate()):
        x = hp.distribute_tensor(whole, mesh, [placement])
        answers = _questions(x)
        assert set(answers) == set(expected)
        for question, answer in answers.items():
            wanted = expected[question]
            assert answer == (pytest.approx(wanted) if isinstance(wanted, float) else wanted), question
    with pytest.raises(TypeError, match="0-d"):
        iter(hp.distribute_tensor(tensor(), mesh, [hp.Replicate()]))


@run_on_ranks(2)
def test_pending_sums_of_small_types_are_done_before_an_answer_in_another_type() -> None:
    mesh = hp.init_device_mesh("cpu", (2,))
    part = torch.tensor([10, 4] if mesh.get_coordinate() == (0,) else [251, 255], dtype=torch.uint8)
    pending = hp.DTensor.from_local(part, mesh, [hp.Partial()])  # 5 and 3
    for convert in (torch.Tensor.double, torch.Tensor.bfloat16, lambda x: x.to(torch.float32), lambda x: x.long()):
        assert convert(pending).full_tensor().tolist() == [5, 3]
    torch.testing.assert_close(torch.fft.fft(pending).full_tensor().real, torch.tensor([8.0, 2.0]))
    (pending.double() * 0.5).sum()  # what is planned for these is not for other dtypes
    assert (pending * 0.5).full_tensor().tolist() == [2.5, 1.5]
    assert pending.sum().full_tensor().item() == 8
    assert torch.cat([pending, pending.double()]).full_tensor().tolist() == [5, 3, 5, 3]
    doubles = hp.DTensor.from_local(torch.ones(2), mesh, [hp.Partial()])  # 2 and 2
    assert doubles.add_(pending).full_tensor().tolist() == [7, 5]
    assert (pending + pending).placements == pending.placements  # the same type counts around alike
    view = pending.view(1, 2)
    view.mul_(3)
    assert pending.full_tensor().tolist() == [15, 9]
