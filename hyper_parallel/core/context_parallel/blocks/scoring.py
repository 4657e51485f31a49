"""What makes weights of queries and keys: who sees whom, the scale, the soft cap, dropout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hyper_parallel.core.context_parallel.blocks.visibility import ALL, Interval, Visibility
from hyper_parallel.core.dtensor.layout import Shape
from hyper_parallel.core.dtensor.random.draw import Draw
from hyper_parallel.core.dtensor.random.random_fill import random_values_of
from hyper_parallel.core.dtensor.random.random_stream import GlobalRegion


@dataclass(frozen=True)
class Scoring:
    """The weights of a block of (batch, heads, queries) for keys, which are named by their global indices.

    Note [The same dropout under every scheme]
    Which weights are dropped is a random tensor of (batch, heads, queries, keys) that is addressed by the global place
    of each weight. So every rank, in whichever order it meets the keys, and backward again, makes its part of the same
    one.
    """

    visible: Visibility
    scale: float
    shape: Shape  # of all weights: batch, heads, queries, keys
    first_row: int = 0  # where this block begins in the batch and among the heads
    first_head: int = 0
    soft_cap: float | None = None
    dropout: float = 0.0
    draw: Draw | None = None

    @property
    def is_plain(self) -> bool:
        """Whether a fused kernel may do it: no soft cap, no dropout."""
        return not self.soft_cap and not self.dropout

    def of_heads(self, first: int) -> Scoring:
        """The same where this rank's heads begin at ``first``."""
        return replace(self, first_head=first)

    def mask_of(self, queries: Interval, keys: Interval, relation: str, like: Any) -> Any:
        """Booleans, True where seen, that broadcast to (batch, heads, queries, keys); None where all are seen."""
        return None if relation == ALL else self.visible.mask(queries, keys, like, self.first_head)

    def kept(self, queries: Interval, keys: Interval, like: Any) -> Any:
        """What the weights are multiplied with: 0 for those that are dropped; None without dropout."""
        if not self.dropout:
            return None
        assert self.draw is not None
        offsets = (self.first_row, self.first_head, queries[0], keys[0])
        sizes = (like.shape[0], like.shape[1], queries[1] - queries[0], keys[1] - keys[0])
        region = GlobalRegion(self.shape, offsets, sizes)
        kept = random_values_of("bernoulli", {"p": 1.0 - self.dropout}, self.draw, region, like.dtype, like.device)
        return kept * (0.0 if self.dropout == 1.0 else 1.0 / (1.0 - self.dropout))
