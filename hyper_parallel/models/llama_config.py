"""The sizes of the Llama-like reference model, the same for every framework."""

from __future__ import annotations

import math
from dataclasses import dataclass

_LARGEST = 2**31 - 1  # of a size


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a :class:`hyper_parallel.models.Llama`; the defaults are those of the demo.

    >>> LlamaConfig(dim=64, num_heads=4).head_dim
    16
    """

    vocab_size: int = 256
    dim: int = 128
    num_blocks: int = 4
    num_heads: int = 8
    num_kv_heads: int = 4
    hidden_dim: int = 344
    max_length: int = 512
    rope_base: float = 10000.0
    norm_eps: float = 1e-5
    tie_head: bool = False  # the head uses the embedding's weight

    def __post_init__(self) -> None:
        for name in ("vocab_size", "dim", "num_blocks", "num_heads", "num_kv_heads", "hidden_dim", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"LlamaConfig: {name} must be at least 1, got {getattr(self, name)}")
            if getattr(self, name) > _LARGEST:
                raise ValueError(f"LlamaConfig: {name} must be at most {_LARGEST}, got {getattr(self, name)}")
        if not 0 < self.rope_base < math.inf:
            raise ValueError(f"LlamaConfig: rope_base must be a finite number above 0, got {self.rope_base}")
        if not 0 <= self.norm_eps < math.inf:
            raise ValueError(f"LlamaConfig: norm_eps must be a finite number from 0, got {self.norm_eps}")
        if self.dim % self.num_heads or self.head_dim % 2:
            raise ValueError(
                f"LlamaConfig: dim={self.dim} must be num_heads={self.num_heads} times an even number, for rotary "
                "positions turn pairs of features"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"LlamaConfig: num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}, for "
                "each key head serves the same number of query heads"
            )

    @property
    def head_dim(self) -> int:
        """Features of one head."""
        return self.dim // self.num_heads
