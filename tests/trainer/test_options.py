"""What a config can ask of a run: schedules, groups, clipping, checkpoints, evaluation, errors, models of all kinds."""

from __future__ import annotations

import itertools
import json
import math
import shutil

import numpy as np
import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.checkpoint import CorruptCheckpointError
from hyper_parallel.data import open_data, open_validation
from hyper_parallel.trainer.config.sections.schedule import ScheduleConfig
from hyper_parallel.trainer.metrics import read_metrics
from hyper_parallel.trainer.optimizers import make_optimizer
from hyper_parallel.trainer.schedule import rate_factor
from tests.trainer.runs import plain_losses, run_config, steps_of, tiny_llama, train_on_threads
from tests.world import small_or_sweep

# ---- the learning rate ----


def _after_warmup(step, steps=40, warmup=10):
    return (step - warmup) / (steps - warmup)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("constant", lambda step: 1.0),
        ("linear", lambda step: 1.0 - 0.9 * _after_warmup(step)),
        ("cosine", lambda step: 0.1 + 0.45 * (1 + math.cos(math.pi * _after_warmup(step)))),
        ("wsd", lambda step: 1.0 if step <= 32 else 1.0 - 0.9 * (step - 32) / 8),
    ],
)
def test_schedules_are_their_closed_forms(name, shape):
    config = ScheduleConfig(name=name, warmup=10)
    for step in range(1, 41):
        expected = step / 10 if step <= 10 else shape(step)
        assert rate_factor(config, step, 40) == pytest.approx(expected, rel=1e-12), step
    assert rate_factor(ScheduleConfig(name=name), 1, 1) == (1.0 if name == "constant" else pytest.approx(0.1))


# ---- what decays, and clipping ----


def test_names_and_vectors_that_do_not_decay(tmp_path):
    config = run_config(tmp_path, optimizer={"no_decay": ("*embed*", "*.key.*"), "weight_decay": 0.3})
    model = tiny_llama()
    decays, stays = make_optimizer(config.optimizer, model.named_parameters()).param_groups
    names = {id(one): name for name, one in model.named_parameters()}
    assert (decays["weight_decay"], stays["weight_decay"]) == (0.3, 0.0)
    assert {names[id(one)] for one in stays["params"]} == {
        *("embedding.weight", "norm.weight"),
        *(
            f"blocks.{block}.{name}"
            for block in (0, 1)
            for name in ("attention_norm.weight", "feed_forward_norm.weight")
        ),
        *(f"blocks.{block}.attention.key.weight" for block in (0, 1)),
    }


@pytest.mark.parametrize("clip", [0.01, "none"])
def test_clipping_by_sgd(tmp_path, clip):
    """SGD moves by the gradient, so a clipped one is seen in the weights."""
    plain = {"name": "sgd", "lr": 1.0, "weight_decay": 0.0, "eps": 1e-8}
    config = run_config(
        tmp_path, "dp_shard", optimizer=plain, schedule={"name": "constant", "warmup": 0},
        train={"steps": 2, "clip_norm": clip}, checkpoint={"every": 1},
    )  # fmt: skip
    losses = train_on_threads(config).losses
    model, data = tiny_llama(), open_data(config.data, seed=0)
    order = data.order(batch=5, seed=0)
    for step in (1, 2):
        batch = data.collate(order.numbers(5 * step - 5, 5))
        loss = model(torch.from_numpy(batch["input_ids"]), torch.from_numpy(batch["labels"]))
        assert losses[step] == pytest.approx(loss.item(), rel=1e-11)
        model.zero_grad()
        loss.backward()
        if clip != "none":
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        with torch.no_grad():
            for one in model.parameters():
                one -= one.grad


# ---- checkpoints ----


def _steps_kept(folder):
    return sorted(int(path.name.removeprefix("step-")) for path in (folder / "checkpoints").iterdir())


def test_the_newest_and_chosen_checkpoints_stay(tmp_path):
    train_on_threads(run_config(tmp_path, checkpoint={"every": 1, "keep_last": 2, "keep_every": 3}, train={"steps": 8}))
    assert _steps_kept(tmp_path) == [3, 6, 7, 8]


def test_where_a_run_goes_on(tmp_path):
    straight = train_on_threads(run_config(tmp_path, checkpoint={"every": 2, "keep_last": 9})).losses
    anew = train_on_threads(run_config(tmp_path, "tp", checkpoint={"resume": "never", "folder": str(tmp_path / "new")}))
    assert anew.losses == pytest.approx(straight, rel=1e-11)
    from_there = {"resume": str(tmp_path / "checkpoints" / "step-4"), "folder": str(tmp_path / "other")}
    again = train_on_threads(run_config(tmp_path, "dp_shard", checkpoint=from_there))
    assert again.losses == pytest.approx({step: straight[step] for step in (5, 6)}, rel=1e-11)
    done = train_on_threads(run_config(tmp_path))
    assert (done.status, done.step, done.losses) == ("finished", 6, {})


