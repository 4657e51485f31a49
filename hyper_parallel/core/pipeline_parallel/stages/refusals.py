"""Models and calls that cannot be cut into stages, refused by name with what to write instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["check_call", "check_model"]

# What a model is asked to give that only all blocks together know.
_NEEDS_ALL_BLOCKS = {
    "output_router_logits": "the auxiliary loss needs the routers of all blocks",
    "output_hidden_states": "the hidden states of all blocks lie on different ranks",
    "output_attentions": "the attentions of all blocks lie on different ranks",
}
_CACHES = ("past_key_values", "cache_params", "past_key_value", "encoder_hidden_states", "encoder_outputs")


def check_model(model: Any, blocks: Sequence[str]) -> None:
    """Raise for a model whose run is not one row of blocks with one tensor between them."""
    name = type(model).__name__
    config = getattr(model, "config", None)
    lists = list(dict.fromkeys(path.rpartition(".")[0] for path in blocks))
    if getattr(config, "is_encoder_decoder", False) or len(lists) > 1:
        several = f" ({', '.join(map(repr, lists))})" if len(lists) > 1 else ""
        raise ValueError(
            f"split_stages: {name} has more than one row of blocks{several}, as encoders with decoders have; stages "
            "are parts of one row: use tp, dp_shard or cp for it"
        )
    if not blocks:
        raise ValueError(
            f"split_stages: no blocks were found in {name}: hold them in a ModuleList or a Sequential (a CellList or a "
            "SequentialCell on MindSpore), or call split_stages with blocks= their paths"
        )
    for key, why in _NEEDS_ALL_BLOCKS.items():
        if getattr(config, key, False):
            raise ValueError(f"split_stages: {name} has config.{key}=True, and {why}: set model.config.{key} = False")


def check_call(inputs: Mapping[str, Any]) -> None:
    """Raise for arguments that a stage alone cannot answer."""
    for key, why in _NEEDS_ALL_BLOCKS.items():
        if inputs.get(key):
            raise ValueError(f"a stage was called with {key}=True, and {why}: leave it out")
    if inputs.get("use_cache"):
        raise ValueError("a stage was called with use_cache=True; stages train and keep no caches: leave it out")
    for key in _CACHES:
        if inputs.get(key) is not None:
            raise ValueError(
                f"a stage was called with {key}=, a state beside the stream that stages do not hand on: leave it out"
            )
