"""Mixtures of transformers at toy size that no list of ours names, for tests: class of the model, of its config, sizes.

Five experts divide by none of the degrees that are tried.
"""

from __future__ import annotations

from typing import Any

from tests.tensor_parallel import hugging_face

_DECODER: dict[str, Any] = hugging_face.OTHERS["olmoe"][2]  # with 5 experts of which a token chooses 2
_LOCAL = {**{name: size for name, size in _DECODER.items() if name != "num_experts"}, "num_local_experts": 5}
_ROUTED = {
    **{name: size for name, size in _DECODER.items() if name != "num_experts"},
    "n_routed_experts": 5,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 10,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_LATENT = {"q_lora_rank": 6, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 5}
_LATENT |= {"num_key_value_heads": 4}
_LINEAR = {f"linear_{what}": size for what, size in (("num_key_heads", 2), ("num_value_heads", 4))}
_LINEAR |= {"linear_key_head_dim": 4, "linear_value_head_dim": 4}
_WITH_WINDOWS = {
    "moe_intermediate_size": 10,
    "shared_expert_intermediate_size": 10,
    "head_dim": 8,
    "sliding_window": 4,
}
_PHI = {**_LOCAL, "input_jitter_noise": 0.0, "router_jitter_noise": 0.0, "attention_bias": True, "lm_head_bias": True}
_SEQUENCES = {  # of an encoder and a decoder
    "vocab_size": hugging_face.VOCABULARY,
    "d_model": 16,
    "num_experts": 5,
    "expert_capacity": 64,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
}

#: Their experts are sharded.
MIXTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "afmoe": ("AfmoeForCausalLM", "AfmoeConfig", {
        **_DECODER, "moe_intermediate_size": 10, "num_shared_experts": 1, "num_dense_layers": 1, "head_dim": 4}),
    "aria_text": ("AriaTextForCausalLM", "AriaTextConfig", {
        **_DECODER, "moe_num_experts": 5, "moe_topk": 2, "head_dim": 4}),
    "deepseek_v2": ("DeepseekV2ForCausalLM", "DeepseekV2Config", {
        **_ROUTED, **_LATENT, "n_group": None, "topk_group": None, "topk_method": "greedy"}),
    "dots1": ("Dots1ForCausalLM", "Dots1Config", _ROUTED),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM", "Ernie4_5_MoeConfig", {
        **_DECODER, "moe_num_experts": 5, "moe_k": 2, "moe_intermediate_size": 10, "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1, "moe_layer_end_index": 1}),
    "exaone_moe": ("ExaoneMoeForCausalLM", "ExaoneMoeConfig", {
        **_ROUTED, "num_experts": 5, "num_shared_experts": 1, "head_dim": 4}),
    "flex_olmo": ("FlexOlmoForCausalLM", "FlexOlmoConfig", _DECODER),
    "flint": ("FlintForCausalLM", "FlintConfig", {
        **_DECODER, **_WITH_WINDOWS, "mlp_only_layers": [0], "layer_types": ["full_attention", "sliding_attention"]}),
    "glm4_moe": ("Glm4MoeForCausalLM", "Glm4MoeConfig", {**_ROUTED, "head_dim": 8}),
    "granitemoe": ("GraniteMoeForCausalLM", "GraniteMoeConfig", _LOCAL),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM", "GraniteMoeHybridConfig", {
        **_LOCAL, "shared_intermediate_size": 12, "layer_types": ["attention", "attention"], "mamba_n_heads": 4,
        "position_embedding_type": "rope", "mamba_d_head": 8, "mamba_n_groups": 1}),
    "granitemoeshared": ("GraniteMoeSharedForCausalLM", "GraniteMoeSharedConfig", {
        **_LOCAL, "shared_intermediate_size": 12}),
    "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM", "HunYuanMoEV1Config", {**_DECODER, "moe_topk": 2, "head_dim": 4}),
    "kolibri1": ("Kolibri1ForCausalLM", "Kolibri1Config", {**_DECODER, **_WITH_WINDOWS}),
    "laguna": ("LagunaForCausalLM", "LagunaConfig", {**_DECODER, **_WITH_WINDOWS}),
    "minimax": ("MiniMaxForCausalLM", "MiniMaxConfig", {
        **_LOCAL, "head_dim": 4, "layer_types": ["full_attention", "linear_attention"], "block_size": 4}),
    "minimax_m2": ("MiniMaxM2ForCausalLM", "MiniMaxM2Config", {**_LOCAL, "head_dim": 4}),
    "nemotron_h": ("NemotronHForCausalLM", "NemotronHConfig", {
        **_ROUTED, "layers_block_type": ["attention", "moe"], "moe_latent_size": 6, "head_dim": 8,
        "moe_shared_expert_intermediate_size": 10}),
    "phimoe": ("PhimoeForCausalLM", "PhimoeConfig", _PHI),
    "phimoe_noisy": ("PhimoeForCausalLM", "PhimoeConfig", {**_PHI, "router_jitter_noise": 0.1}),
    "qwen2_moe": ("Qwen2MoeForCausalLM", "Qwen2MoeConfig", {
        **_DECODER, "moe_intermediate_size": 10, "shared_expert_intermediate_size": 12, "decoder_sparse_step": 1}),
    "qwen3_5_moe": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeTextConfig", {
        **_DECODER, **_LINEAR, "moe_intermediate_size": 10, "shared_expert_intermediate_size": 10, "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"]}),
    "qwen3_next": ("Qwen3NextForCausalLM", "Qwen3NextConfig", {
        **_DECODER, **_LINEAR, "moe_intermediate_size": 10, "shared_expert_intermediate_size": 10, "head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"]}),
    "solar_open": ("SolarOpenForCausalLM", "SolarOpenConfig", {**_ROUTED, "head_dim": 4}),
}  # fmt: skip
#: Theirs too, and under tp a plan needs to be told what stays whole.
TOLD: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma4": ("Gemma4ForCausalLM", "Gemma4TextConfig", {
        **_DECODER, "moe_intermediate_size": 10, "enable_moe_block": True, "top_k_experts": 2, "sliding_window": 4,
        "vocab_size_per_layer_input": hugging_face.VOCABULARY, "hidden_size_per_layer_input": 4, "head_dim": 8,
        "global_head_dim": 8}),
    "jamba": ("JambaForCausalLM", "JambaConfig", {
        **_DECODER, "expert_layer_period": 1, "expert_layer_offset": 0, "attn_layer_period": 2, "attn_layer_offset": 1,
        "mamba_d_state": 4, "mamba_dt_rank": 3, "use_mamba_kernels": False}),
    "kimi_linear": ("KimiLinearForCausalLM", "KimiLinearConfig", {
        **_LOCAL, **_LATENT, "moe_intermediate_size": 10, "layer_types": ["linear_attention", "full_attention"],
        "q_lora_rank": None, "linear_head_dim": 4, "linear_num_heads": 4}),
    "lfm2_moe": ("Lfm2MoeForCausalLM", "Lfm2MoeConfig", {
        **_DECODER, "moe_intermediate_size": 10, "num_dense_layers": 0, "layer_types": ["full_attention", "conv"],
        "conv_L_cache": 3}),
}  # fmt: skip
KEPT_WHOLE = {
    "gemma4": ["model.layers.*.router"],
    "jamba": ["model.layers.*.mamba.*", "model.layers.*.mamba"],
    "kimi_linear": [f"model.layers.*.self_attn.{name}" for name in ("b_proj", "conv1d", "forget_gate")],
    "lfm2_moe": ["model.layers.*.conv.conv"],
}
#: Their experts are computed by code of their own: refused by name under ep.
REFUSED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "dbrx": ("DbrxForCausalLM", "DbrxConfig", {
        "vocab_size": hugging_face.VOCABULARY, "d_model": 16, "n_heads": 4, "n_layers": 2, "max_seq_len": 32,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}, "pad_token_id": 0,
        "ffn_config": {"ffn_hidden_size": 12, "moe_num_experts": 5, "moe_top_k": 2, "hidden_size": 16}}),
    "doge": ("DogeForCausalLM", "DogeConfig", {**_DECODER, "is_moe": True, "num_experts": 16}),
    "jetmoe": ("JetMoeForCausalLM", "JetMoeConfig", {**_LOCAL, "kv_channels": 4}),
    "llama4_text": ("Llama4ForCausalLM", "Llama4TextConfig", {
        **_LOCAL, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "head_dim": 4, "intermediate_size_mlp": 24,
        "attention_chunk_size": 8}),
    "longcat_flash": ("LongcatFlashForCausalLM", "LongcatFlashConfig", {
        **_ROUTED, **_LATENT, "num_layers": 1, "ffn_hidden_size": 24, "expert_ffn_hidden_size": 10,
        "zero_expert_num": 2, "moe_topk": 2, "head_dim": 4}),
    "nllb_moe": ("NllbMoeForConditionalGeneration", "NllbMoeConfig", {
        **_SEQUENCES, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 24,
        "decoder_attention_heads": 4, "decoder_ffn_dim": 24, "encoder_sparse_step": 2, "decoder_sparse_step": 2}),
    "switch_transformers": ("SwitchTransformersForConditionalGeneration", "SwitchTransformersConfig", {
        **_SEQUENCES, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1}),
}  # fmt: skip
hugging_face.MORE.update({**MIXTURES, **TOLD, **REFUSED})
