"""LoRA: the same numbers as adapters written by hand on one device, under every layout; what is saved and exported."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from safetensors.torch import load_file

import hyper_parallel as hp
from hyper_parallel.testing import threads
from tests.trainer.runs import SIZES, run_config, steps_of, train_on_threads
from tests.world import small_or_sweep

TARGETS = ("*attention.*", "*feed_forward.*")
IDS = torch.randint(0, 256, (5, 16), generator=torch.Generator().manual_seed(0))
LAYOUTS = {
    "": 1,
    "dp_shard=2": 2,
    "dp_replicate=2": 2,
    "tp=2": 2,
    "cp=2": 2,
    "dp_shard=2, tp=2": 4,
    "cp=2, tp=2": 4,
    "pp=2": 2,
    "pp=2, tp=2": 4,
}


def alone(program):
    """A world of one rank."""
    return threads(1).run(program)[0]


def with_adapters(dropout=0.0):
    hp.manual_seed(3)
    with hp.deferred_init():
        model = hp.models.Llama(hp.models.LlamaConfig(**SIZES)).double()
        hp.add_lora(model, rank=3, alpha=6.0, dropout=dropout, targets=TARGETS)
    return model


class ByHand(torch.nn.Module):
    """A linear layer with an adapter, in plain PyTorch."""

    def __init__(self, layer):
        super().__init__()
        self.weight = layer.weight.detach().clone()
        self.down = torch.nn.Parameter(layer.lora_A.detach().clone())
        self.up = torch.nn.Parameter(layer.lora_B.detach().clone())

    def forward(self, x):
        return x @ self.weight.T + (x @ self.down.T @ self.up.T) * (6.0 / 3)


def losses_by_hand(steps=4):
    model = hp.materialize(with_adapters()).requires_grad_(False)
    modules = dict(model.named_modules())
    for path, layer in modules.items():
        if hasattr(layer, "lora_A"):
            around, _, name = path.rpartition(".")
            setattr(modules[around], name, ByHand(layer))
    trained = [one for one in model.parameters() if one.requires_grad]
    assert len(trained) == 2 * 2 * 7
    return _train(lambda: model(IDS, IDS), trained, steps, lambda: torch.nn.utils.clip_grad_norm_(trained, 1.0))


def _train(loss_of, trained, steps, clip):
    optimizer = torch.optim.AdamW(trained, lr=1e-2, eps=1e-6)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of()
        if loss.requires_grad:
            loss.backward()
        norm = clip()
        optimizer.step()
        seen += [loss.item(), (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()]
    return seen


def losses_of(degrees, dropout=0.0, **options):
    run = hp.parallelize(with_adapters(dropout), degrees or None, **options).materialize()
    samples = run.mine(range(len(IDS)))
    mine = IDS[samples.start : samples.stop]
    trained = [one for one in run.parameters() if one.requires_grad]
    seen = _train(lambda: run.forward_backward(mine, labels=mine), trained, 4, lambda: run.clip_grad_norm_(1.0))
    names = {name for name, one in run.named_parameters() if one.grad is not None}
    assert len(names) == 2 * 2 * 7 // run.degrees.sizes["pp"]
    assert all(name.rpartition(".")[2] in ("lora_A", "lora_B") for name in names)
    return seen


OPTIONS = ({}, {"recompute": "full"}, {"microbatches": 2})
ALL = list(itertools.product(LAYOUTS, OPTIONS))
SMALL = [(degrees, {}) for degrees in [*list(LAYOUTS)[:-2:2], "pp=2"]] + [
    ("dp_shard=2, tp=2", options) for options in OPTIONS[1:]
]


@pytest.mark.parametrize("case", small_or_sweep(ALL, SMALL), ids=str)
def test_every_layout_trains_as_adapters_written_by_hand(case):
    degrees, options = case
    expected = losses_by_hand()
    for seen in threads(LAYOUTS[degrees]).run(losses_of, degrees, **options):
        assert seen == pytest.approx(expected, rel=1e-9)


def test_dropout_is_the_same_under_every_layout():
    expected = threads(1).run(losses_of, "", 0.5)[0]
    assert expected[2:] != pytest.approx(losses_by_hand()[2:], rel=1e-4)
    for degrees in ("dp_shard=2, tp=2", "cp=2"):
        assert threads(LAYOUTS[degrees]).run(losses_of, degrees, 0.5)[0] == pytest.approx(expected, rel=1e-9)


def test_under_tp_adapters_are_sharded_with_their_weights_and_cost_no_other_collective():
    def program():
        run = hp.parallelize(with_adapters(), tp=2).materialize()
        attention = run.model.blocks[0].attention
        placements = [one.placements[-1] for one in (attention.query.lora_A, attention.query.lora_B)]
        placements += [one.placements[-1] for one in (attention.output.lora_A, attention.output.lora_B)]
        with hp.CommRecorder() as seen:
            run.forward_backward(IDS, labels=IDS)
        plain = hp.parallelize(hp.models.Llama(hp.models.LlamaConfig(**SIZES)).double(), tp=2)
        with hp.CommRecorder() as without:
            plain.forward_backward(IDS, labels=IDS)
        return placements, sum(seen.counts.values()), sum(without.counts.values())

    placements, number, without = threads(2).run(program)[0]
    assert placements == [hp.Replicate(), hp.Shard(0), hp.Shard(1), hp.Replicate()]
    # One for the gradient of each of the 14 whole parameters of adapters, 7 a block.
    assert number <= without + 14


def test_a_model_with_memory_computes_what_it_did_and_has_equal_adapters_on_all_ranks():
    def program():
        torch.manual_seed(0)
        model = hp.models.Llama(hp.models.LlamaConfig(**SIZES)).double()
        before = model(IDS)
        assert "blocks.1.feed_forward.up" in hp.add_lora(model, rank=2, targets=["*.up", "head"])
        torch.testing.assert_close(model(IDS), before, rtol=0, atol=0)
        assert model.head.lora_A.abs().max() > 0
        return model.head.lora_A.detach().clone()

    first, second = threads(2).run(program)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_adapters_of_all_stages_are_saved(tmp_path):
    def program():
        model = hp.models.Llama(hp.models.LlamaConfig(**SIZES)).double()
        hp.add_lora(model, rank=2, targets=["blocks.0*.up", "blocks.1*.query"])
        hp.parallelize(model, pp=2, microbatches=2).save_adapters(tmp_path)

    threads(2).run(program)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == ["blocks.0.feed_forward.up", "blocks.1.attention.query"]
    names = {
        f"base_model.model.{path}.{name}.weight" for path in config["target_modules"] for name in ("lora_A", "lora_B")
    }
    assert set(load_file(tmp_path / "adapter_model.safetensors")) == names


# ---- mistakes ----


def test_mistakes():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.MultiheadAttention(4, 2))
    with pytest.raises(ValueError, match="no linear layer of Sequential is called 'q_proj'; their last names are 0, o"):
        hp.add_lora(model, rank=1, targets=["q_proj"])
    with pytest.raises(ValueError, match=r"'1.out_proj', a NonDyn.* is not called as one, so an adapter would not be"):
        hp.add_lora(model, rank=1, targets=["*"])
    hp.add_lora(model, rank=1, targets=["0"])
    with pytest.raises(ValueError, match="has adapters already"):
        hp.add_lora(model, rank=1, targets=["0"])
    with pytest.raises(ValueError, match="save_adapters: Linear has no adapters; add_lora adds them"):
        alone(lambda: hp.parallelize(torch.nn.Linear(2, 2)).save_adapters("nowhere"))
    mesh = hp.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",), rank_list=(0,), init_backend=False)
    split = hp.parallelize_module(torch.nn.Sequential(torch.nn.Linear(2, 2)), mesh, {"0": hp.ColwiseParallel()})
    with pytest.raises(ValueError, match="the model is split already; add adapters before it is parallelized"):
        hp.add_lora(split, rank=1)
    fused = torch.nn.Linear(4, 12)
    hp.add_lora(fused, rank=1)
    with pytest.raises(ValueError, match="the layer has an adapter, which is for the whole weight"):
        hp.parallelize_module(fused, mesh, hp.FusedColwiseParallel({"q": 4, "k": 4, "v": 4}))


def test_a_tied_weight_is_not_merged():
    model = hp.models.Llama(hp.models.LlamaConfig(**SIZES, tie_head=True))
    hp.add_lora(model, rank=1, targets=["head"])
    with pytest.raises(ValueError, match=r"the adapter of 'head' cannot be merged: its weight is also 'embedding.w"):
        alone(lambda: hp.parallelize(model).save_hugging_face("nowhere"))


# ---- the trainer ----


@pytest.fixture
def base(tmp_path):
    hp.manual_seed(7)
    with hp.deferred_init():
        model = hp.models.Llama(hp.models.LlamaConfig(**SIZES)).double()
    alone(lambda: hp.parallelize(model).materialize().save_hugging_face(tmp_path / "base"))
    return tmp_path / "base"


def lora_config(folder, base, degrees="one", steps=4, *, lora=None, **sections):
    model = {"weights": str(base), "lora": {"rank": 2, "alpha": 4.0, **(lora or {})}}
    return run_config(folder, degrees, model=model, train={"steps": steps}, **sections)


@pytest.mark.parametrize("save_frozen", small_or_sweep([True, False], [False]))
def test_a_run_across_layouts_is_the_straight_one(tmp_path, base, save_frozen):
    lora = {"save_frozen": save_frozen, "targets": TARGETS, "dropout": 0.1}
    constant = {"schedule": {"name": "constant"}}
    first = train_on_threads(lora_config(tmp_path / "run", base, "tp", steps=2, lora=lora, **constant)).losses
    again = train_on_threads(lora_config(tmp_path / "run", base, "dp_shard x tp", lora=lora, **constant)).losses
    straight = train_on_threads(lora_config(tmp_path / "constant", base, lora=lora, **constant)).losses
    assert {**first, **again} == pytest.approx(straight, rel=1e-9)
    assert len(steps_of(tmp_path / "run")) == 4
    saved = hp.checkpoint.read_metadata(tmp_path / "run" / "checkpoints" / "step-4")
    names = saved.state_dict_metadata
    assert any(name.endswith("lora_B") for name in names)
    assert ("model.head.weight" in names) == save_frozen
    assert not any(name.startswith("optimizer.state.head") for name in names)


def test_adapters_and_the_merged_model_are_exported(tmp_path, base):
    config = lora_config(tmp_path / "run", base, "dp_shard x tp", checkpoint={"export_hugging_face": True})
    train_on_threads(config)
    adapters = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    described = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert (described["peft_type"], described["r"], described["lora_alpha"]) == ("LORA", 2, 4.0)
    assert len(described["target_modules"]) == 14
    before, merged = (load_file(path / "model.safetensors") for path in (base, tmp_path / "run" / "hugging_face"))
    assert merged.keys() == before.keys()
    for name, weight in before.items():
        path = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        addition = 0.0
        if f"{path}A.weight" in adapters:
            addition = adapters[f"{path}B.weight"] @ adapters[f"{path}A.weight"] * 2.0
            assert addition.abs().max() > 0
        torch.testing.assert_close(merged[name], weight + addition, rtol=1e-12, atol=1e-14)


def test_a_pattern_that_no_layer_has_names_the_key(tmp_path, base):
    with pytest.raises(ValueError, match=r"model.lora.targets: add_lora: no linear layer of Llama is called '\*q_p"):
        train_on_threads(lora_config(tmp_path / "run", base, lora={"targets": ("*q_proj",)}))


def test_peft_opens_the_adapters_of_hugging_face_models(tmp_path):
    import peft
    import transformers

    sizes = {"vocab_size": 256, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    configs = [
        transformers.LlamaConfig(**sizes, intermediate_size=48, num_key_value_heads=2, max_position_embeddings=64),
        transformers.GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=4, n_positions=64),
    ]
    for number, config in enumerate(configs):
        base = tmp_path / f"base{number}"
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(base)
        targets = ("*proj*",) if number == 0 else ("*.c_attn", "*.c_fc")
        model = {"name": None, "args": {}, "hugging_face": str(base), "weights": str(base)}
        model["lora"] = {"rank": 2, "targets": targets}
        folder = tmp_path / f"run{number}"
        exported = {"export_hugging_face": True}
        train = {"dtype": "float32", "steps": 3}
        train_on_threads(run_config(folder, "dp_shard x tp", model=model, train=train, checkpoint=exported))
        merged = transformers.AutoModelForCausalLM.from_pretrained(folder / "hugging_face")
        adapted = peft.PeftModel.from_pretrained(
            transformers.AutoModelForCausalLM.from_pretrained(base), folder / "adapter"
        )
        with torch.no_grad():
            torch.testing.assert_close(adapted(IDS).logits, merged(IDS).logits, rtol=1e-5, atol=1e-5)
            assert (adapted(IDS).logits - adapted.get_base_model()(IDS).logits).abs().max() == 0
            with adapted.disable_adapter():
                assert (adapted(IDS).logits - merged(IDS).logits).abs().max() > 1e-3
