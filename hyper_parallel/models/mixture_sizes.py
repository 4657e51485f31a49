"""Sizes of published models in the shape of the reference mixture, by name."""

from __future__ import annotations

from typing import Any

from hyper_parallel.models.mixture_config import MixtureConfig

__all__ = ["MIXTURE_SIZES"]


def _size(
    vocab_size: int, dim: int, num_blocks: int, num_heads: int, num_kv_heads: int, max_length: int, **mixture: Any
) -> MixtureConfig:
    return MixtureConfig(vocab_size, dim, num_blocks, num_heads, num_kv_heads, max_length=max_length, **mixture)


# The number before "x", or before "a": all parameters; behind: those of an expert's model, or that a token meets.
MIXTURE_SIZES: dict[str, MixtureConfig] = {
    "mixture-demo": MixtureConfig(hidden_dim=344, num_dense_blocks=1, shared_dim=128, load_balance_coeff=1e-3),
    "mixture-7b-a1b": _size(
        50304, 2048, 16, 16, 16, 4096, num_experts=64, top_k=8, expert_dim=1024, normalize_scores=False,
        balance_loss=0.01, z_loss=0.001
    ),
    "mixture-16b-a3b": _size(
        102400, 2048, 28, 16, 16, 4096, hidden_dim=10944, num_dense_blocks=1, num_experts=64, top_k=6, expert_dim=1408,
        shared_dim=2816, normalize_scores=False, balance_loss=0.001
    ),
    "mixture-8x7b": _size(
        32000, 4096, 32, 32, 8, 32768, rope_base=1e6, num_experts=8, top_k=2, expert_dim=14336, balance_loss=0.02
    ),
    "mixture-8x22b": _size(
        32768, 6144, 56, 48, 8, 65536, rope_base=1e6, num_experts=8, top_k=2, expert_dim=16384, balance_loss=0.001
    ),
    "mixture-671b-a37b": _size(
        129280, 7168, 61, 128, 128, 4096, hidden_dim=18432, num_dense_blocks=3, num_experts=256, top_k=8,
        expert_dim=2048, shared_dim=2048, score_func="sigmoid", num_expert_groups=8, num_limited_groups=4,
        route_scale=2.5, load_balance_coeff=1e-3, sequence_loss=1e-4
    ),
}  # fmt: skip
