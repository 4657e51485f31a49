"""Thirty architectures of transformers at toy size: five blocks (six where the kind asks for it), no dropout."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

_D = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_E = {key: value for key, value in _D.items() if key not in ("intermediate_size", "num_key_value_heads")}
_BERT = {**_E, "intermediate_size": 48}
_GPT = {"vocab_size": 97, "n_embd": 32, "n_layer": 5, "n_head": 4, "n_positions": 64}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_MANY = {"num_experts": 4, "num_experts_per_tok": 2}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
_TOKENS = {"pad_token_id": 0, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2}

SIZES: dict[str, dict[str, Any]] = {
    "llama": _D,
    "qwen3": {**_D, "head_dim": 8, "tie_word_embeddings": True},
    "mistral": _D,
    "gemma2": {**_D, "head_dim": 8},
    "gemma3_text": {**_D, "head_dim": 8, "sliding_window": 4},
    "phi": {**_D, "num_key_value_heads": 4},
    "phi3": _D,
    "olmo2": _D,
    "cohere": _D,
    "granite": _D,
    "gpt2": _GPT,
    "gptj": {**_GPT, "rotary_dim": 4},
    "gpt_neox": {**_E, "intermediate_size": 48},
    "codegen": {**_GPT, "rotary_dim": 4},
    "bloom": {"vocab_size": 97, "hidden_size": 32, "n_layer": 5, "n_head": 4},
    "falcon": {**{key: _E[key] for key in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")}},
    "opt": {**_E, "ffn_dim": 48, "word_embed_proj_dim": 16},
    "mpt": {"vocab_size": 97, "d_model": 32, "n_layers": 5, "n_heads": 4, "max_seq_len": 64},
    "stablelm": _D,
    "starcoder2": _D,
    "mixtral": {**_D, **_EXPERTS},
    "qwen3_moe": {**_D, **_MANY, "head_dim": 8, "moe_intermediate_size": 16, "decoder_sparse_step": 1},
    "olmoe": {**_D, **_MANY},
    "deepseek_v3": {
        **{**_D, **_LATENT, **_ROUTED},
        **{"num_key_value_heads": 4, "moe_intermediate_size": 16, "n_shared_experts": 1},
    },
    "gpt_oss": {**_D, **_EXPERTS, "head_dim": 8},
    "mamba": {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 5},
    "bert": _BERT,
    "roberta": _BERT,
    "modernbert": {**_BERT, **_TOKENS, "num_hidden_layers": 6},
    "distilbert": {"vocab_size": 97, "dim": 32, "hidden_dim": 48, "n_layers": 5, "n_heads": 4},
}
MASKED = ("bert", "roberta", "modernbert", "distilbert")
_EAGER = ("gemma2", "bloom", "mpt", "gptj", "codegen", "gpt_oss", "mamba")
# Their code computes in float32 by itself in places.
_NARROW = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss")


def build(kind: str, **more: Any) -> nn.Module:
    """The model with its head, in training, without dropout."""
    config = transformers.AutoConfig.for_model(kind, **{**SIZES[kind], **more})
    for name, value in vars(config).items():
        if ("drop" in name or name.endswith("pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
    attention = "eager" if kind in _EAGER else "sdpa"
    auto = transformers.AutoModelForMaskedLM if kind in MASKED else transformers.AutoModelForCausalLM
    model = auto.from_config(config, attn_implementation=attention)
    return model.to(torch.float32 if kind in _NARROW else torch.float64).train()


def batch(rows: int = 2, length: int = 12) -> dict[str, torch.Tensor]:
    """Ids, a mask with padding, and labels of which some count nothing."""
    ids = torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(rows))
    labels, mask = ids.clone(), torch.ones_like(ids)
    labels[0, :3] = -100
    mask[-1, length - 3 :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}
