"""Hugging Face's models without memory: filled as their classes define, with the same bits under every layout."""

from __future__ import annotations

import pytest
import torch

import hyper_parallel as hp
from hyper_parallel.testing import threads
from tests.world import run_on_ranks

transformers = pytest.importorskip("transformers", reason='an extra: pip install "hyper-parallel[transformers]"')

only_on = "torch"  # models of transformers, which are PyTorch's
_DECODER = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2 = {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "eos_token_id": 2}
_BERT = {name: value for name, value in _DECODER.items() if name != "num_key_value_heads"}
CASES = {
    "llama": ("Llama", "ForCausalLM", {**_DECODER, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3", "ForCausalLM", {**_DECODER, "head_dim": 8}),
    "gpt2": ("GPT2", "LMHeadModel", {**_GPT2, "bos_token_id": 1}),
    "gemma3": ("Gemma3", "ForCausalLM", {**_DECODER, "head_dim": 8, "sliding_window": 8}),
    "mixtral": ("Mixtral", "ForCausalLM", {**_DECODER, "num_local_experts": 3}),
    "bert": ("Bert", "ForMaskedLM", _BERT),
}


def _build(name):
    family, kind, sizes = CASES[name]
    config_name = f"{family}TextConfig" if family == "Gemma3" else f"{family}Config"
    return getattr(transformers, family + kind)(getattr(transformers, config_name)(**sizes))


def _deferred(name):
    with hp.deferred_init():
        return _build(name)


def _whole(model):
    return {name: _whole_of(one) for name, one in [*model.named_parameters(), *model.named_buffers()]}


def _whole_of(tensor):
    return (tensor.full_tensor() if isinstance(tensor, hp.DTensor) else tensor).detach()


def _same(got, want):
    assert list(got) == list(want)
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def test_a_tied_embedding_keeps_its_row_for_padding_on_every_stage():
    hp.manual_seed(0)
    weight = hp.materialize(_deferred("llama")).lm_head.weight.detach()
    assert not weight[0].any() and weight[1:].all()
    assert not _build("llama").lm_head.weight[0].any()

    def stages():
        run = hp.parallelize(_deferred("llama"), pp=2, microbatches=2).materialize(seed=0)
        return _whole_of(dict(run.named_parameters())["model.embed_tokens.weight"])

    for found in threads(2).run(stages):
        assert torch.equal(found, weight)


@pytest.mark.parametrize("name", CASES)
def test_the_distribution_of_the_eager_model(name):
    torch.manual_seed(0)
    hp.manual_seed(0)
    state = torch.get_rng_state()
    model = hp.materialize(_deferred(name))
    assert torch.equal(torch.get_rng_state(), state)
    eager = _build(name)
    assert [key for key, _ in model.named_parameters()] == [key for key, _ in eager.named_parameters()]
    for (path, made), built in zip(model.named_parameters(), eager.parameters(), strict=True):
        spread = built.std().item() if built.numel() > 1 else 0.0
        assert abs(made.std().item() - spread) <= 0.2 * spread, (path, made.std(), spread)
        assert abs(made.mean().item() - built.mean().item()) <= 0.2 * spread, path
    for (path, made), built in zip(model.named_buffers(), eager.buffers(), strict=True):
        assert torch.equal(made, built), path
    ids = torch.arange(12).reshape(2, 6) + 3
    with torch.no_grad():
        assert model.eval()(ids).logits.isfinite().all()
    assert (model.get_output_embeddings().weight is model.get_input_embeddings().weight) == (
        eager.get_output_embeddings().weight is eager.get_input_embeddings().weight
    )


@run_on_ranks(2)
@pytest.mark.parametrize("name", CASES)
def test_same_bits_under_every_layout(name):
    hp.manual_seed(3)
    want = _whole(hp.materialize(_deferred(name)))
    after = hp.get_platform().get_rank(), hp.rand((2,), hp.init_device_mesh("cpu", (2,))).full_tensor()
    mesh = hp.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for sequence_parallel in (False, True):
        model = _deferred(name)
        hp.parallelize_module(model, mesh, hp.plans.for_model(model, sequence_parallel=sequence_parallel))
        hp.manual_seed(3)
        _same(_whole(hp.materialize(model)), want)
        assert torch.equal(hp.rand((2,), hp.init_device_mesh("cpu", (2,))).full_tensor(), after[1])
    model = _deferred(name)
    for block in next(inner for inner in model.modules() if isinstance(inner, torch.nn.ModuleList)):
        hp.fully_shard(block, mesh=mesh)
    hp.fully_shard(model, mesh=mesh)
    hp.manual_seed(3)
    _same(_whole(hp.materialize(model)), want)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_same_bits_after_blocks_were_removed(name):
    hp.manual_seed(3)
    want = _whole(hp.materialize(_deferred(name)))
    model = _deferred(name)
    hp.number_initial_values(model)
    body = model.model if name == "llama" else model.transformer
    blocks = "layers" if name == "llama" else "h"
    setattr(body, blocks, getattr(body, blocks)[1:])
    hp.manual_seed(3)
    got = _whole(hp.materialize(model))
    renamed = {key.replace(f"{blocks}.0.", f"{blocks}.1."): value for key, value in got.items()}
    assert set(renamed) < set(want)
    for key, value in renamed.items():
        assert torch.equal(value, want[key]), key
