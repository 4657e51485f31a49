"""Experts of one size, their weights stacked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import Normal, initializer

from hyper_parallel.core.expert_parallel.experts_op import experts
from hyper_parallel.models.mindspore.feed_forward import std_into_stream

__all__ = ["GroupedExperts"]


class GroupedExperts(nn.Cell):
    """``num_experts`` SwiGLU networks: tokens, their experts and weights (tokens, choices) to the weighted sums."""

    runs_experts_operator = True

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        use_grouped_mm: bool = False,
        *,
        num_blocks: int | None = None,
    ) -> None:
        super().__init__()
        self.num_experts, self.use_grouped_mm = num_experts, use_grouped_mm
        inner, outer = Normal(0.02), Normal(std_into_stream(num_blocks))
        self.gate = Parameter(initializer(inner, (num_experts, hidden_dim, dim)), name="gate")
        self.up = Parameter(initializer(inner, (num_experts, hidden_dim, dim)), name="up")
        self.down = Parameter(initializer(outer, (num_experts, dim, hidden_dim)), name="down")

    def construct(
        self,
        tokens: Tensor,
        chosen: Tensor,
        weights: Tensor,
        weigh_inputs: bool = False,
        beside: Callable[[], Any] | None = None,
    ) -> Any:
        """See :func:`hyper_parallel.core.expert_parallel.experts_op.experts`, which splits it over ranks."""
        up = (self.gate, self.up)
        return experts(
            tokens, chosen, weights, up, self.down, activation=_swiglu, weigh_inputs=weigh_inputs, beside=beside
        )


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return ops.silu(gate) * up