def test_damaged_checkpoints_are_told(tmp_path, capsys):
    """Where a file is cut, the one before is taken; where only its content says so, the error names that one."""
    straight = train_on_threads(run_config(tmp_path, checkpoint={"every": 2, "keep_last": 9})).losses
    newest = tmp_path / "checkpoints" / "step-6"
    (file,) = newest.glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-100])
    again = train_on_threads(run_config(tmp_path, checkpoint={"folder": str(tmp_path / "checkpoints")}))
    assert again.losses == pytest.approx({step: straight[step] for step in (5, 6)}, rel=1e-11)
    assert (
        f"not whole, and passed over: {newest}; the run goes on from {newest.parent / 'step-4'}"
        in capsys.readouterr().out
    )
    (file,) = newest.glob("*.safetensors")
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CorruptCheckpointError, match=r'To go on from the one before write .*resume = ".*step-4"'):
        train_on_threads(run_config(tmp_path))


def test_a_resumed_run_has_the_options_of_its_config(tmp_path):
    """Not those that the checkpoint was saved with; moments go on."""

    def changed(step, optimizer):
        if step == 5:
            decays, stays = optimizer.param_groups
            both = decays["params"] + stays["params"]
            decays["params"] = [one for one in both if one.ndim > 1]  # the embedding too
            stays["params"] = [one for one in both if one.ndim == 1]
            decays["weight_decay"] = 0.5
            for group in optimizer.param_groups:
                group.update(betas=(0.5, 0.6), eps=1e-4)

    train_on_threads(run_config(tmp_path, checkpoint={"every": 4}, train={"steps": 6}))
    shutil.rmtree(tmp_path / "checkpoints" / "step-6")
    asked = {"weight_decay": 0.5, "betas": (0.5, 0.6), "eps": 1e-4, "no_decay": ("*norm*",)}
    config = run_config(tmp_path, "tp", optimizer=asked)
    want = plain_losses(config, 6, before=changed)
    assert train_on_threads(config).losses == pytest.approx({step: want[step] for step in (5, 6)}, rel=1e-9)


def test_a_loss_that_is_no_number_ends_the_run_with_its_samples(tmp_path):
    huge = {"optimizer": {"lr": 1e300}, "schedule": {"name": "constant", "warmup": 0}, "train": {"clip_norm": "none"}}
    with pytest.raises(FloatingPointError, match=r"step \d has a loss of nan and a gradient .* Lower optimizer.lr"):
        train_on_threads(run_config(tmp_path, "dp_shard", **huge))
    assert not (tmp_path / "checkpoints").exists()


# ---- evaluation ----


def test_evaluation_is_the_mean_over_the_targets_that_were_set_apart(tmp_path):
    (tmp_path / "text.txt").write_bytes(np.random.default_rng(0).integers(32, 127, 40 * 16 + 1).astype("u1").tobytes())
    data = {"kind": "text", "path": str(tmp_path / "text.txt"), "cache": str(tmp_path / "cache"), "length": 16}
    sections = {"data": {**data, "validation": 0.2}, "eval": {"every": 2, "samples": 7}, "train": {"steps": 3}}
    for degrees in ("one", "dp_shard x tp"):
        train_on_threads(run_config(tmp_path / degrees, degrees, **sections, checkpoint={"every": 2, "keep_last": 9}))
    seen = [
        {line["step"]: line["loss"] for line in read_metrics(tmp_path / one) if line["event"] == "eval"}
        for one in ("one", "dp_shard x tp")
    ]
    assert seen[0].keys() == {2, 3}
    assert seen[0] == pytest.approx(seen[1], rel=1e-11)
    held = open_validation(run_config(tmp_path, **sections).data, seed=0).collate(np.arange(7))
    model = tiny_llama()
    state = {"model": model.state_dict()}
    hp.checkpoint.load(state, checkpoint_id=tmp_path / "one" / "checkpoints" / "step-2", no_dist=True)
    with torch.no_grad():
        expected = model(torch.from_numpy(held["input_ids"]), torch.from_numpy(held["labels"])).item()
    assert seen[0][2] == pytest.approx(expected, rel=1e-11)


# ---- precision and recomputation ----


def test_recomputed_blocks_give_the_same_curve(tmp_path):
    config = run_config(tmp_path, "dp_shard", recompute={"mode": "full"}, train={"steps": 3})
    assert train_on_threads(config).losses == pytest.approx(plain_losses(config, 3), rel=1e-11)


def test_bfloat16_is_computed_and_float32_kept(tmp_path):
    config = run_config(
        tmp_path, "dp_shard", train={"dtype": "float32", "steps": 4}, precision={"compute": "bfloat16"},
        checkpoint={"every": 4},
    )  # fmt: skip
    losses = train_on_threads(config).losses
    exact = plain_losses(config, 4, tiny_llama(torch.float32))
    assert losses == pytest.approx(exact, rel=2e-3)
    assert losses != pytest.approx(exact, rel=1e-7)
    saved = hp.checkpoint.read_metadata(tmp_path / "checkpoints" / "step-4").state_dict_metadata
    assert str(saved["model.head.weight"].properties.dtype).endswith("float32")


# ---- models of one's own ----

