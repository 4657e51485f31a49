"""The weights of experts and what an expert computes: projections, an activation, a projection back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hyper_parallel.core.expert_parallel.row_counts import RowCounts
from hyper_parallel.platform import get_platform

__all__ = ["ExpertWeights"]

_platform = get_platform()


@dataclass(frozen=True)
class ExpertWeights:
    """Experts as tensors whose first dim is the expert.

    An expert gives ``activation(x @ up[0].T, x @ up[1].T, ...) @ down.T``, with biases where there are any. Weights are
    (experts, outputs, inputs), with ``is_transposed`` (experts, inputs, outputs); biases (experts, outputs).
    """

    up: tuple[Any, ...]
    down: Any
    activation: Callable[..., Any]
    up_bias: tuple[Any, ...] | None = None
    down_bias: Any = None
    is_transposed: bool = False

    @property
    def num_experts(self) -> int:
        """Of the tensors as they are: of all experts, or of a block of them."""
        return int(self.down.shape[0])

    @property
    def tensors(self) -> list[Any]:
        """All of them, in a fixed order."""
        return [*self.up, self.down, *(self.up_bias or ()), *([] if self.down_bias is None else [self.down_bias])]

    def with_tensors(self, tensors: Sequence[Any]) -> ExpertWeights:
        """The same with other tensors, in the order of :attr:`tensors`."""
        given = list(tensors)
        num_up = len(self.up)
        up, down, rest = tuple(given[:num_up]), given[num_up], given[num_up + 1 :]
        up_bias = None if self.up_bias is None else tuple(rest[:num_up])
        down_bias = None if self.down_bias is None else rest[-1]
        return replace(self, up=up, down=down, up_bias=up_bias, down_bias=down_bias)

    def fits(self, features: int) -> bool:
        """Whether the shapes are those of experts that take, and give, rows of so many features."""
        inputs, outputs = (1, 2) if self.is_transposed else (2, 1)
        if not self.up or any(one.ndim != 3 for one in (*self.up, self.down)):
            return False
        sizes = [int(one.shape[inputs]) for one in self.up] + [int(self.down.shape[outputs])]
        biases = [tuple(one.shape[1:]) for one in self.up_bias or ()]
        of_up = [] if self.up_bias is None else [(int(one.shape[outputs]),) for one in self.up]
        of_down = self.down_bias is None or tuple(self.down_bias.shape[1:]) == (features,)
        return set(sizes) == {features} and biases == of_up and of_down

    def __call__(self, rows: Any, counts: RowCounts) -> Any:
        """The experts on rows that are ordered by expert. Every weight enters the graph, also with no rows at all."""
        if not rows.shape[0]:
            width = int(self.down.shape[2 if self.is_transposed else 1])
            return _platform.no_rows(width, rows, self.tensors)
        biases = (None,) * len(self.up) if self.up_bias is None else self.up_bias
        projected = [
            _platform.grouped_linear(rows, weight, bias, counts, self.is_transposed)
            for weight, bias in zip(self.up, biases, strict=True)
        ]
        inner = self.activation(*projected)
        return _platform.grouped_linear(inner, self.down, self.down_bias, counts, self.is_transposed)
