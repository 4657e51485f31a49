"""What a mixture of experts adds to the loss.

Note [Auxiliary losses]
Of one micro-batch, with T tokens, E experts and k choices of each token; f is the part of the choices that fell on an
expert, times E, and P its mean score (sigmoids divided by their sum):

* ``balance_loss``: sum of f P over the experts, from the counts of the *whole* micro-batch, whichever ranks share it;
  1 where all experts are used alike. The mean of ranks' own losses would be another number.
* ``sequence_loss``: the same of each sequence by itself, and their mean.
* ``z_loss``: the mean over the tokens of the squared logsumexp of the logits.

All tokens count, also those without a target. A step's loss is the mean over its micro-batches by their rows. So the
last two do not depend on how a batch is split; the first does not depend on ranks, but on the number of micro-batches.
"""

from __future__ import annotations

import torch

from hyper_parallel.models.moe_config import MoEConfig

__all__ = ["auxiliary_loss", "num_choices"]


def num_choices(chosen: torch.Tensor, num_experts: int) -> torch.Tensor:
    """How often each expert was chosen, (..., choices) to (..., experts); exact, and the same bits every time."""
    none = chosen.new_zeros((*chosen.shape[:-1], num_experts))
    return none.scatter_add(-1, chosen, torch.ones_like(chosen))


def auxiliary_loss(
    config: MoEConfig,
    logits: torch.Tensor,
    scores: torch.Tensor,
    chosen: torch.Tensor,
    counts: torch.Tensor,
    samples: int,
) -> torch.Tensor:
    """The sum of the auxiliary losses, each times its factor; ``counts`` are those of the whole micro-batch."""
    probabilities = scores if config.score_func == "softmax" else scores / (scores.sum(-1, keepdim=True) + 1e-20)
    total = logits.new_zeros(())
    if config.balance_loss:
        total_count = counts.sum().clamp(min=1)  # a micro-batch may have no rows on any rank
        shares = counts.to(scores.dtype) / total_count * config.num_experts
        total = total + config.balance_loss * (shares * probabilities.mean(0)).sum()
    if config.sequence_loss:
        each = num_choices(chosen.reshape(samples, -1), config.num_experts)
        shares = each.to(scores.dtype) / each.sum(-1, keepdim=True) * config.num_experts
        means = probabilities.unflatten(0, (samples, -1)).mean(1)
        total = total + config.sequence_loss * (shares * means).sum(-1).mean()
    if config.z_loss:
        total = total + config.z_loss * logits.logsumexp(-1).square().mean()
    return total
