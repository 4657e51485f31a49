"""Sizes of published models in the shape of the reference Llama, by name."""

from __future__ import annotations

from dataclasses import replace

from hyper_parallel.models.llama_config import LlamaConfig


def _size(
    vocab_size: int, dim: int, num_blocks: int, num_heads: int, num_kv_heads: int, hidden_dim: int, max_length: int
) -> LlamaConfig:
    return LlamaConfig(vocab_size, dim, num_blocks, num_heads, num_kv_heads, hidden_dim, max_length)


# fmt: off
LLAMA_SIZES: dict[str, LlamaConfig] = {
    #                   vocab   dim  blocks heads kv  hidden length
    "llama-demo": LlamaConfig(),
    "llama-1b":   replace(_size(128256, 2048, 16, 32, 8, 8192, 8192), rope_base=500000.0, tie_head=True),
    "llama-3b":   replace(_size(128256, 3072, 28, 24, 8, 8192, 8192), rope_base=500000.0, tie_head=True),
    "llama-7b":   _size(32000, 4096, 32, 32, 32, 11008, 4096),
    "llama-8b":   replace(_size(128256, 4096, 32, 32, 8, 14336, 8192), rope_base=500000.0),
    "llama-13b":  _size(32000, 5120, 40, 40, 40, 13824, 4096),
    "llama-70b":  replace(_size(128256, 8192, 80, 64, 8, 28672, 8192), rope_base=500000.0),
    "llama-405b": replace(_size(128256, 16384, 126, 128, 8, 53248, 8192), rope_base=500000.0),
}
# fmt: on
