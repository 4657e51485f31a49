"""What a mixture of experts adds to the loss: see Note [Auxiliary losses] in `models/torch/moe_losses.py`."""

from __future__ import annotations

import numpy as np
from mindspore import Tensor, ops
from mindspore import dtype as mstype

from hyper_parallel.models.moe_config import MoEConfig

__all__ = ["auxiliary_loss", "num_choices"]


def num_choices(chosen: Tensor, num_experts: int) -> Tensor:
    """How often each expert was chosen, (..., choices) to (..., experts)."""
    experts = Tensor(np.arange(num_experts))
    return (chosen.expand_dims(-1) == experts).astype(mstype.int64).sum(-2)


def auxiliary_loss(
    config: MoEConfig, logits: Tensor, scores: Tensor, chosen: Tensor, counts: Tensor, samples: int
) -> Tensor:
    """The sum of the auxiliary losses, each times its factor; ``counts`` are those of the whole micro-batch."""
    probabilities = scores if config.score_func == "softmax" else scores / (scores.sum(-1, keepdims=True) + 1e-20)
    total = None
    if config.balance_loss:
        total_count = counts.sum().clip(1, None)  # a micro-batch may have no rows on any rank
        shares = counts.astype(scores.dtype) / total_count * config.num_experts
        total = config.balance_loss * (shares * probabilities.mean(0)).sum()
    if config.sequence_loss:
        each = num_choices(chosen.reshape(samples, -1), config.num_experts)
        shares = each.astype(scores.dtype) / each.sum(-1, keepdims=True) * config.num_experts
        means = probabilities.reshape(samples, -1, config.num_experts).mean(1)
        own = config.sequence_loss * (shares * means).sum(-1).mean()
        total = own if total is None else total + own
    if config.z_loss:
        own = config.z_loss * ops.square(ops.logsumexp(logits, -1)).mean()
        total = own if total is None else total + own
    return total
