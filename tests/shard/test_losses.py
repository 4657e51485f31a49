"""Losses under every layout: cut batches, cut classes, every reduction, weights and ignored targets."""

import pytest
import torch
import torch.nn.functional as F

import hyper_parallel as hp
from hyper_parallel.core.dtensor.comm_recorder import CommRecorder
from hyper_parallel.core.shard.dispatching.strict_mode import strict
from tests.shard.validator import Sample, assert_valid, tensor
from tests.world import run_on_ranks

only_on = "torch"  # calls PyTorch's operators one by one; MindSpore's own: test_mindspore_rules.py

TARGET = torch.tensor([0, 2, 3, 1, 2])
IGNORING = torch.tensor([0, -100, 3, 1, -100])
PROBABILITIES = tensor(5, 4, seed=5, low=0.1).softmax(1)
LOGITS = tensor(5, 4)
UNIT = tensor(5, 3, low=0.1, high=0.9)
REDUCTIONS = ("none", "mean", "sum")


def weighted(loss, logits, target, weight, **options):
    """The class weights have no gradient."""
    return getattr(F, loss)(logits, target, weight.detach(), **options)


def weighted_logits(logits, target, weight, pos_weight, **options):
    options |= {"weight": weight.detach(), "pos_weight": pos_weight.detach()}
    return F.binary_cross_entropy_with_logits(logits, target, **options)


def weighted_rows(logits, target, weight, **options):
    return F.multi_margin_loss(logits, target, weight=weight.detach(), **options)


def cross_entropy_of_log_probabilities(logits, target):
    return F.nll_loss(F.log_softmax(logits, 1), target)


