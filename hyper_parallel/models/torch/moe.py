"""A mixture of experts for one device: each token goes through a few of many small feed-forward networks.

Nothing here knows of meshes or ranks. What a rank of many must be told is one object, ``MoE.batch``: see Note [Counts].

Note [Ties]
Scores are sorted stably: of equal ones the expert with the lowest number is chosen, on every device and framework.

Note [Counts]
``tokens_per_expert`` counts the choices made in training since the last :func:`update_expert_bias`, over all
micro-batches, each once: a block that is computed again in backward does not count again. Where a batch is shared by
ranks, ``hp.parallelize`` sets ``batch``: ``batch.own`` makes counts those of this rank's own samples, ``batch.total``
those of the whole micro-batch, and at the end of a step the buffer has the counts of all ranks.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel.models.moe_config import MoEConfig
from hyper_parallel.models.torch.feed_forward import FeedForward
from hyper_parallel.models.torch.grouped_experts import GroupedExperts
from hyper_parallel.models.torch.moe_losses import auxiliary_loss, num_choices
from hyper_parallel.platform import get_platform

__all__ = ["MoE", "TokenChoiceTopKRouter"]


class TokenChoiceTopKRouter(nn.Module):
    """Each token's best ``top_k`` experts: (tokens, dim) to (logits, scores, their choice, the weights of the chosen).

    In float32 at least, whatever the model's dtype. See Note [Ties].
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        top_k: int,
        score_func: str = "sigmoid",
        num_expert_groups: int | None = None,
        num_limited_groups: int | None = None,
        route_scale: float = 1.0,
        *,
        normalize_scores: bool = True,
        group_score: str = "top2",
    ) -> None:
        super().__init__()
        self.config = MoEConfig(
            dim,
            1,
            num_experts,
            top_k,
            score_func=score_func,
            num_expert_groups=num_expert_groups or 1,
            num_limited_groups=num_limited_groups or num_expert_groups or 1,
            route_scale=route_scale,
            normalize_scores=normalize_scores,
            group_score=group_score,
        )
        self.gate = nn.Linear(dim, num_experts, bias=False)

    def forward(
        self, x: torch.Tensor, expert_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        dtype = torch.promote_types(x.dtype, torch.float32)
        with nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False):
            logits = F.linear(x.to(dtype), self.gate.weight.to(dtype))
            scores = logits.sigmoid() if self.config.score_func == "sigmoid" else logits.softmax(-1)
            chosen = self._choose(scores.detach() if expert_bias is None else scores.detach() + expert_bias)
            weights = scores.gather(-1, chosen)
            if self.config.normalize_scores:
                weights = weights / (weights.sum(-1, keepdim=True) + _LEAST)
            return logits, scores, chosen, weights * self.config.route_scale

    def _choose(self, scores: torch.Tensor) -> torch.Tensor:
        config = self.config
        if config.num_limited_groups < config.num_expert_groups:
            scores = self._limited(scores)
        return scores.sort(dim=-1, descending=True, stable=True).indices[..., : config.top_k]

    def _limited(self, scores: torch.Tensor) -> torch.Tensor:
        """Scores in which those of all but the best groups are out of reach."""
        config = self.config
        groups = scores.unflatten(-1, (config.num_expert_groups, -1))
        best = groups.sort(dim=-1, descending=True).values[..., : 2 if config.group_score == "top2" else 1].sum(-1)
        order = best.sort(dim=-1, descending=True, stable=True).indices
        left_out = torch.ones_like(best, dtype=torch.bool).scatter(-1, order[..., : config.num_limited_groups], False)
        return groups.masked_fill(left_out.unsqueeze(-1), float("-inf")).flatten(-2)


_LEAST = 1e-20  # sigmoids of a token may all be 0


class MoE(nn.Module):
    """A mixture of experts in the place of a feed-forward network; (samples, length, dim) to the same.

    ``MoE(dim, hidden_dim, num_experts, top_k, ...)`` with the fields of :class:`MoEConfig`, or ``MoE(config)``. With
    auxiliary losses it gives (output, their sum).

    >>> moe = MoE(16, 8, num_experts=4, top_k=2)
    >>> moe(torch.randn(2, 5, 16)).shape, int(moe.tokens_per_expert.sum())
    (torch.Size([2, 5, 16]), 20)
    """

    expert_bias: torch.Tensor | None
    tokens_per_expert: torch.Tensor

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()
        config = args[0] if args and isinstance(args[0], MoEConfig) else MoEConfig(*args, **options)
        self.config = config
        self.router = TokenChoiceTopKRouter(
            config.dim,
            config.num_experts,
            config.top_k,
            config.score_func,
            config.num_expert_groups,
            config.num_limited_groups,
            config.route_scale,
            normalize_scores=config.normalize_scores,
            group_score=config.group_score,
        )
        self.experts = GroupedExperts(config.dim, config.hidden_dim, config.num_experts, config.use_grouped_mm)
        self.shared = FeedForward(config.dim, config.shared_dim) if config.shared_dim else None
        bias = torch.zeros(config.num_experts, dtype=torch.float32) if config.has_bias else None
        self.register_buffer("expert_bias", bias)
        self.register_buffer("tokens_per_expert", torch.zeros(config.num_experts, dtype=torch.int64), persistent=False)
        self.batch: Any = None  # see Note [Counts]

    def forward(self, x: torch.Tensor) -> Any:
        self.config.check_input(tuple(x.shape))
        samples, length, dim = x.shape
        tokens = x.reshape(samples * length, dim)
        logits, scores, chosen, weights = self.router(tokens, self.expert_bias)
        counts = num_choices(chosen.flatten(), self.config.num_experts)
        if self.batch is not None:
            counts = self.batch.own(counts)
        if self._counts():
            self.tokens_per_expert.add_(counts)
        beside = None if self.shared is None else functools.partial(self.shared, tokens)
        mixed = self.experts(tokens, chosen, weights, self.config.score_before_experts, beside)
        if self.shared is not None:
            mixed = mixed[0] + mixed[1]
        output = mixed.reshape(samples, length, dim)
        if not self.config.has_losses:
            return output
        if self.batch is not None and self.config.balance_loss:
            counts = self.batch.total(counts)
        return output, auxiliary_loss(self.config, logits, scores, chosen, counts, samples)

    def _apply(self, fn: Any, recurse: bool = True) -> MoE:
        """``to(bfloat16)`` leaves the bias in float32: in 16 bits it would not move by small steps."""
        before = self.expert_bias
        super()._apply(fn, recurse)
        if before is not None and self.expert_bias is not None and self.expert_bias.dtype.itemsize < 4:
            self.expert_bias = before.to(self.expert_bias.device)
        return self

    def _counts(self) -> bool:
        platform = get_platform()
        return self.training and platform.is_recording() and not platform.runs_in_backward()
