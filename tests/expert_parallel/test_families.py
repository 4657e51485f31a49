"""Mixtures of transformers that no list of ours names: their experts are sharded with the numbers of one device, or
they are refused by name; and their files are those that transformers writes."""

import json
from pathlib import Path

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.testing import threads
from tests.expert_parallel.families import KEPT_WHOLE, MIXTURES, REFUSED, TOLD
from tests.frameworks import on_mindspore
from tests.parallel.training import EPS, RATE, batch
from tests.tensor_parallel.hugging_face import assert_same, build, in_double, whole
from tests.world import small_or_sweep

pytestmark = pytest.mark.skipif(on_mindspore, reason="models of transformers are PyTorch's")
safetensors = pytest.importorskip("safetensors.torch")

LAYOUTS = {"dp_shard=2, ep=2": 2, "dp_shard=3, ep=3": 3, "tp=2, ep=2": 2, "dp_shard=2, tp=2, ep=2": 4}
NOISY = "phimoe_noisy"  # its draws are the library's, not those of PyTorch's own generator
NAMED = ("mixtral_without_balance", "qwen3_moe_without_balance", "deepseek_v3", "gpt_oss", "olmoe")
ALL = [*NAMED, *(name for name in {**MIXTURES, **TOLD} if name != NOISY)]
STEPS = 3


def _train(named_parameters, loss_and_norm):
    """Losses, norms, every gradient of the first step, None too, and the weights at the end."""
    named = dict(named_parameters)
    optimizer = torch.optim.AdamW(named.values(), lr=RATE, eps=EPS)
    seen = {}
    with in_double():
        for step in range(STEPS):
            optimizer.zero_grad()
            seen[f"loss {step}"] = loss_and_norm.loss()
            if step == 0:
                absent = {name for name, one in named.items() if one.grad is None}
                seen |= {f"gradient of {n}": whole(one.grad).clone() for n, one in named.items() if n not in absent}
            seen[f"norm {step}"] = whole(loss_and_norm.norm())
            optimizer.step()
    return seen | {f"weight of {name}": whole(one) for name, one in named.items()}


class _OnOneDevice:
    def __init__(self, model):
        self.model = model

    def loss(self):
        loss = self.model(**batch()).loss
        loss.backward()
        return loss.detach()

    def norm(self):
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)


class _OnRanks:
    def __init__(self, run):
        self.run = run

    def loss(self):
        mine = self.run.mine(range(len(batch()["labels"])))
        return self.run.forward_backward(**{name: one[mine.start : mine.stop] for name, one in batch().items()})

    def norm(self):
        return self.run.clip_grad_norm_(1.0)


def _on_ranks(family, layout):
    run = hp.parallelize(build(family), layout, keep_whole=KEPT_WHOLE.get(family, ()) if "tp" in layout else ())
    return _train(run.named_parameters(), _OnRanks(run))


@pytest.mark.parametrize("layout", small_or_sweep(LAYOUTS, ["dp_shard=3, ep=3"]))
@pytest.mark.parametrize("family", small_or_sweep(ALL, ["granitemoeshared"]))
def test_a_family_trains_as_on_one_device(family, layout):
    model = build(family)
    want = _train(model.named_parameters(), _OnOneDevice(model))
    for got in threads(LAYOUTS[layout]).run(_on_ranks, family, layout):
        assert_same(got, want, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("layout", small_or_sweep(LAYOUTS, ["dp_shard=2, ep=2"]))
def test_noise_on_a_router_does_not_depend_on_the_degrees(layout):
    want = threads(1).run(_on_ranks, NOISY, "dp_shard=1")[0]
    for got in threads(LAYOUTS[layout]).run(_on_ranks, NOISY, layout):
        assert_same(got, want, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("family", small_or_sweep(REFUSED, ["switch_transformers", "dbrx"]))
def test_others_are_refused_by_name(family):
    def work():
        with pytest.raises(
            ValueError, match=r"ep=2: the experts of '[\w.]+' \(\w+.*\) are computed by code of their own"
        ):
            hp.parallelize(build(family), "dp_shard=2, ep=2")

    threads(2).run(work)


def _tensors(folder):
    index = folder / "model.safetensors.index.json"
    names = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    return {key: one for name in names for key, one in safetensors.load_file(Path(folder) / name).items()}


WITH_FILES = ("mixtral_without_balance", *MIXTURES, *TOLD)


@pytest.mark.parametrize("family", small_or_sweep(WITH_FILES, ["phimoe", "kimi_linear"]))
def test_files_are_those_of_transformers_at_any_ep(family, tmp_path):
    model = build(family, torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    want = {name: one.detach().clone() for name, one in model.state_dict().items()}

    def work(ranks):
        with torch.no_grad():
            for one in (again := build(family, torch.float32)).parameters():
                one.zero_()
        run = hp.parallelize(again, f"dp_shard={ranks}, ep={ranks}")
        assert run.load_hugging_face(tmp_path / "theirs") == ([], [])
        run.save_hugging_face(tmp_path / f"ours of {ranks}")
        return {name: whole(one) for name, one in run.state_dict()["model"].items()}

    for ranks in (2, 3):
        assert_same(threads(ranks).run(work, ranks)[0], want, rtol=0, atol=0)
        theirs, ours = _tensors(tmp_path / "theirs"), _tensors(tmp_path / f"ours of {ranks}")
        assert any(".experts.1." in name for name in theirs) or family.startswith(("aria", "gemma4", "granite"))
        assert_same(ours, theirs, rtol=0, atol=0)