CROSS_ENTROPY = [
    *(Sample("nn.functional.cross_entropy", (LOGITS, TARGET), {"reduction": how}) for how in REDUCTIONS),
    *(Sample("nn.functional.cross_entropy", (LOGITS, IGNORING), {"reduction": how}) for how in REDUCTIONS),
    *(
        Sample(
            weighted,
            ("cross_entropy", LOGITS, IGNORING, tensor(4, seed=1, low=0.5)),
            {"reduction": how, "label_smoothing": smoothing},
        )
        for how in REDUCTIONS
        for smoothing in (0.0, 0.2)
    ),
    Sample("nn.functional.cross_entropy", (LOGITS, TARGET), {"label_smoothing": 0.1}),
    Sample("nn.functional.cross_entropy", (LOGITS, TARGET), {"ignore_index": 2}),
    Sample("nn.functional.cross_entropy", (LOGITS, torch.full((5,), -100)), {}),
    Sample("nn.functional.cross_entropy", (tensor(3, 5, 2), torch.tensor([[0, 4], [3, -100], [1, 1]]))),
    Sample(
        "nn.functional.cross_entropy", (tensor(3, 5, 2), torch.tensor([[0, 4], [3, 2], [1, 1]])), {"reduction": "none"}
    ),
    Sample("nn.functional.cross_entropy", (tensor(5), torch.tensor(3))),
    Sample("nn.functional.cross_entropy", (tensor(3, 1), torch.tensor([0, 0, 0]))),
    *(Sample("nn.functional.cross_entropy", (LOGITS, PROBABILITIES), {"reduction": how}) for how in REDUCTIONS),
    Sample(weighted, ("cross_entropy", LOGITS, PROBABILITIES, tensor(4, seed=1, low=0.5)), {"label_smoothing": 0.3}),
    *(Sample("nn.functional.nll_loss", (LOGITS, IGNORING), {"reduction": how}) for how in REDUCTIONS),
    Sample(weighted, ("nll_loss", LOGITS, TARGET, tensor(4, seed=1, low=0.5))),
    Sample("nn.functional.nll_loss", (tensor(3, 5, 2), torch.tensor([[0, 4], [3, 2], [1, 1]]))),
    Sample(cross_entropy_of_log_probabilities, (LOGITS, TARGET)),
]
ELEMENTS = [
    *(
        Sample(f"nn.functional.{name}", (tensor(5, 3), tensor(5, 3, seed=1)), {"reduction": how})
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
        for how in REDUCTIONS
    ),
    Sample("nn.functional.mse_loss", (tensor(1, 3), tensor(1, 3, seed=1))),
    Sample("nn.functional.mse_loss", (tensor(5, 3), tensor(1, 3, seed=1))),
    Sample("nn.functional.mse_loss", (tensor(0, 3), tensor(0, 3))),
    Sample("nn.functional.smooth_l1_loss", (tensor(5, 3), tensor(5, 3, seed=1)), {"beta": 0.5}),
    Sample("nn.functional.mse_loss", (tensor(5), tensor(5, seed=1)), {"size_average": False}),
    *(Sample("nn.functional.binary_cross_entropy", (UNIT, UNIT.flip(0)), {"reduction": how}) for how in REDUCTIONS),
    Sample("nn.functional.binary_cross_entropy", (UNIT, UNIT.flip(0), tensor(5, 1, low=0.5)), gradients=False),
    *(
        Sample(
            weighted_logits,
            (tensor(5, 3), UNIT, tensor(3, low=0.5), tensor(5, 1, seed=1, low=0.5)),
            {"reduction": how},
        )
        for how in REDUCTIONS
    ),
    *(Sample("nn.functional.kl_div", (tensor(5, 3), UNIT), {"reduction": how}) for how in (*REDUCTIONS, "batchmean")),
    Sample("nn.functional.kl_div", (tensor(5, 3), tensor(5, 3, seed=1)), {"reduction": "sum", "log_target": True}),
    Sample("nn.functional.poisson_nll_loss", (tensor(5, 3), UNIT), {"full": True}),
    Sample("nn.functional.gaussian_nll_loss", (tensor(5), tensor(5, seed=1), UNIT[:, 0])),
    Sample("nn.functional.soft_margin_loss", (tensor(5, 3), tensor(5, 3, seed=1).sign()), gradients=False),
    Sample("nn.functional.hinge_embedding_loss", (tensor(5, 3), tensor(5, 3, seed=1).sign().long()), {"margin": 0.5}),
    Sample(
        "nn.functional.margin_ranking_loss",
        (tensor(5), tensor(5, seed=1), tensor(5, seed=2).sign().long()),
        {"reduction": "sum"},
    ),
    Sample("nn.functional.margin_ranking_loss", (tensor(5), tensor(5, seed=1), tensor(5, seed=2).sign().long())),
]
ROWS = [
    Sample(
        "nn.functional.cosine_embedding_loss", (tensor(5, 3), tensor(5, 3, seed=1), tensor(5, seed=2).sign().long())
    ),
    Sample(
        "nn.functional.cosine_embedding_loss",
        (tensor(5, 3), tensor(5, 3, seed=1), tensor(5, seed=2).sign().long()),
        {"reduction": "none", "margin": 0.2},
    ),
    *(
        Sample(
            "nn.functional.triplet_margin_loss",
            (tensor(5, 3), tensor(5, 3, seed=1), tensor(5, 3, seed=2)),
            {"reduction": how, "swap": True},
        )
        for how in REDUCTIONS
    ),
    *(Sample("nn.functional.multi_margin_loss", (LOGITS, TARGET), {"reduction": how}) for how in REDUCTIONS),
    Sample(weighted_rows, (LOGITS, TARGET, tensor(4, low=0.5)), {"p": 2, "margin": 0.5}),
    Sample("nn.functional.multilabel_margin_loss", (LOGITS, torch.tensor([[0, 2, -1, -1]] * 5))),
    Sample("nn.functional.multilabel_soft_margin_loss", (LOGITS, (PROBABILITIES > 0.25).long())),
    Sample("nn.functional.triplet_margin_with_distance_loss", (tensor(5), tensor(5, seed=1), tensor(5, seed=2))),
]
FAMILIES = {"cross_entropy": CROSS_ENTROPY, "elements": ELEMENTS, "rows": ROWS}


@pytest.mark.parametrize("family", FAMILIES)
def test_same_as_one_device(worlds, family: str) -> None:
    assert_valid(worlds, FAMILIES[family])


