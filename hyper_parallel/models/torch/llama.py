"""A small Llama-like language model for one device: RMS norms, rotary positions, grouped-query attention, SwiGLU.

Nothing here knows of meshes or ranks; how it is cut is said in `models/plan_of_llama.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel.models.llama_config import LlamaConfig
from hyper_parallel.models.torch.feed_forward import FeedForward


class Attention(nn.Module):
    """Causal self-attention in which several query heads share a key head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.query = nn.Linear(config.dim, config.num_heads * config.head_dim, bias=False)
        self.key = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.value = nn.Linear(config.dim, config.num_kv_heads * config.head_dim, bias=False)
        self.output = nn.Linear(config.num_heads * config.head_dim, config.dim, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        query = self.query(x).view(batch, length, self.num_heads, self.head_dim).transpose(1, 2)
        key = self.key(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        value = self.value(x).view(batch, length, self.num_kv_heads, self.head_dim).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(
            rotate(query, cos, sin), rotate(key, cos, sin), value, is_causal=True, enable_gqa=True
        )
        return self.output(mixed.transpose(1, 2).reshape(batch, length, dim))


class Block(nn.Module):
    """Attention and feed-forward, each on the normalised input and added to it."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config.dim, config.hidden_dim)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Module):
    """The model: token ids (batch, length) to logits (batch, length, vocabulary), or to the loss when labels are given.

    >>> model = Llama(LlamaConfig(vocab_size=11, dim=16, num_blocks=1, num_heads=2, num_kv_heads=1, hidden_dim=24))
    >>> model(torch.zeros(2, 5, dtype=torch.long)).shape
    torch.Size([2, 5, 11])
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleList(self.make_block(number) for number in range(config.num_blocks))
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        if config.tie_head:
            self.head.weight = self.embedding.weight
        cos, sin = rotary_table(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.init_weights()

    def make_block(self, number: int) -> nn.Module:
        """The block of that number."""
        return Block(self.config)

    def init_weights(self) -> None:
        """Normal weights; those that lead back into the residual stream smaller, the more blocks add to it."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                nn.init.ones_(parameter)
            else:
                into_stream = name.endswith(("output.weight", "down.weight", "experts.down"))
                nn.init.normal_(parameter, std=0.02 / (2 * self.config.num_blocks) ** 0.5 if into_stream else 0.02)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        cos, sin = self.angles(ids)
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return logits if labels is None else mean_cross_entropy(logits, labels)

    def angles(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine of the angles of the tokens' positions."""
        length = ids.shape[1]
        if length > self.config.max_length:
            raise ValueError(f"{type(self).__name__}: {length} tokens, but max_length is {self.config.max_length}")
        return self.cos[:length], self.sin[:length]


def mean_cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over all labels that are not -100."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # 8 bits are too few for a sum of losses
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def rotary_table(config: LlamaConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of each position's angles, (max_length, head_dim)."""
    frequencies = config.rope_base ** (-torch.arange(0, config.head_dim, 2) / config.head_dim)
    angles = torch.outer(torch.arange(config.max_length).float(), frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each pair of features (i, i + head_dim / 2) by its position's angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
