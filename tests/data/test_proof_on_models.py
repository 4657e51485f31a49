"""The proof on Hugging Face models: which spelling isolates in which, and that their loss is over what is trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hyper_parallel.data import Sample, collate, prove_loss_mask, prove_packing, spell

transformers = pytest.importorskip("transformers", reason="the models are transformers'")

_VOCAB = 97
_SIZES = {
    "vocab_size": _VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_SMALL = {"vocab_size": _VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_MODELS = {
    "llama": _SIZES,
    "qwen3": {**_SIZES, "head_dim": 8},
    "gemma3_text": {**_SIZES, "head_dim": 8, "sliding_window": 4},
    "phi3": {**_SIZES, "pad_token_id": 0},
    "gpt2": {"vocab_size": _VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": _SIZES,
    "opt": {**_SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64},
    "falcon": _SMALL,
    "bloom": {"vocab_size": _VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mamba": {"vocab_size": _VOCAB, "hidden_size": 32, "num_hidden_layers": 2},
}


def _made(kind, dtype=torch.float64):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **_MODELS[kind])
    model = transformers.AutoModelForCausalLM.from_config(config).eval().to(dtype)
    for parameter in model.parameters():  # the usual start is so even that leaks are small
        torch.nn.init.normal_(parameter, std=0.2)

    def tensors(batch):
        return {name: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for name, v in batch.items()}

    def logits(batch):
        with torch.no_grad():
            return model(**tensors(batch), use_cache=False).logits.to(torch.promote_types(dtype, torch.float32)).numpy()

    def loss(batch, **more):
        with torch.no_grad():
            return float(model(**tensors({**batch, **more}), use_cache=False).loss)

    return logits, loss


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3_text", "phi3", "gpt2", "gpt_neox"])
def test_positions_isolate(kind):
    assert prove_packing(_made(kind)[0], vocab_size=_VOCAB, tolerance=1e-9).spelling == "position_ids"


@pytest.mark.parametrize("kind", ["opt", "falcon"])
def test_a_mask_isolates_where_positions_leak(kind):
    proof = prove_packing(_made(kind)[0], vocab_size=_VOCAB, tolerance=1e-9)
    assert proof.spelling == "attention_mask"
    assert proof.found["position_ids"].startswith("leaks")


@pytest.mark.parametrize("kind", ["bloom", "mamba"])
def test_nothing_isolates(kind):
    with pytest.raises(ValueError, match="packed documents see each other, whichever way it is told where they begin"):
        prove_packing(_made(kind)[0], vocab_size=_VOCAB)


def test_a_mask_loses_a_sliding_window():
    with pytest.raises(ValueError, match="attention_mask: isolates, but the logits are"):
        prove_packing(_made("gemma3_text")[0], vocab_size=_VOCAB, spellings=("attention_mask",))


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi3", "gpt2", "gpt_neox"])
def test_a_mask_isolates_where_there_is_no_window(kind):
    prove_packing(_made(kind)[0], vocab_size=_VOCAB, spellings=("attention_mask",), tolerance=1e-9)


def test_rounding_hides_no_leak():
    """In bfloat16 the leak of Mamba is smaller than the tolerance that rounding needs."""
    prove_packing(_made("llama", torch.bfloat16)[0], vocab_size=_VOCAB, tolerance=0.03)
    with pytest.raises(ValueError, match=r"position_ids: leaks, .* by \d\.\de-0[23] of the largest"):
        prove_packing(_made("mamba", torch.bfloat16)[0], vocab_size=_VOCAB, tolerance=0.03)


def test_a_packed_batch_with_padding_is_as_its_documents_one_by_one():
    logits, _ = _made("llama")
    rng = np.random.default_rng(0)
    documents = [Sample.of_tokens(rng.integers(0, _VOCAB, size)) for size in (5, 9, 4)]
    batch = collate([Sample.of_documents(documents[:2]), Sample.of_documents(documents[2:])])
    got = logits({name: array for name, array in spell(batch, "position_ids").items() if name != "labels"})
    for row, start, document in ((0, 0, documents[0]), (0, 4, documents[1]), (1, 0, documents[2])):
        alone = logits({"input_ids": document.input_ids[None]})[0]
        np.testing.assert_allclose(got[row, start : start + len(alone)], alone, atol=1e-10)


def test_the_loss_of_a_model_is_over_the_trained_tokens_if_labels_are_not_shifted_twice():
    logits, loss = _made("llama")
    rng = np.random.default_rng(0)
    rows = [Sample.of_tokens(rng.integers(0, _VOCAB, size), rng.random(size) < 0.5) for size in (9, 6)]
    batch = collate(rows)
    assert batch.num_padding == 3
    prove_loss_mask(logits, lambda batch: loss(batch, shift_labels=batch["labels"]), batch)
    with pytest.raises(ValueError, match="the model shifts them once more; give them as shift_labels too"):
        prove_loss_mask(logits, loss, batch)
