"""The sizes and the routing of a mixture of experts, the same for every framework."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["MoEConfig"]


@dataclass(frozen=True)
class MoEConfig:
    """A :class:`hyper_parallel.models.MoE`: its experts, how tokens choose among them, and what keeps them balanced.

    >>> MoEConfig(dim=64, hidden_dim=32, num_experts=8, top_k=2).has_losses
    False
    """

    dim: int
    hidden_dim: int  # of each expert
    num_experts: int
    top_k: int  # experts of each token
    score_before_experts: bool = True  # scores multiply the experts' inputs; False: their outputs
    load_balance_coeff: float = 1e-3  # the step of each update of the experts' bias; 0: they have none
    use_grouped_mm: bool = False  # for code that says so; products are grouped wherever device and dtype allow it
    score_func: str = "sigmoid"  # or "softmax"
    normalize_scores: bool = True  # the scores of a token's experts add up to 1, before they are scaled
    route_scale: float = 1.0
    num_expert_groups: int = 1  # experts lie in groups of neighbours,
    num_limited_groups: int = 1  # of which a token's experts are in so many
    group_score: str = "top2"  # a group counts by the sum of its two best; or "max", by its best
    shared_dim: int = 0  # hidden features of an expert that every token has; 0: none
    balance_loss: float = 0.0  # factors of the auxiliary losses; see Note [Auxiliary losses] in moe_losses.py
    sequence_loss: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        for name in ("dim", "hidden_dim", "num_experts", "top_k", "num_expert_groups", "num_limited_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"MoEConfig: {name} must be at least 1, got {getattr(self, name)}")
        for name in ("shared_dim", "load_balance_coeff", "balance_loss", "sequence_loss", "z_loss"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"MoEConfig: {name} must be a finite number from 0, got {getattr(self, name)}")
        if not 0 < self.route_scale < math.inf:
            raise ValueError(f"MoEConfig: route_scale must be a finite number above 0, got {self.route_scale}")
        for name, known in (("score_func", ("sigmoid", "softmax")), ("group_score", ("top2", "max"))):
            if getattr(self, name) not in known:
                raise ValueError(f"MoEConfig: {name}={getattr(self, name)!r} is none of {', '.join(map(repr, known))}")
        if self.num_experts % self.num_expert_groups:
            raise ValueError(
                f"MoEConfig: num_experts={self.num_experts} must be a multiple of "
                f"num_expert_groups={self.num_expert_groups}, for groups are of one size"
            )
        if self.num_limited_groups > self.num_expert_groups:
            raise ValueError(
                f"MoEConfig: num_limited_groups={self.num_limited_groups} is more than there are groups, "
                f"num_expert_groups={self.num_expert_groups}"
            )
        choices = self.num_experts // self.num_expert_groups * self.num_limited_groups
        if self.top_k > choices:
            raise ValueError(
                f"MoEConfig: top_k={self.top_k} is more than the {choices} experts a token may choose from"
            )

    def check_input(self, shape: tuple[int, ...]) -> None:
        """An error for what a mixture cannot take."""
        if len(shape) != 3 or shape[-1] != self.dim:
            raise ValueError(f"MoE takes (samples, length, {self.dim}), got {shape}")

    @property
    def has_losses(self) -> bool:
        """Whether there are auxiliary losses."""
        return self.balance_loss > 0 or self.sequence_loss > 0 or self.z_loss > 0

    @property
    def has_bias(self) -> bool:
        """Whether the choice of experts has a bias that evens out their load."""
        return self.load_balance_coeff > 0
