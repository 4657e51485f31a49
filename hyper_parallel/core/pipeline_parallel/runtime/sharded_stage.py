"""The weights of a stage under ``fully_shard`` or ``replicate``: gathered, let go and reduced by actions of the table.

The units of a rank's stages are those of their blocks, and the root's, which has what lies before and behind the
blocks: where one rank has the first and the last stage both use it, and it is let go and reduced with the second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hyper_parallel.core.fully_shard.hsdp_module import HSDPModule, reduce_gradients_of, unit_of
from hyper_parallel.core.fully_shard.unit import Unit
from hyper_parallel.core.pipeline_parallel.stages.split import Split
from hyper_parallel.platform import get_platform

__all__ = ["ShardedStages", "units_of_stages"]

_platform = get_platform()


def units_of_stages(model: HSDPModule, split: Split, stages: Sequence[int]) -> dict[int, list[Unit]]:
    """The units of the stages of a model that was cut."""
    found: dict[int, list[Unit]] = {stage: [] for stage in stages}
    for path, module in _platform.get_cells_and_names(model):
        unit = unit_of(module)
        if unit is None:
            continue
        for stage in [split.stage_of(path)] if path else (0, split.num_stages - 1):
            if stage in found and unit not in found[stage]:
                found[stage].append(unit)
    return found


class ShardedStages:
    """The units of a rank's stages, which are those of ``models``."""

    def __init__(self, models: Sequence[HSDPModule], units: Mapping[int, Sequence[Unit]]) -> None:
        self._units = units
        for model in models:
            model.set_reshard_after_forward(False)
            model.set_reshard_after_backward(False)
            model.set_requires_gradient_sync(False)
        self._users: dict[Unit, set[int]] = {}
        for stage, found in units.items():
            for unit in found:
                self._users.setdefault(unit, set()).add(stage)
        self._unreduced: dict[Unit, set[int]] = {}
        self._gathered: dict[Unit, set[int]] = {}

    def begin(self) -> None:
        """A step begins: parameters may have changed."""
        self._unreduced = {unit: set(users) for unit, users in self._users.items()}
        self._gathered = {unit: set() for unit in self._users}
        for unit in self._users:
            unit.refresh()
            unit.drop_stale()

    def unshard(self, stage: int) -> None:
        """Start to gather the weights of a stage. forward: an all-gather for each of its units over the data ranks."""
        for unit in self._units[stage]:
            self._gathered[unit].add(stage)
            unit.is_unsharded = True
            unit.launch()

    def reshard(self, stage: int) -> None:
        """Give the memory of the whole weights of a stage back."""
        for unit in self._units[stage]:
            self._gathered[unit].discard(stage)
            if not self._gathered[unit]:
                unit.is_unsharded = False
                unit.free()

    def reduce(self, stage: int, is_whole: bool) -> None:
        """Reduce the gradients of a stage: a reduce-scatter for each of its units over the data ranks.

        ``is_whole``: those of all microbatches; a unit that two stages share is reduced with the second.
        """
        ready = []
        for unit in self._units[stage]:
            self._unreduced[unit].discard(stage)
            if not is_whole or not self._unreduced[unit]:
                ready.append(unit)
        reduce_gradients_of(ready)

    def forget(self) -> None:
        """Let go of what an interrupted step has left."""
        for unit in self._users:
            unit.is_unsharded = False
            unit.abandon()
