"""A mixture of experts for one device: each token goes through a few of many small feed-forward networks.

Its parts have the names of PyTorch's, and its numbers are the same; see the notes there, `models/torch/moe.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from hyper_parallel.models.mindspore.feed_forward import FeedForward, linear
from hyper_parallel.models.mindspore.grouped_experts import GroupedExperts
from hyper_parallel.models.mindspore.moe_losses import auxiliary_loss, num_choices
from hyper_parallel.models.moe_config import MoEConfig
from hyper_parallel.platform import get_platform

__all__ = ["MoE", "TokenChoiceTopKRouter"]


class TokenChoiceTopKRouter(nn.Cell):
    """Each token's best ``top_k`` experts: (tokens, dim) to (logits, scores, their choice, the weights of the chosen).

    In float32 at least, whatever the model's dtype. Of equal scores the expert with the lowest number is chosen.
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
        self.gate = linear(dim, num_experts)

    def construct(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dtype = mstype.float64 if x.dtype == mstype.float64 else mstype.float32
        logits = ops.matmul(x.astype(dtype), self.gate.weight.astype(dtype).T)
        scores = ops.sigmoid(logits) if self.config.score_func == "sigmoid" else ops.softmax(logits, -1)
        fixed = ops.stop_gradient(scores)
        chosen = self._choose(fixed if expert_bias is None else fixed + expert_bias)
        weights = ops.gather_elements(scores, 1, chosen)
        if self.config.normalize_scores:
            weights = weights / (weights.sum(-1, keepdims=True) + _LEAST)
        return logits, scores, chosen, weights * self.config.route_scale

    def _choose(self, scores: Tensor) -> Tensor:
        config = self.config
        if config.num_limited_groups < config.num_expert_groups:
            scores = self._limited(scores)
        return _by_size(scores)[:, : config.top_k].astype(mstype.int64)

    def _limited(self, scores: Tensor) -> Tensor:
        """Scores in which those of all but the best groups are out of reach."""
        config = self.config
        groups = scores.reshape(scores.shape[0], config.num_expert_groups, -1)
        best = ops.sort(groups, -1, True)[0][..., : 2 if config.group_score == "top2" else 1].sum(-1)
        kept = _by_size(best)[:, : config.num_limited_groups]
        numbers = Tensor(np.arange(config.num_expert_groups, dtype=np.int32))
        is_kept = (kept.expand_dims(-1) == numbers).astype(mstype.int32).sum(1) > 0
        return ops.masked_fill(groups, ops.logical_not(is_kept).expand_dims(-1), float("-inf")).reshape(scores.shape)


_LEAST = 1e-20  # sigmoids of a token may all be 0


def _by_size(values: Tensor) -> Tensor:
    """Places of the last dim from the largest value to the smallest, of equal ones the first first."""
    return ops.sort(values, -1, True)[1]


class MoE(nn.Cell):
    """A mixture of experts in the place of a feed-forward network; (samples, length, dim) to the same.

    ``MoE(dim, hidden_dim, num_experts, top_k, ...)`` with the fields of :class:`MoEConfig`, or ``MoE(config)``. With
    auxiliary losses it gives (output, their sum). ``num_blocks``: how many of them add to one stream.
    """

    def __init__(self, *args: Any, num_blocks: int | None = None, **options: Any) -> None:
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
        self.experts = GroupedExperts(
            config.dim, config.hidden_dim, config.num_experts, config.use_grouped_mm, num_blocks=num_blocks
        )
        self.shared = FeedForward(config.dim, config.shared_dim, num_blocks) if config.shared_dim else None
        bias = Tensor(np.zeros(config.num_experts, np.float32)) if config.has_bias else None
        self.register_buffer("expert_bias", bias)
        counts = Tensor(np.zeros(config.num_experts, np.int64))
        self.register_buffer("tokens_per_expert", counts, persistent=False)
        self.batch: Any = None

    def construct(self, x: Tensor) -> Any:
        self.config.check_input(tuple(x.shape))
        samples, length, dim = x.shape
        tokens = x.reshape(samples * length, dim)
        logits, scores, chosen, weights = self.router(tokens, self.expert_bias)
        counts = num_choices(chosen.reshape(-1), self.config.num_experts)
        if self.batch is not None:
            counts = self.batch.own(counts)
        if self._counts():
            self.tokens_per_expert.copy_(self.tokens_per_expert + counts)
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

    def _counts(self) -> bool:
        platform = get_platform()
        return platform.is_recording() and not platform.runs_in_backward()
