"""Which heads of an attention a rank computes, also when they do not divide the ranks.

Query heads are cut like any dim: blocks of ``ceil(num_heads / num_ranks)``, the last ones short or empty. A rank needs
the key heads that its query heads use. Where the key heads divide the ranks these are a block of their own. Where they
do not, two ranks may need the same key head, or query heads of one rank unequal numbers of them: then a rank makes one
key head for each of its query heads, so that attention sees as many of the one as of the other.
"""

from __future__ import annotations

from dataclasses import dataclass

from hyper_parallel.core.dtensor.layout import chunk_interval


@dataclass(frozen=True)
class HeadShare:
    """Heads of an attention on ``num_ranks`` ranks.

    >>> share = HeadShare(num_heads=6, num_kv_heads=3, num_ranks=4)
    >>> [share.query_heads(rank) for rank in range(4)]
    [[0, 1], [2, 3], [4, 5], []]
    >>> [share.key_heads(rank) for rank in range(4)]
    [[0, 0], [1, 1], [2, 2], []]
    """

    num_heads: int
    num_kv_heads: int
    num_ranks: int

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} query heads cannot share {self.num_kv_heads} key heads: the one must be a multiple "
                "of the other"
            )

    @property
    def divides(self) -> bool:
        """Whether every rank has the same number of query heads."""
        return self.num_heads % self.num_ranks == 0

    @property
    def kv_divides(self) -> bool:
        """Whether every rank has key heads of its own, the same number on each."""
        return self.num_kv_heads % self.num_ranks == 0

    def query_heads(self, rank: int) -> list[int]:
        start, length = chunk_interval(self.num_heads, self.num_ranks, rank)
        return list(range(start, start + length))

    def key_heads(self, rank: int) -> list[int]:
        if self.kv_divides:
            start, length = chunk_interval(self.num_kv_heads, self.num_ranks, rank)
            return list(range(start, start + length))
        group = self.num_heads // self.num_kv_heads
        return [head // group for head in self.query_heads(rank)]


def rows_of(heads: list[int], num_heads: int, num_rows: int, where: str) -> list[int]:
    """The rows of a weight that belong to ``heads``, in their order; every head has the same number of rows."""
    if num_rows % num_heads:
        raise ValueError(f"{where}: {num_rows} rows cannot be divided over {num_heads} heads")
    height = num_rows // num_heads
    return [head * height + row for head in heads for row in range(height)]