@run_on_ranks(2)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_logits_stay_cut(smoothing: float) -> None:
    """Vocabulary parallel: nothing of the size of the logits travels, and backward needs no message at all."""
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    logits = hp.distribute_tensor(tensor(6, 101).requires_grad_(), mesh, [hp.Shard(1)])
    target = hp.distribute_tensor(torch.arange(6) * 20, mesh, [hp.Replicate()])
    with strict(implicit_redistribution=True), CommRecorder() as recorder:
        loss = F.cross_entropy(logits, target, label_smoothing=smoothing)
    assert recorder.counts == {"all_reduce": 3}
    assert max(record.num_bytes for record in recorder.records) <= 2 * 6 * 8
    with CommRecorder() as recorder:
        loss.backward()
    assert recorder.records == []


@run_on_ranks(2)
@pytest.mark.parametrize("name", ["mse_loss", "cross_entropy", "binary_cross_entropy_with_logits"])
def test_a_cut_batch_leaves_a_pending_mean(name: str) -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    target = TARGET if name == "cross_entropy" else PROBABILITIES
    place = [hp.Shard(0)]
    with strict(implicit_redistribution=True), CommRecorder() as recorder:
        loss = getattr(F, name)(hp.distribute_tensor(LOGITS, mesh, place), hp.distribute_tensor(target, mesh, place))
    assert loss.placements == (hp.Partial(),)
    # the number of targets that count, and their range
    assert recorder.counts == ({"all_reduce": 2} if name == "cross_entropy" else {})
    torch.testing.assert_close(loss.full_tensor(), getattr(F, name)(LOGITS, target))


@run_on_ranks(2)
@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss"])
def test_second_derivatives_over_cut_classes(name: str) -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

    def penalty(logits, target):
        options = {"label_smoothing": 0.1} if name == "cross_entropy" else {}
        loss = getattr(F, name)(logits, target, reduction="none", **options)
        (first,) = torch.autograd.grad((loss**2).sum(), logits, create_graph=True)
        return (first * first).sum()

    plain = LOGITS.clone().requires_grad_()
    penalty(plain, IGNORING).backward()
    ours = hp.distribute_tensor(LOGITS.clone().requires_grad_(), mesh, [hp.Shard(1)])
    penalty(ours, hp.distribute_tensor(IGNORING, mesh, [hp.Replicate()])).backward()
    torch.testing.assert_close(ours.grad.full_tensor(), plain.grad)


@run_on_ranks(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_over_cut_classes(dtype: torch.dtype) -> None:
    """More rows than bfloat16 can count."""
    mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    logits, target = (tensor(3000, 7) * 10).to(dtype), torch.arange(3000) % 7
    ours = F.cross_entropy(
        hp.distribute_tensor(logits, mesh, [hp.Shard(0), hp.Shard(1)]),
        hp.distribute_tensor(target, mesh, [hp.Shard(0), hp.Replicate()]),
    )
    assert ours.dtype is dtype
    torch.testing.assert_close(ours.full_tensor(), F.cross_entropy(logits, target), rtol=2e-2, atol=0)


@run_on_ranks(2)
def test_messages() -> None:
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    logits = hp.distribute_tensor(LOGITS, mesh, [hp.Shard(1)])
    wrong = hp.distribute_tensor(torch.tensor([0, 1, 4, 2, 3]), mesh, [hp.Replicate()])
    with pytest.raises(IndexError, match="the target 4 is not one of the 4 classes; targets are 0 to 3"):
        F.cross_entropy(logits, wrong)
    weight = hp.distribute_tensor(torch.ones(4, dtype=torch.float64, requires_grad=True), mesh, [hp.Shard(0)])
    right = hp.distribute_tensor(TARGET, mesh, [hp.Replicate()])
    with pytest.raises(RuntimeError, match=r"no gradient with respect to weight; give it weight.detach\(\)"):
        F.cross_entropy(logits, right, weight)
    with pytest.raises(RuntimeError, match=r"a plain tensor of shape \(5,\) meets a distributed one"):
        F.cross_entropy(logits, TARGET)
