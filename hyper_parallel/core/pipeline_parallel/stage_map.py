"""Where the stages of a pipeline lie: in a loop over the ranks, in a V down and up again, or as the user says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageMap:
    """The rank of each stage, as a value.

    >>> StageMap.loop(2, 2).rank_of, StageMap.v(2).rank_of
    ((0, 1, 0, 1), (0, 1, 1, 0))
    """

    rank_of: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.rank_of:
            raise ValueError("stages: there are none; give the rank of each, such as 0 1 1 0")
        idle = sorted(set(range(max(self.rank_of) + 1)) - set(self.rank_of))
        if min(self.rank_of) < 0 or idle:
            what = f"rank {idle[0]} has none" if idle else f"{min(self.rank_of)} is no rank"
            raise ValueError(f"stages {' '.join(map(str, self.rank_of))}: {what}; number the ranks from 0 without gaps")

    @classmethod
    def loop(cls, ranks: int, stages_per_rank: int = 1) -> StageMap:
        """Stage s on rank s modulo ``ranks``."""
        return cls(tuple(range(ranks)) * stages_per_rank)

    @classmethod
    def v(cls, ranks: int) -> StageMap:
        """Two stages a rank: down the ranks and up again, so that the first and the last stage share rank 0."""
        return cls((*range(ranks), *reversed(range(ranks))))

    @property
    def num_ranks(self) -> int:
        """How many ranks hold stages."""
        return max(self.rank_of) + 1

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.rank_of)

    @property
    def last(self) -> int:
        """The stage that has the loss."""
        return len(self.rank_of) - 1

    @property
    def stages_per_rank(self) -> int:
        """The most stages that a rank holds."""
        return max(map(self.rank_of.count, range(self.num_ranks)))

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages of a rank, in the order of the model."""
        return tuple(stage for stage, owner in enumerate(self.rank_of) if owner == rank)
