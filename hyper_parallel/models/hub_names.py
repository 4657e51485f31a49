"""How files of the Hugging Face hub call the weights of the reference models: rules for ``mapping=``.

What they mean is the same on both sides, so a folder of either opens as the other: experts are stacked here and one
tensor each there.
"""

from __future__ import annotations

from typing import Any

from hyper_parallel.models.mixture_config import MixtureConfig

__all__ = ["llama_mapping", "mixture_mapping"]

Rules = list[dict[str, Any]]

_FEED_FORWARD = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
_MIXTRAL = ("block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"})
_MLP = ("mlp", _FEED_FORWARD)
# The mixture of a block and the weights of an expert in it, by the model type of transformers.
_FAMILIES = {"mixtral": _MIXTRAL, "qwen3_moe": _MLP, "deepseek_v3": _MLP, "glm4_moe": _MLP}
_WITH_SHARED = ("deepseek_v3", "glm4_moe")


def llama_mapping() -> Rules:
    """For :class:`hyper_parallel.models.Llama` and files of a Llama.

    >>> llama_mapping()[0]
    {'files': 'model.embed_tokens.weight', 'ours': 'embedding.weight'}
    """
    return [
        *_around_feed_forward(),
        {"files": "model.layers.*.post_attention_layernorm.weight", "ours": "blocks.*.feed_forward_norm.weight"},
        *_feed_forward("model.layers.*.mlp", "blocks.*.feed_forward"),
    ]


def mixture_mapping(config: MixtureConfig, family: str = "mixtral") -> Rules:
    """For :class:`hyper_parallel.models.Mixture` and files that are named as those of ``family``: ``"mixtral"``,
    ``"qwen3_moe"``, ``"deepseek_v3"``, ``"glm4_moe"``.

    Names alone: whether a model of the family computes the same is a matter of its config.

    >>> mixture_mapping(MixtureConfig())[-3]
    {'files': 'model.layers.*.block_sparse_moe.experts.{n}.w1.weight', 'ours': 'blocks.*.moe.experts.gate', 'stack': 0}
    """
    if family not in _FAMILIES:
        raise ValueError(f"mixture_mapping: family={family!r} is none of {', '.join(map(repr, _FAMILIES))}")
    parts = {
        "shared_dim": config.shared_dim,
        "num_dense_blocks": config.num_dense_blocks,
        "load_balance_coeff": config.load_balance_coeff,
    }
    more = [name for name, value in parts.items() if value]
    if more and family not in _WITH_SHARED:
        raise ValueError(
            f"mixture_mapping: files of {family} have no place for what {', '.join(more)} of the config makes; take "
            f"the names of {' or '.join(map(repr, _WITH_SHARED))}"
        )
    mixture, names = _FAMILIES[family]
    files, ours = f"model.layers.*.{mixture}", "blocks.*.moe"
    rules = _around_feed_forward()
    for number in range(config.num_dense_blocks):
        block = f"model.layers.{number}"
        norm = f"{block}.post_attention_layernorm.weight"
        rules.append({"files": norm, "ours": f"blocks.{number}.feed_forward_norm.weight"})
        rules += _feed_forward(f"{block}.mlp", f"blocks.{number}.feed_forward")
    return [
        *rules,
        {"files": "model.layers.*.post_attention_layernorm.weight", "ours": "blocks.*.moe_norm.weight"},
        {"files": f"{files}.gate.weight", "ours": f"{ours}.router.gate.weight"},
        {"files": f"{files}.gate.e_score_correction_bias", "ours": f"{ours}.expert_bias"},
        *_feed_forward(f"{files}.shared_experts", f"{ours}.shared"),
        *(
            {"files": f"{files}.experts.{{n}}.{theirs}.weight", "ours": f"{ours}.experts.{own}", "stack": 0}
            for own, theirs in names.items()
        ),
    ]


def _around_feed_forward() -> Rules:
    attention = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "output": "o_proj"}
    names = {
        "model.embed_tokens": "embedding",
        "model.norm": "norm",
        "lm_head": "head",
        "model.layers.*.input_layernorm": "blocks.*.attention_norm",
        **{f"model.layers.*.self_attn.{theirs}": f"blocks.*.attention.{own}" for own, theirs in attention.items()},
    }
    return [{"files": f"{theirs}.weight", "ours": f"{own}.weight"} for theirs, own in names.items()]


def _feed_forward(files: str, ours: str) -> Rules:
    return [
        {"files": f"{files}.{theirs}.weight", "ours": f"{ours}.{own}.weight"} for own, theirs in _FEED_FORWARD.items()
    ]
