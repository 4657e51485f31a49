"""`hyper-parallel check`: layouts that are right are equal, and what is wrong is found by name."""

from __future__ import annotations

import doctest
import importlib
import json

import numpy as np
import pytest
from pydantic import TypeAdapter
from typer.testing import CliRunner

import hyper_parallel as hp
from hyper_parallel.cli.main import app
from hyper_parallel.models.llama_config import LlamaConfig
from hyper_parallel.models.sizes import model_size
from hyper_parallel.platform import get_platform
from hyper_parallel.trainer.check import check_run
from hyper_parallel.trainer.check.rank import reference
from hyper_parallel.trainer.check.short_data import ShortData
from hyper_parallel.trainer.check.shrinking import one_process, shrink
from hyper_parallel.trainer.check.verdict import Difference, Verdict
from hyper_parallel.trainer.config.run_config import RunConfig
from tests.analysis.real_steps import CONFIGS
from tests.world import small_or_sweep

only_on = "torch"  # where ranks are threads; tests/trainer/test_check_on_mindspore.py has processes

_DATA = {"kind": "synthetic", "length": 100, "vocab_size": 2000, "isolate": False, "num_samples": 64}


def _config(**sections) -> RunConfig:
    given = {
        "model": {"name": "llama-1b"},
        "data": _DATA,
        "train": {"steps": 1000, "batch": 9},
        "schedule": {"warmup": 100},
    }
    for name, values in sections.items():
        given[name] = values if name == "model" else {**given.get(name, {}), **values}
    return TypeAdapter(RunConfig).validate_json(json.dumps(given))


# ---- what is right is equal ----

LAYOUTS = {
    "one": {},
    "dp_shard": {"dp_shard": 2},
    "tp": {"tp": 2},
    "uneven tp": {"tp": 3},
    "cp": {"cp": 2},
    "dp_replicate": {"dp_replicate": 2},
    "dp_shard x tp": {"dp_shard": 2, "tp": 2},
    "cp x tp": {"cp": 2, "tp": 2},
    "dp_shard x cp": {"dp_shard": 2, "cp": 2},
    "pp": {"pp": 2, "schedule": "zbv"},
    "pp x tp": {"pp": 2, "tp": 2},
    "pp x dp_shard": {"pp": 2, "dp_shard": 2, "schedule": "interleaved", "stages_per_rank": 3},
    "all": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
}


@pytest.mark.parametrize(
    "name", small_or_sweep(LAYOUTS, ["uneven tp", "dp_shard x tp", "cp x tp", "dp_replicate", "pp x tp"])
)
def test_layouts_are_equal_to_one_process(name):
    config = _config(parallel=LAYOUTS[name], train={"microbatches": 2}, recompute={"mode": "full"})
    verdict = check_run(config, steps=2)
    assert verdict.equal, verdict.text()
    assert verdict.largest < 1e-10
    assert f"{config.world_size} rank" in verdict.text() and "equal: " in verdict.text()


@pytest.mark.parametrize("name", small_or_sweep([*CONFIGS], ["llama", "gpt2"]))
def test_models_of_hugging_face_are_equal(name, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIGS[name]))
    model = {"hugging_face": str(path), "weights": "scratch"}
    verdict = check_run(_config(model=model, parallel={"dp_shard": 2, "tp": 2}), steps=2)
    assert verdict.equal, verdict.text()
    assert verdict.largest < 1e-4  # norms and losses of transformers are computed in float32


def test_adapters_are_equal_and_found(tmp_path):
    model = {"name": "llama-1b", "weights": str(tmp_path), "lora": {"rank": 4}}
    config = _config(model=model, parallel={"dp_shard": 2, "tp": 2})
    verdict = check_run(config, steps=3)
    assert verdict.equal, verdict.text()

    def tamper(run):
        parameter = next(one for name, one in run.named_parameters() if "lora" in name)
        if get_platform().get_rank() == 2:
            get_platform().set_grad(parameter, get_platform().get_grad(parameter) + 1)

    assert "lora" in check_run(config, steps=1, tamper=tamper).first.name


