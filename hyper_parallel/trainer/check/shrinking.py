"""A config at small widths: the same structure, degrees and order of samples, and what did not divide still does not.

Note [As odd as the original]
A size that is divided by a degree becomes a small multiple of it with the same remainder, so that a layout whose shards
are uneven, or empty, stays so. The number of query heads for each key head is kept.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hyper_parallel.models.llama_config import LlamaConfig
from hyper_parallel.models.mixture_config import MixtureConfig
from hyper_parallel.models.sizes import model_size
from hyper_parallel.parallel.stages import table_for
from hyper_parallel.trainer.config.reading import read_text

if TYPE_CHECKING:
    from hyper_parallel.trainer.config.run_config import RunConfig

__all__ = ["one_process", "shrink", "shrunk_size"]

_BLOCKS = 2
_HEAD_DIM = 8  # divides by four: some models turn half of a head's pairs only
_WIDTH = 48
_VOCABULARY = 64
_EXPERTS = 4
_LEAST_EPS = 1e-5  # of Adam: below, elements whose gradient is rounding would step as far as all others
# Keys of Hugging Face configs, by what they mean.
_KEYS = {
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "width": ("intermediate_size", "n_inner", "ffn_dim", "moe_intermediate_size", "shared_expert_intermediate_size"),
    "blocks": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "key heads": ("num_key_value_heads",),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "chosen": ("num_experts_per_tok",),
    "dense blocks": ("first_k_dense_replace", "num_dense_layers", "moe_num_dense_layers"),
    "by block": ("layer_types", "mlp_layer_types"),
}


def shrunk_size(size: int, degree: int, least: int) -> int:
    """A small number from ``least`` with the remainder that ``size`` has by ``degree``; ``size`` if that is smaller.

    >>> shrunk_size(4096, 4, 6), shrunk_size(4097, 4, 6), shrunk_size(3, 4, 6)
    (8, 9, 3)
    """
    return min(size, math.ceil(least / degree) * degree + size % degree)


def shrink(
    config: RunConfig, world_size: int, *, dtype: Literal["float64", "float32"] = "float64", keep_sizes: bool = False
) -> tuple[RunConfig, int]:
    """The config of the check, and the length of its samples: in ``dtype``, at a constant rate, from drawn values."""
    degrees = config.parallel.degrees.fit(world_size)
    sizes, ep = degrees.sizes, int(degrees.ep)
    both, parts = sizes["cp"] * sizes["tp"], sizes["dp_replicate"] * sizes["dp_shard"]
    length = shrunk_size(config.data.length, both, 4 * both)
    microbatches = config.microbatches(world_size)
    parts *= microbatches
    model, blocks = config.model, max(_BLOCKS, _num_stages(config, sizes["pp"], microbatches))
    if not keep_sizes and model.name is not None:
        given = dataclasses.replace(model_size(model.name), **model.args)
        args = _llama(given, sizes["tp"], length, blocks)
        if isinstance(given, MixtureConfig):
            args |= _mixture(given, ep, sizes["tp"], microbatches)
        name = "mixture" if isinstance(given, MixtureConfig) else "llama"
        model = dataclasses.replace(model, name=name, args=args)
    elif not keep_sizes and model.hugging_face is not None:
        path = Path(model.hugging_face)
        values = json.loads(read_text(path / "config.json" if path.is_dir() else path))
        model = dataclasses.replace(model, args=_hugging_face({**values, **model.args}, sizes["tp"], ep, blocks))
    weights = None if model.hugging_face is None else "scratch"
    if model.lora is not None:  # which needs a folder; nothing is read from it, for all values are drawn
        weights = "."
    optimizer = config.optimizer
    if optimizer.name != "sgd":
        optimizer = dataclasses.replace(optimizer, eps=max(optimizer.eps, _LEAST_EPS))
    return dataclasses.replace(
        config,
        model=dataclasses.replace(model, weights=weights),
        train=dataclasses.replace(
            config.train,
            batch=shrunk_size(config.train.batch, parts, 2 * parts),
            microbatches=microbatches,
            dtype=dtype,
        ),
        optimizer=optimizer,
        schedule=dataclasses.replace(config.schedule, name="constant", warmup=0),
        precision=dataclasses.replace(config.precision, compute="same", reduce="same"),
        checkpoint=dataclasses.replace(config.checkpoint, resume="never", export_hugging_face=False),
        launch=dataclasses.replace(config.launch, nproc=world_size, hosts=1, host_rank=0, master=None),
    ), length


def one_process(config: RunConfig) -> RunConfig:
    """The same run in one process: no axis splits it, no part of a batch comes alone, nothing is computed again."""
    parallel = dataclasses.replace(
        config.parallel, dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, offload=False, keep_whole=()
    )
    return dataclasses.replace(
        config,
        parallel=parallel,
        train=dataclasses.replace(config.train, microbatches=1),
        recompute=dataclasses.replace(config.recompute, mode="none"),
        launch=dataclasses.replace(config.launch, nproc=1, hosts=1, host_rank=0, master=None),
    )


def _num_stages(config: RunConfig, pp: int, microbatches: int) -> int:
    if pp == 1:
        return 1
    parallel = config.parallel
    return table_for(parallel.schedule, pp, microbatches, parallel.stages_per_rank).stages.num_stages


def _llama(given: LlamaConfig, tp: int, length: int, blocks: int) -> dict[str, Any]:
    heads, key_heads = _heads(given.num_heads, given.num_kv_heads, tp)
    return {
        "vocab_size": shrunk_size(given.vocab_size, tp, _VOCABULARY),
        "dim": heads * min(given.head_dim, _HEAD_DIM),
        "num_blocks": min(given.num_blocks, blocks),
        "num_heads": heads,
        "num_kv_heads": key_heads,
        "hidden_dim": shrunk_size(given.hidden_dim, tp, _WIDTH),
        "max_length": max(length, 1),
        "rope_base": given.rope_base,
        "norm_eps": given.norm_eps,
        "tie_head": given.tie_head,
    }


def _mixture(given: MixtureConfig, ep: int, tp: int, microbatches: int) -> dict[str, Any]:
    """Few small experts, in as many groups. The balance of a whole micro-batch, which depends on how many there are, is
    that of each sequence where there are several."""
    in_group = given.num_experts // given.num_expert_groups
    if given.num_expert_groups == 1:
        experts = shrunk_size(given.num_experts, ep, max(_EXPERTS, ep))
    else:
        experts = given.num_expert_groups * min(in_group, 2)
    choices = experts // given.num_expert_groups * given.num_limited_groups
    kept = {field.name: getattr(given, field.name) for field in dataclasses.fields(MixtureConfig)}
    kept = {name: value for name, value in kept.items() if name not in LlamaConfig.__dataclass_fields__}
    is_split = microbatches > 1
    return kept | {
        "num_experts": experts,
        "top_k": min(given.top_k, max(1, choices // 2)),
        "expert_dim": shrunk_size(given.expert_dim, tp, _WIDTH // 2),
        "shared_dim": shrunk_size(given.shared_dim, tp, _WIDTH // 2) if given.shared_dim else 0,
        "num_dense_blocks": min(given.num_dense_blocks, 1),
        "balance_loss": 0.0 if is_split else given.balance_loss,
        "sequence_loss": given.sequence_loss + (given.balance_loss if is_split else 0.0),
    }


def _heads(heads: int, key_heads: int, tp: int) -> tuple[int, int]:
    fewer = shrunk_size(key_heads, tp, tp) if key_heads >= tp else key_heads
    return heads // key_heads * fewer, fewer


def _hugging_face(values: dict[str, Any], tp: int, ep: int, blocks: int) -> dict[str, Any]:
    """The values of a config.json that change; sizes that are not known stay."""
    found: dict[str, Any] = {}

    def given(meaning: str) -> list[tuple[str, int]]:
        return [(key, values[key]) for key in _KEYS[meaning] if isinstance(values.get(key), int)]

    head_counts, key_counts, hidden = given("heads"), given("key heads"), given("hidden")
    if head_counts:
        heads = head_counts[0][1]
        fewer, key_heads = _heads(heads, key_counts[0][1] if key_counts else heads, tp)
        found |= dict.fromkeys((key for key, _ in head_counts), fewer)
        found |= dict.fromkeys((key for key, _ in key_counts), key_heads)
        # Of latent attention a part of each head turns, which has a size of its own and stays as it is.
        if isinstance(values.get("head_dim"), int) and "qk_rope_head_dim" not in values:
            found["head_dim"] = min(values["head_dim"], _HEAD_DIM)
        usual = hidden[0][1] // heads if hidden else _HEAD_DIM
        if isinstance(values.get("rotary_dim"), int):
            found["rotary_dim"] = min(values["rotary_dim"], usual, _HEAD_DIM)
        found |= dict.fromkeys((key for key, _ in hidden), fewer * min(usual, _HEAD_DIM))
    for key, size in given("width"):
        found[key] = shrunk_size(size, tp, _WIDTH)
    for key, size in given("blocks"):
        found[key] = min(size, blocks)
    for key, size in given("experts"):
        groups = values.get("n_group") or 1
        found[key] = min(size, 2 * groups) if groups > 1 else shrunk_size(size, ep, max(_EXPERTS, ep))
    for key, size in given("chosen"):
        found[key] = min(size, _EXPERTS)
    for key, size in given("dense blocks"):
        found[key] = min(size, 1)
    for key in _KEYS["by block"]:
        if isinstance(values.get(key), list):
            found[key] = values[key][:blocks]
    if isinstance(values.get("vocab_size"), int):
        found["vocab_size"] = shrunk_size(values["vocab_size"], tp, _VOCABULARY)
        for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if isinstance(values.get(key), int) and values[key] >= found["vocab_size"]:
                found[key] = found["vocab_size"] - 1
    if isinstance(values.get("text_config"), dict):
        found["text_config"] = {**values["text_config"], **_hugging_face(values["text_config"], tp, ep, blocks)}
    return found