OWN = """
import torch
import hyper_parallel as hp


def labelled(sizes):
    return hp.models.Llama(hp.models.LlamaConfig(**sizes))


class Logits(torch.nn.Module):
    def __init__(self, sizes):
        super().__init__()
        self.inner = labelled(sizes)

    def init_weights(self):
        self.inner.init_weights()

    def forward(self, tokens):
        return self.inner(tokens)


def without_labels(sizes):
    return Logits(sizes)


def no_model(sizes):
    return sizes


class Steep(Logits):
    def forward(self, tokens):
        logits = self.inner(tokens)
        return logits + (logits * 0).sum().sqrt()  # 0, with a slope that is no number


def steep(sizes):
    return Steep(sizes)
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_models.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))

    def config(name, degrees="one", **sections):
        sizes = run_config(tmp_path).model.args
        model = {"name": None, "build": f"own_models:{name}", "args": {"sizes": sizes}}
        return run_config(tmp_path / name, degrees, model=model, train={"steps": 3}, **sections)

    return config


@pytest.mark.parametrize("name", ["labelled", "without_labels"])
@pytest.mark.parametrize("degrees", ["one", "dp_shard x tp"])
def test_a_model_of_ones_own(own, name, degrees):
    config = own(name, degrees)
    assert train_on_threads(config).losses == pytest.approx(plain_losses(config, 3), rel=1e-11)


def test_a_function_that_builds_no_model(own):
    with pytest.raises(TypeError, match=r"model.build: own_models:no_model returned a dict, not a model"):
        train_on_threads(own("no_model"))


def test_a_gradient_that_is_no_number_ends_the_run_before_it_is_saved(own, tmp_path):
    with pytest.raises(FloatingPointError, match=r"step 1 has a loss of [\d.]+ and a gradient norm of nan, on every"):
        train_on_threads(own("steep", "dp_shard", checkpoint={"every": 1}))
    assert not (tmp_path / "steep" / "checkpoints").exists()


# ---- Hugging Face ----

TALKS = [
    {"messages": [{"role": "user", "content": f"What is {n}?"}, {"role": "assistant", "content": f"A number, {n}."}]}
    for n in range(40)
]


@pytest.fixture
def hugging_face(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    (tmp_path / "talks.jsonl").write_text("".join(json.dumps(one) + "\n" for one in TALKS))
    data = {"kind": "chat", "path": str(tmp_path / "talks.jsonl"), "cache": str(tmp_path / "cache"), "length": 96}

    def make(degrees="one", weights=None, args=None, **sections):
        model = {"name": None, "args": args or {}, "hugging_face": str(tmp_path / "base")}
        model["weights"] = weights or str(tmp_path / "base")
        sections = {"data": {**data, **sections.pop("data", {})}, **sections}
        train = {"dtype": "float32", "steps": 3, "batch": 4}
        return run_config(tmp_path / f"run {degrees}", degrees, model=model, train=train, **sections)

    return make


@pytest.mark.parametrize("packing", small_or_sweep([True, False], [True]))
def test_fine_tuning_on_conversations(tmp_path, hugging_face, packing):
    """Against transformers' own model, one conversation at a time: packed ones do not see each other."""
    import transformers

    config = hugging_face(data={"packing": packing}, checkpoint={"export_hugging_face": True})
    losses = train_on_threads(config).losses
    data = open_data(config.data, seed=0)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    batch = data.collate(data.order(batch=4, seed=0).numbers(0, 4))
    total, count = 0.0, 0
    with torch.no_grad():
        rows = batch["input_ids"], batch["labels"], batch.get("position_ids", [np.arange(96)] * 4)
        for ids, labels, positions in zip(*rows, strict=True):
            starts = [*np.flatnonzero(positions == 0), len(ids)]
            for begin, end in itertools.pairwise(starts):
                logits = model(torch.from_numpy(ids[None, begin:end])).logits[0]
                targets = torch.from_numpy(labels[begin:end])
                total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum").item()
                count += int((targets != -100).sum())
    assert losses[1] == pytest.approx(total / count, rel=1e-5)
    assert steps_of(tmp_path / "run one")[0]["tokens"] == count
    for degrees in ("dp_shard x tp", "cp"):
        other = train_on_threads(hugging_face(degrees, data={"packing": packing})).losses
        assert other == pytest.approx(losses, rel=1e-5), degrees
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "run one" / "hugging_face")
    assert not torch.equal(opened.lm_head.weight, model.lm_head.weight)


def test_from_scratch_with_values_of_the_config_that_differ(tmp_path, hugging_face):
    config = hugging_face("dp_shard", weights="scratch", args={"num_hidden_layers": 1}, data={"packing": False})
    losses = train_on_threads(config).losses
    assert losses[1] == pytest.approx(math.log(256), rel=0.02)  # transformers' small first values: all tokens alike
    saved = hp.checkpoint.read_metadata(tmp_path / "run dp_shard" / "checkpoints" / "step-3").state_dict_metadata
    layers = {name.split(".")[3] for name in saved if name.startswith("model.model.layers.")}
    assert layers == {"0"}
