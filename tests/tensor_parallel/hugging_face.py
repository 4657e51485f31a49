"""Hugging Face models at toy size, from a config with random weights, for tests: nothing is downloaded.

Note [Double precision in code that asks for single]
The models compute norms, softmax, angles and the loss in float32 whatever their weights are, so runs in float64 agree
to 1e-7 only. Inside :func:`in_double` the models' files see float64 under the name ``float32``, for the plain and the
cut run alike, and the numbers can be compared to 1e-9.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch

import hyper_parallel as hp
from hyper_parallel.platform.shared.membership import belongs_to_rank

VOCABULARY = 37  # divides by neither 2 nor 4

_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
_BERT = {
    **{name: _DECODER[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")},
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.3,
}

_BART_SIDE = {"layers": 1, "attention_heads": 4, "ffn_dim": 24}

# name -> (class of the model, class of its config, sizes)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _DECODER),
    "llama_tied": ("LlamaForCausalLM", "LlamaConfig", {**_DECODER, "tie_word_embeddings": True}),
    "llama_odd_heads": (
        "LlamaForCausalLM",
        "LlamaConfig",
        {**_DECODER, "hidden_size": 12, "num_attention_heads": 3, "num_key_value_heads": 1, "intermediate_size": 10},
    ),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**_DECODER, "head_dim": 8, "tie_word_embeddings": True}),
    "qwen3_untied": ("Qwen3ForCausalLM", "Qwen3Config", {**_DECODER, "head_dim": 8}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**_DECODER, "sliding_window": 4}),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2),
    "bert": ("BertModel", "BertConfig", _BERT),
    "mixtral": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_DECODER, "num_local_experts": 3, "num_experts_per_tok": 2, "output_router_logits": True},
    ),
}

# Families that no list of ours names: their plans come from the structure.
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert_masked": ("BertForMaskedLM", "BertConfig", _BERT),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**_DECODER, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**_DECODER, "head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 4, "sliding_window_pattern": 2},
    ),
    "olmo2": ("Olmo2ForCausalLM", "Olmo2Config", _DECODER),
    "mixtral_without_balance": (
        "MixtralForCausalLM",
        "MixtralConfig",
        {**_DECODER, "num_local_experts": 3, "num_experts_per_tok": 2},
    ),
    "gpt2_dropout": ("GPT2LMHeadModel", "GPT2Config", {**_GPT2, **dict.fromkeys(_DROPOUTS, 0.1)}),
    "phi": (
        "PhiForCausalLM",
        "PhiConfig",
        {**_DECODER, "resid_pdrop": 0.0, "partial_rotary_factor": 0.5, "num_key_value_heads": 4},
    ),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        {
            **_DECODER,
            "num_key_value_heads": 4,
            "q_lora_rank": 6,
            "kv_lora_rank": 8,
            "qk_rope_head_dim": 4,
            "qk_nope_head_dim": 6,
            "v_head_dim": 5,
            "moe_intermediate_size": 10,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_experts_per_tok": 2,
            "first_k_dense_replace": 1,
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            **_DECODER,
            "head_dim": 8,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 10,
            "output_router_logits": True,
        },
    ),
    "qwen3_moe_without_balance": (
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        {
            **_DECODER,
            "head_dim": 8,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 10,
        },
    ),
    "olmoe": ("OlmoeForCausalLM", "OlmoeConfig", {**_DECODER, "num_experts": 5, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**_DECODER, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    ),
    "qwen3_next": (  # neither names nor sizes tell of its linear attention, but it declares it
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        {
            **_DECODER,
            "head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 4,
            "linear_value_head_dim": 4,
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 10,
            "shared_expert_intermediate_size": 10,
        },
    ),
    "phi3": ("Phi3ForCausalLM", "Phi3Config", {**_DECODER, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    "gpt_neox": (
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**_DECODER, "hidden_dropout": 0.0, "attention_dropout": 0.0},
    ),
    "opt": (
        "OPTForCausalLM",
        "OPTConfig",
        {**_DECODER, "ffn_dim": 24, "dropout": 0.0, "word_embed_proj_dim": 16, "init_std": 0.3},
    ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            "d_kv": 4,
            "d_ff": 24,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
        },
    ),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {
            "vocab_size": VOCABULARY,
            "d_model": 16,
            **{f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in _BART_SIDE.items()},
            "max_position_embeddings": 32,
            "dropout": 0.0,
            "init_std": 0.3,
            **dict.fromkeys(("decoder_start_token_id", "eos_token_id", "forced_eos_token_id"), 2),
        },
    ),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {
            **{name: _BERT[name] for name in _BERT if name not in ("vocab_size", "max_position_embeddings")},
            "image_size": 8,
            "patch_size": 4,
            "num_labels": 5,
            "id2label": {number: str(number) for number in range(5)},
        },
    ),
}

# Only for hp.parallelize.
MORE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "mamba": (  # no pair of layers to shard: under cp its code runs as it is
        "MambaForCausalLM",
        "MambaConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 2, "time_step_rank": 3},
    ),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 16, "n_layer": 2, "n_head": 4, "initializer_range": 0.3},
    ),
    "roberta": ("RobertaForCausalLM", "RobertaConfig", {**_BERT, "is_decoder": True, "pad_token_id": 0}),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        {
            **_DECODER,
            "head_dim": 4,
            "intermediate_size_mlp": 24,
            "attention_chunk_size": 5,
            "no_rope_layers": [1, 0],
            "num_local_experts": 2,
            "interleave_moe_layer_step": 2,
            "num_experts_per_tok": 1,
            "floor_scale": 4,  # a query's scale grows with its position from here on, by the model's own count
        },
    ),
    "bert_classes": ("BertForSequenceClassification", "BertConfig", {**_BERT, "num_labels": 3}),
    "falcon": (
        "FalconForCausalLM",
        "FalconConfig",
        {**_DECODER, "hidden_dropout": 0.0, "attention_dropout": 0.0, "new_decoder_architecture": False},
    ),
}


def build(name: str, dtype: torch.dtype = torch.float64, num_blocks: int = 2) -> torch.nn.Module:
    """The model, the same weights on every call."""
    import transformers

    transformers.logging.set_verbosity_error()
    model_class, config_class, sizes = {**CASES, **OTHERS, **MORE}[name]
    sizes = {**sizes, **{key: num_blocks for key in ("n_layer", "num_hidden_layers") if key in sizes}}
    config = getattr(transformers, config_class)(**sizes)
    if any("experts" in key for key in sizes):
        config._experts_implementation = "eager"  # the grouped kernel has no float64
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():  # norms start as ones and biases as zeros: gradients say more elsewhere
            if parameter.ndim == 1:
                parameter.add_(0.1 * torch.randn(parameter.shape).to(dtype))
    return model


def batch(name: str, length: int = 6) -> dict[str, torch.Tensor]:
    """Three sequences, one of them padded on the right; labels where the model has a loss."""
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        pixels = torch.randn(3, 3, 8, 8, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels, "labels": torch.arange(3)}
    ids = torch.randint(3, VOCABULARY, (3, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, length - 2 :] = 0
    ids[mask == 0] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    if name != "bert":
        given["labels"] = ids.masked_fill(mask == 0, -100)
    return given


class _DoubleTorch:
    """The module torch, with float64 under the name float32."""

    float32 = torch.float64
    float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


_double = _DoubleTorch()
_kinds = (torch.Tensor, hp.DTensor)
_floats = [vars(kind).get("float") for kind in _kinds]


def _is_double() -> bool:
    return torch.Tensor.float is torch.Tensor.double


def _set_double(is_double: bool) -> None:
    if is_double == _is_double():
        return
    for name, module in list(sys.modules.items()):
        if name.startswith(("transformers.models.", "transformers.integrations.", "transformers.modeling_rope")) and (
            vars(module).get("torch") in (torch, _double)
        ):
            module.torch = _double if is_double else torch
    for kind, method in zip(_kinds, _floats, strict=True):
        if is_double:
            kind.float = kind.double
        elif method is None:
            del kind.float
        else:
            kind.float = method


belongs_to_rank(_is_double, _set_double)


@contextmanager
def in_double() -> Iterator[None]:
    """See Note [Double precision in code that asks for single]."""
    _set_double(True)
    try:
        yield
    finally:
        _set_double(False)


def loss_of(outputs: Any) -> torch.Tensor:
    """The model's own loss, or for one without a number that depends on everything it returns."""
    if getattr(outputs, "loss", None) is not None:
        return outputs.loss
    return outputs.last_hidden_state.sin().sum() + outputs.pooler_output.square().sum()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole value, plain."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, hp.DTensor) else tensor


