"""The Llama-like model with mixtures of experts in the place of its feed-forward networks, for one device.

Nothing here knows of meshes or ranks; how it is cut is said in `models/plan_of_mixture.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hyper_parallel.models.mixture_config import MixtureConfig
from hyper_parallel.models.mixture_loss import MixtureLoss
from hyper_parallel.models.torch.llama import Attention, Block, Llama, mean_cross_entropy
from hyper_parallel.models.torch.moe import MoE

__all__ = ["Mixture"]


class MixtureBlock(nn.Module):
    """Attention and a mixture of experts, each on the normalised input and added to it.

    It gives the stream, or with auxiliary losses (stream, their sum).
    """

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.moe = MoE(config.moe)
        #: For stages of a pipeline.
        self.gives_loss = config.moe.has_losses

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        found = self.moe(self.moe_norm(x))
        if isinstance(found, tuple):
            return x + found[0], found[1]
        return x + found


class Mixture(Llama):
    """The model: token ids (batch, length) to logits (batch, length, vocabulary); with labels to its loss.

    With auxiliary losses that is a :class:`MixtureLoss`, of which ``loss`` is the sum of all.

    >>> config = MixtureConfig(
    ...     vocab_size=11,
    ...     dim=16,
    ...     num_blocks=2,
    ...     num_heads=2,
    ...     num_kv_heads=1,
    ...     hidden_dim=24,
    ...     num_experts=4,
    ...     expert_dim=8,
    ...     num_dense_blocks=1,
    ... )
    >>> Mixture(config)(torch.zeros(2, 5, dtype=torch.long)).shape
    torch.Size([2, 5, 11])
    """

    config: MixtureConfig

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config)

    def make_block(self, number: int) -> nn.Module:
        return Block(self.config) if number < self.config.num_dense_blocks else MixtureBlock(self.config)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        cos, sin = self.angles(ids)
        x, auxiliary = self.embedding(ids), None
        for block in self.blocks:
            x = block(x, cos, sin)
            if isinstance(x, tuple):
                x, added = x
                auxiliary = added if auxiliary is None else auxiliary + added
        logits = self.head(self.norm(x))
        if labels is None:
            return logits
        loss = mean_cross_entropy(logits, labels)
        return loss if auxiliary is None else MixtureLoss(loss + auxiliary, auxiliary)