def test_the_reference_is_plain_training_on_one_device(tmp_path):
    """The numbers that all layouts are compared with are those of PyTorch alone."""
    import torch

    config, length = shrink(_config(), 1)
    config = one_process(config)
    data = ShortData(hp.data.open_data(config.data, seed=0), length, 64)
    (found,) = hp.testing.threads(1).run(reference, config, data, 2)
    model = hp.models.Llama(LlamaConfig(**config.model.args)).double()
    with hp.deferred_init():
        deferred = hp.models.Llama(LlamaConfig(**config.model.args)).double()
    hp.manual_seed(0)
    model.load_state_dict(hp.materialize(deferred).state_dict())
    optimizer = torch.optim.AdamW(
        [
            {"params": [one for name, one in model.named_parameters() if one.ndim > 1 and "embed" not in name]},
            {"params": [one for name, one in model.named_parameters() if one.ndim == 1 or "embed" in name]},
        ],
        lr=config.optimizer.lr,
        betas=config.optimizer.betas,
        eps=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
    )
    optimizer.param_groups[1]["weight_decay"] = 0.0
    order = iter(data.order(batch=config.train.batch, seed=0))
    for step in (1, 2):
        batch = data.collate(next(order))
        ids, labels = (torch.from_numpy(batch[name]) for name in ("input_ids", "labels"))
        loss = torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())
        loss.backward()
        assert float(found[f"{step}/loss"]) == pytest.approx(loss.item(), rel=1e-12)
        for name, one in model.named_parameters():
            np.testing.assert_allclose(found[f"{step}/gradient/{name}"], one.grad.numpy(), rtol=1e-9, atol=1e-14)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        assert float(found[f"{step}/norm"]) == pytest.approx(norm.item(), rel=1e-12)
        optimizer.step()
        optimizer.zero_grad()
    for name, one in model.named_parameters():
        np.testing.assert_allclose(found[f"weight/{name}"], one.detach().numpy(), rtol=1e-9, atol=1e-14)


# ---- what is wrong is found ----

_VICTIM = "blocks.1.feed_forward.gate.weight"


def _doubles(rank):
    def tamper(run):
        parameter = dict(run.named_parameters())[_VICTIM]
        if rank is None or get_platform().get_rank() == rank:
            get_platform().set_grad(parameter, get_platform().get_grad(parameter) * 2)

    return tamper


@pytest.mark.parametrize("degrees", [{"dp_shard": 2, "tp": 2}, {"dp_replicate": 2}])
def test_a_gradient_that_is_doubled_on_one_rank_is_found_by_name(degrees):
    verdict = check_run(_config(parallel=degrees), steps=2, tamper=_doubles(1))
    assert not verdict.equal
    assert (verdict.first.name, verdict.ranks_of(verdict.first.name)) == (f"1/gradient/{_VICTIM}", [1])
    assert f"different: the gradient of {_VICTIM} in step 1, on rank 1: off by " in verdict.text()
    assert "likely: exactly 2 times what one process has; the other ranks are right" in verdict.text()


def test_a_gradient_that_is_summed_once_too_often_names_the_axis():
    verdict = check_run(_config(parallel={"tp": 2}), steps=1, tamper=_doubles(None))
    assert f"the gradient of {_VICTIM} in step 1, on every rank" in verdict.text()
    assert "exactly 2 times too large: summed over tp of which each had the whole" in verdict.text()


def test_a_gradient_that_does_not_come_is_found():
    def tamper(run):
        get_platform().set_grad(dict(run.named_parameters())[_VICTIM], None)

    verdict = check_run(_config(parallel={"tp": 2}), steps=1, tamper=tamper)
    assert verdict.first.name == f"1/gradient/{_VICTIM}"
    assert "nothing arrives there" in verdict.text()


def test_a_weight_that_is_not_the_same_on_all_ranks_is_found():
    def tamper(run):
        if get_platform().get_rank() == 1 and run.step == 2:
            with get_platform().no_grad():
                dict(run.named_parameters())["norm.weight"].add_(1e-5)

    verdict = check_run(_config(parallel={"dp_replicate": 2}), steps=2, tamper=tamper)
    assert verdict.first.name == "weight/norm.weight" and verdict.ranks_of("weight/norm.weight") == [1]
    assert "the weight norm.weight after the last step, on rank 1" in verdict.text()


def test_the_parameter_nearest_to_the_loss_is_named_first():
    names = ["1/gradient/blocks.0.w", "1/gradient/head.w", "2/loss", "weight/head.w"]
    found = [Difference(name, rank, 1.0) for rank in (0, 1) for name in names]
    verdict = Verdict("title", 2, 2, {"tp": 2}, 1, 10, 1.0, found)
    assert verdict.first.name == "1/gradient/head.w"
    assert "and 3 more numbers differ" in verdict.text()


# ---- how it is shrunk ----


def test_sizes_shrink_and_stay_as_odd():
    config, length = shrink(_config(parallel={"tp": 3}, train={"batch": 100}), 3)
    sizes = LlamaConfig(**config.model.args)
    given = model_size("llama-1b")
    assert sizes.num_heads // sizes.num_kv_heads == given.num_heads // given.num_kv_heads
    for name in ("vocab_size", "hidden_dim", "num_kv_heads"):
        assert getattr(sizes, name) % 3 == getattr(given, name) % 3, name
    assert sizes.tie_head and sizes.num_blocks == 2 and sizes.rope_base == given.rope_base
    assert length % 3 == 100 % 3 and config.train.batch == 2
    assert config.train.dtype == "float64" and config.schedule.name == "constant"