def train(model: torch.nn.Module, given: dict[str, torch.Tensor], num_steps: int = 2) -> dict[str, torch.Tensor]:
    """Everything that must be equal: outputs and gradients of the first step, losses, weights after the last."""
    # A larger eps: the gradient of a key's bias is zero but for rounding, and Adam would step by its sign.
    eps = 1e-6 if next(model.parameters()).dtype == torch.float64 else 1e-2
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=eps)
    seen: dict[str, torch.Tensor] = {}
    for step in range(num_steps):
        optimizer.zero_grad()
        outputs = model(**given)
        loss = loss_of(outputs)
        loss.backward()
        if step == 0:
            seen["outputs"] = whole(getattr(outputs, "logits", outputs[0]))
            seen |= {f"grad of {name}": whole(parameter.grad) for name, parameter in model.named_parameters()}
        seen[f"loss {step}"] = whole(loss)
        optimizer.step()
    return seen | {f"weight of {name}": whole(parameter) for name, parameter in model.named_parameters()}


def assert_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], rtol: float, atol: float) -> None:
    """All values of two runs; the message names the ones that differ."""
    assert got.keys() == want.keys()
    wrong = {
        name: (got[name] - want[name]).abs().max().item()
        for name in want
        if got[name].shape != want[name].shape or not torch.allclose(got[name], want[name], rtol=rtol, atol=atol)
    }
    assert not wrong, f"differ by up to: {wrong}"
