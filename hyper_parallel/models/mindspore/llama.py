"""A small Llama-like language model for one device: RMS norms, rotary positions, grouped-query attention, SwiGLU.

Nothing here knows of meshes or ranks; how it is cut is said in `models/plan_of_llama.py`. Its parts have the names of
PyTorch's model, but for the embedding's weight, which MindSpore calls ``embedding_table``.
"""

from __future__ import annotations

import numpy as np
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.common.initializer import Normal, initializer

from hyper_parallel.core.context_parallel.attention import attention
from hyper_parallel.core.context_parallel.blocks.visibility import Visibility
from hyper_parallel.models.llama_config import LlamaConfig
from hyper_parallel.models.mindspore.feed_forward import FeedForward, linear

CAUSAL = Visibility(causal=True)


class RMSNorm(nn.Cell):
    """Features divided by the root of their mean square, and scaled."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = Parameter(initializer("ones", (dim,)), name="weight")
        self.eps = eps

    def construct(self, x: Tensor) -> Tensor:
        return x * ops.rsqrt((x * x).mean(-1, keep_dims=True) + self.eps) * self.weight


class Attention(nn.Cell):
    """Causal self-attention in which several query heads share a key head."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self.query = linear(config.dim, config.num_heads * config.head_dim)
        self.key = linear(config.dim, config.num_kv_heads * config.head_dim)
        self.value = linear(config.dim, config.num_kv_heads * config.head_dim)
        self.output = linear(config.num_heads * config.head_dim, config.dim, config.num_blocks)

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, dim = x.shape
        query = self.query(x).reshape(batch, length, self.num_heads, self.head_dim).transpose(0, 2, 1, 3)
        key = self.key(x).reshape(batch, length, self.num_kv_heads, self.head_dim).transpose(0, 2, 1, 3)
        value = self.value(x).reshape(batch, length, self.num_kv_heads, self.head_dim).transpose(0, 2, 1, 3)
        query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        mixed = attention(query, key, value, visible=CAUSAL)
        return self.output(mixed.transpose(0, 2, 1, 3).reshape(batch, length, dim))


class Block(nn.Cell):
    """Attention and feed-forward, each on the normalised input and added to it."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config.dim, config.hidden_dim, config.num_blocks)

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.feed_forward_norm(x))


class Llama(nn.Cell):
    """The model: token ids (batch, length) to logits (batch, length, vocabulary), or to the loss when labels are given.

    Weights are normal; those that lead back into the residual stream smaller, the more blocks add to it.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.dim, embedding_table=Normal(0.02))
        self.blocks = nn.CellList([self.make_block(number) for number in range(config.num_blocks)])
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.head = linear(config.dim, config.vocab_size)
        if config.tie_head:
            self.head.weight = self.embedding.embedding_table
        cos, sin = rotary_table(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def make_block(self, number: int) -> nn.Cell:
        """The block of that number."""
        return Block(self.config)

    def construct(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        cos, sin = self.angles(ids)
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        return logits if labels is None else mean_cross_entropy(logits, labels)

    def angles(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine of the angles of the tokens' positions."""
        length = ids.shape[1]
        if length > self.config.max_length:
            raise ValueError(f"{type(self).__name__}: {length} tokens, but max_length is {self.config.max_length}")
        return self.cos[:length], self.sin[:length]


def mean_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over all labels that are not -100."""
    return ops.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def rotary_table(config: LlamaConfig) -> tuple[Tensor, Tensor]:
    """Cosine and sine of each position's angles, (max_length, head_dim)."""
    frequencies = config.rope_base ** (-np.arange(0, config.head_dim, 2, dtype=np.float32) / config.head_dim)
    angles = np.tile(np.outer(np.arange(config.max_length, dtype=np.float32), frequencies), (1, 2))
    return Tensor(np.cos(angles).astype(np.float32)), Tensor(np.sin(angles).astype(np.float32))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair of features (i, i + head_dim / 2) by its position's angle."""
    first, second = mint.chunk(x, 2, -1)
    return x * cos + mint.cat((-second, first), -1) * sin
