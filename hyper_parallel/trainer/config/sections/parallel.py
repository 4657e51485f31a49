"""``[parallel]``: how many ranks share what."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic.dataclasses import dataclass

from hyper_parallel.parallel.degrees import AXES, REST, Degrees
from hyper_parallel.trainer.config.section import STRICT, Count, Flag, Problem, Section, Text

__all__ = ["ParallelConfig"]

_Degree = Count | Literal["rest"]
_Schedule = Literal[
    "gpipe", "1f1b", "interleaved", "looped_bfs", "zb_h1", "zb_h2", "zb1p", "zbv", "v_half", "v_min", "dual_pipe_v"
]


@dataclass(config=STRICT, kw_only=True, frozen=True)
class ParallelConfig(Section):
    """How many ranks share what; the product of all but `ep` is the number of ranks."""

    dp_replicate: _Degree = 1
    """Copies of the model, each with its part of the batch."""
    dp_shard: _Degree = "rest"
    """Parts of the batch among which weights, gradients and optimizer state are sharded; "rest": all ranks left."""
    cp: _Degree = 1
    """Parts of the sequence."""
    tp: _Degree = 1
    """Parts of each layer."""
    pp: _Degree = 1
    """Stages of the model, one after the other; the more train.microbatches, the less they wait."""
    schedule: _Schedule = "1f1b"
    """With pp: what each rank does in which order; `hyper-parallel pipeline show` draws them."""
    stages_per_rank: Count | None = None
    """With pp: how many stages a rank has, for the schedules interleaved, looped_bfs and zb1p. None: 2."""
    ep: Count = 1
    """Groups of experts, on ranks of dp_shard, cp and tp."""
    sequence_parallel: Flag = True
    """With tp: activations between the halves of a block are sharded along the sequence."""
    attention: Literal["auto", "ring", "ulysses", "gather", "hybrid"] = "auto"
    """With cp: how queries meet the keys of other ranks; auto: the cheapest way."""
    order: Literal["contiguous", "zigzag", "striped"] = "contiguous"
    """With cp: how tokens lie on the ranks; zigzag and striped give them equal work in causal attention."""
    keep_whole: tuple[Text, ...] = ()
    """Patterns of the names of modules that tp leaves whole."""
    offload: Flag = False
    """Sharded parameters and optimizer state lie in host memory."""

    @property
    def degrees(self) -> Degrees:
        """The degrees as :func:`hyper_parallel.parallelize` takes them."""
        return Degrees(**{axis: getattr(self, axis) for axis in (*AXES, "ep")})

    def problems(self) -> Iterator[Problem]:
        # dp_shard is "rest" unless it is said, so another "rest" means that dp_shard was to be named.
        resting = sorted((axis for axis in AXES if getattr(self, axis) == REST), key=lambda axis: axis == "dp_shard")
        if len(resting) > 1:
            yield Problem(
                (resting[0], *resting),
                f"is {REST!r}, as is {resting[1]}; only one can take what the others leave: give {resting[1]} a number",
            )
