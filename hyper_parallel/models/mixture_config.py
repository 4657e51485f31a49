"""The sizes of the reference model with mixtures of experts, the same for every framework."""

from __future__ import annotations

from dataclasses import dataclass, fields

from hyper_parallel.models.llama_config import LlamaConfig
from hyper_parallel.models.moe_config import MoEConfig

__all__ = ["MixtureConfig"]


@dataclass(frozen=True)
class MixtureConfig(LlamaConfig):
    """Sizes of a :class:`hyper_parallel.models.Mixture`: those of the Llama, and of the mixtures in its blocks.

    >>> MixtureConfig(num_experts=4, top_k=1).moe.hidden_dim
    128
    """

    num_experts: int = 8
    top_k: int = 2
    expert_dim: int = 128  # hidden features of each expert
    shared_dim: int = 0  # of the expert that every token has; 0: none
    num_dense_blocks: int = 0  # the first blocks, whose feed-forward network has hidden_dim features
    score_func: str = "softmax"
    normalize_scores: bool = True
    route_scale: float = 1.0
    num_expert_groups: int = 1
    num_limited_groups: int = 1
    group_score: str = "top2"
    score_before_experts: bool = False
    load_balance_coeff: float = 0.0
    balance_loss: float = 0.0
    sequence_loss: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.num_dense_blocks <= self.num_blocks:
            raise ValueError(
                f"MixtureConfig: num_dense_blocks={self.num_dense_blocks} must be from 0 to num_blocks="
                f"{self.num_blocks}, for they are the first of the blocks"
            )
        try:
            _ = self.moe
        except ValueError as error:
            told = str(error).removeprefix("MoEConfig: ").replace("hidden_dim", "expert_dim")
            raise ValueError(f"MixtureConfig: {told}") from None

    @property
    def moe(self) -> MoEConfig:
        """The mixture of one block."""
        own = {field.name for field in fields(self)} - {"hidden_dim"}
        shared = {field.name: getattr(self, field.name) for field in fields(MoEConfig) if field.name in own}
        return MoEConfig(hidden_dim=self.expert_dim, **shared)
