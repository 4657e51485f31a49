"""Worlds of real processes for tests: `run_on_ranks` runs a test on every rank, `worlds(n).run(f)` any function.

How it is built, one file each: `plugin` (pytest options and fixture), `decorator` (`run_on_ranks`), `world` (runs calls
on the ranks of a world and replaces it after a failure), `failures` (what a failure says), `nursery` and
`nursery_process` (where the ranks come from), `worker` (what a rank does), `messages` (what they say to each other),
`frameworks` (what differs between PyTorch and MindSpore).
"""

from tests.world.decorator import run_on_ranks, small_or_sweep
from tests.world.failures import RanksFailed
from tests.world.world import World, Worlds

__all__ = ["RanksFailed", "World", "Worlds", "run_on_ranks", "small_or_sweep"]
