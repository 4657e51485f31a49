"""Experts of one size, their weights stacked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hyper_parallel.core.expert_parallel.experts_op import experts

__all__ = ["GroupedExperts"]


class GroupedExperts(nn.Module):
    """``num_experts`` SwiGLU networks: tokens, and the experts and weights of each (tokens, choices), to weighted sums.

    >>> experts = GroupedExperts(dim=4, hidden_dim=6, num_experts=3)
    >>> experts(torch.ones(2, 4), torch.tensor([[0], [2]]), torch.ones(2, 1)).shape
    torch.Size([2, 4])
    """

    runs_experts_operator = True

    def __init__(self, dim: int, hidden_dim: int, num_experts: int, use_grouped_mm: bool = False) -> None:
        super().__init__()
        self.num_experts, self.use_grouped_mm = num_experts, use_grouped_mm
        self.gate = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.up = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.down = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for weight in (self.gate, self.up, self.down):
            nn.init.normal_(weight, std=0.02)

    def forward(
        self,
        tokens: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        weigh_inputs: bool = False,
        beside: Callable[[], Any] | None = None,
    ) -> Any:
        """See :func:`hyper_parallel.core.expert_parallel.experts_op.experts`, which splits it over ranks."""
        up = (self.gate, self.up)
        return experts(
            tokens, chosen, weights, up, self.down, activation=_swiglu, weigh_inputs=weigh_inputs, beside=beside
        )


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up
