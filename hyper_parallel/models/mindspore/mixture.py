"""The Llama-like model with mixtures of experts in the place of its feed-forward networks, for one device.

Nothing here knows of meshes or ranks; how it is cut is said in `models/plan_of_mixture.py`. Its parts have the names of
PyTorch's model, but for the embedding's weight.
"""

from __future__ import annotations

from typing import Any

from mindspore import Tensor, nn

from hyper_parallel.models.mindspore.llama import Attention, Block, Llama, RMSNorm, mean_cross_entropy
from hyper_parallel.models.mindspore.moe import MoE
from hyper_parallel.models.mixture_config import MixtureConfig
from hyper_parallel.models.mixture_loss import MixtureLoss

__all__ = ["Mixture"]


class MixtureBlock(nn.Cell):
    """Attention and a mixture of experts, each on the normalised input and added to it.

    It gives the stream, or with auxiliary losses (stream, their sum).
    """

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.moe_norm = RMSNorm(config.dim, config.norm_eps)
        self.moe = MoE(config.moe, num_blocks=config.num_blocks)
        #: For stages of a pipeline.
        self.gives_loss = config.moe.has_losses

    def construct(self, x: Tensor, cos: Tensor, sin: Tensor) -> Any:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        found = self.moe(self.moe_norm(x))
        if isinstance(found, tuple):
            return x + found[0], found[1]
        return x + found


class Mixture(Llama):
    """The model: token ids (batch, length) to logits (batch, length, vocabulary); with labels to its loss.

    With auxiliary losses that is a :class:`MixtureLoss`, of which ``loss`` is the sum of all.
    """

    config: MixtureConfig

    def __init__(self, config: MixtureConfig) -> None:
        super().__init__(config)

    def make_block(self, number: int) -> nn.Cell:
        return Block(self.config) if number < self.config.num_dense_blocks else MixtureBlock(self.config)

    def construct(self, ids: Tensor, labels: Tensor | None = None) -> Any:
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
