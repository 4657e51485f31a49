"""Unmodified mixtures of Hugging Face with sharded experts train as plain PyTorch does on one device."""

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.parallel.micro_batches import parts_of
from hyper_parallel.testing import threads
from tests.parallel.training import batch, on_one_device, train
from tests.tensor_parallel.hugging_face import assert_same, build, in_double, whole
from tests.world import small_or_sweep

FAMILIES = ("mixtral_without_balance", "qwen3_moe_without_balance", "deepseek_v3", "gpt_oss", "olmoe")
LAYOUTS = {
    "dp_shard=2, ep=2": 2,
    "tp=2, ep=2": 2,
    "cp=2, ep=2": 2,
    "dp_shard=4, ep=4": 4,
    "dp_shard=4, ep=2": 4,
    "dp_replicate=2, dp_shard=2, ep=2": 4,
    "dp_shard=2, tp=2, ep=2": 4,
    "dp_shard=2, tp=2, ep=4": 4,
    "dp_shard=2, cp=2, ep=2": 4,
    "dp_shard=2, cp=2, ep=4": 4,
    "pp=2, dp_shard=2, ep=2": 4,
}
SMALL = [
    ("mixtral_without_balance", "dp_shard=4, ep=2"),
    ("mixtral_without_balance", "dp_shard=2, ep=2"),
    ("deepseek_v3", "dp_shard=2, tp=2, ep=2"),
    ("gpt_oss", "dp_shard=4, ep=4"),
    ("olmoe", "dp_shard=2, cp=2, ep=2"),
    ("olmoe", "tp=2, ep=2"),
]


@pytest.mark.parametrize(
    "case", small_or_sweep([(family, layout) for family in FAMILIES for layout in LAYOUTS], SMALL), ids=": ".join
)
def test_losses_norms_and_weights_are_those_of_one_device(case):
    family, layout = case
    given = batch()
    want = on_one_device(family, given)
    seen = set()
    for got in threads(LAYOUTS[layout]).run(lambda: train(hp.parallelize(build(family), layout), given)):
        assert_same(got, {name: want[name] for name in got}, rtol=1e-8, atol=1e-9)  # a stage has its own weights
        seen |= got.keys()
    assert seen == want.keys()


def _gradients_by_parts(family, given, num_parts):
    """On one device, the batch in parts: each part's loss of routers counts by its rows, all else by its targets."""
    model = build(family)
    labels = given["labels"][:, 1:]
    with in_double():
        total = 0.0
        for begin, end in parts_of(len(labels), num_parts):
            out = model(**{name: value[begin:end] for name, value in given.items()})
            auxiliary = model.router_aux_loss_coef * out.aux_loss
            count = (labels[begin:end] != -100).sum()
            tokens = (out.loss - auxiliary) * count / (labels != -100).sum() if count else 0.0
            total = total + tokens + auxiliary * (end - begin) / len(labels)
        total.backward()
    return {"loss": total.detach()} | {name: one.grad for name, one in model.named_parameters()}


def _check_gradients(family, layout, given, want):
    def work():
        run = hp.parallelize(build(family), layout)
        mine = run.mine(range(len(given["labels"])))
        with in_double():
            loss = run.forward_backward(**{name: value[mine.start : mine.stop] for name, value in given.items()})
        return {"loss": loss} | {name: whole(one.grad) for name, one in run.named_parameters()}

    for got in threads(2).run(work):
        assert_same(got, want, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize(
    "layout", small_or_sweep(("dp_shard=2, ep=2", "tp=2, ep=2", "cp=2, ep=2"), ["dp_shard=2, ep=2"])
)
def test_losses_of_routers_are_those_of_one_device_for_the_same_parts(family, layout):
    given = {name: value[2:] for name, value in batch().items()}
    want = _gradients_by_parts(family, given, 2 if "dp_shard" in layout else 1)
    _check_gradients(family, layout, given, want)


def test_a_rank_without_rows_of_a_padded_batch_adds_nothing():
    given = {name: value[-1:] for name, value in batch().items()}
    given["attention_mask"] = torch.ones_like(given["labels"])
    given["attention_mask"][0, 9:], given["labels"][0, 9:] = 0, -100
    want = _gradients_by_parts("mixtral", given, 1)
    _check_gradients("mixtral", "dp_shard=2, ep=2", given, want)


def test_other_mixtures_are_refused_by_name():
    def work():
        with pytest.raises(ValueError, match=r"ep=2: the experts of 'blocks.0.0' \(Own\) are computed by code"):
            hp.parallelize(_with_own_experts(), "ep=2", loss=lambda outputs, batch: (outputs.sum(), outputs.numel()))

    threads(2).run(work)


def _with_own_experts():
    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2, 4, 4))

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = Experts()

        def forward(self, x):
            return x @ self.experts.weight[0]

    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList([torch.nn.Sequential(Own())])
    return model