def test_configs_of_hugging_face_shrink(tmp_path):
    path = tmp_path / "config.json"
    more = {"num_local_experts": 8, "eos_token_id": 1999, "layer_types": ["full_attention"] * 12, "hidden_act": "silu"}
    path.write_text(json.dumps({**CONFIGS["mixtral"], "num_hidden_layers": 12, "hidden_size": 1920, **more}))
    config, _ = shrink(_config(model={"hugging_face": str(path), "weights": "scratch"}), 1)
    assert config.model.args == {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "hidden_size": 16,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["full_attention"] * 2,
        "vocab_size": 64,
        "eos_token_id": 63,
    }


def test_a_part_of_each_head_that_turns_fits_a_small_head(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "gptj", "n_embd": 4096, "n_head": 16, "rotary_dim": 64, "n_layer": 2}))
    args = shrink(_config(model={"hugging_face": str(path), "weights": "scratch"}), 1)[0].model.args
    assert args == {"n_embd": 8, "n_head": 1, "rotary_dim": 8, "n_layer": 2}


def test_latent_heads_and_groups_of_experts_fit_each_other(tmp_path):
    path = tmp_path / "config.json"
    heads = {"num_attention_heads": 128, "num_key_value_heads": 128, "head_dim": 64, "qk_rope_head_dim": 64}
    experts = {"n_routed_experts": 256, "n_group": 8, "num_experts_per_tok": 8, "first_k_dense_replace": 3}
    path.write_text(json.dumps({"model_type": "deepseek_v3", "num_hidden_layers": 61, **heads, **experts}))
    args = shrink(_config(model={"hugging_face": str(path), "weights": "scratch"}), 1)[0].model.args
    assert args == {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "num_hidden_layers": 2,
        "n_routed_experts": 16,  # two in each of the groups
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,  # a block with experts is left
    }


def test_samples_keep_their_order_and_masks():
    data = hp.data.open_data(_config().data, seed=3)
    short = ShortData(data, 10, 7)
    assert list(next(iter(short.order(batch=9, seed=3)))) == list(next(iter(data.order(batch=9, seed=3))))
    sample, whole = short.sample(5), data.sample(5)
    assert sample.input_ids.tolist() == (whole.input_ids[:10] % 7).tolist()
    assert short.vocab_size == 7 and short.length == 10


def test_examples_run():
    for name in ("shrinking", "verdict"):
        assert doctest.testmod(importlib.import_module(f"hyper_parallel.trainer.check.{name}")).failed == 0


# ---- the command ----

_TOML = """
[model]
name = "llama-1b"
[data]
kind = "synthetic"
length = 64
isolate = false
[train]
steps = 10
batch = 4
[parallel]
tp = 2
"""


def test_the_command(tmp_path, monkeypatch):
    (tmp_path / "run.toml").write_text(_TOML)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["check", "run.toml", "--steps", "1", "--set", "train.seed=4"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith("check: Llama shrunk to ") and "\nequal: " in done.stdout
    room = importlib.import_module("hyper_parallel.trainer.check")
    wrong = Verdict("title", 2, 1, {"tp": 2}, 1, 3, 1.0, [Difference("1/loss", 0, 0.5), Difference("1/loss", 1, 0.5)])
    monkeypatch.setattr(room, "check_run", lambda config, **options: wrong)
    done = CliRunner().invoke(app, ["check", "run.toml"])
    assert done.exit_code == 1 and "different: the loss of step 1, on every rank" in done.stdout
    assert "the forward pass differs" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_a_model_that_cannot_be_split_is_told(tmp_path):
    (tmp_path / "run.toml").write_text(_TOML)
    done = CliRunner().invoke(app, ["check", str(tmp_path / "run.toml"), "--set", "parallel.ep=2"])
    assert done.exit_code == 2
    assert "parallel.ep: must be 1: llama-1b has no experts, got 2" in done.stderr


_NARROW = """
import torch
from torch import nn


class Narrow(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(2000, 8), nn.Linear(8, 2000)

    def forward(self, ids, labels):
        return nn.functional.cross_entropy(self.head(self.embedding(ids).float()).flatten(0, 1), labels.flatten())
"""


def test_a_model_that_fails_in_one_process_is_told_as_that(tmp_path, monkeypatch):
    (tmp_path / "narrow_model.py").write_text(_NARROW)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"Narrow fails in one process already, under no layout, in float64 .*dtype"):
        check_run(_config(model={"build": "narrow_model:Narrow"}), steps=1)
