"""One reduction of a unit's gradients: over the shard group, then over the replicas; and those that are in flight.

forward of the edge gathers, so its backward is a reduce-scatter: each rank ends with the sum of its own shard. Between
replicas of a shard follows an all-reduce. Always sums, scaled at the end by the factor that the root gives: with one
factor for all units, those on other meshes (experts) are right without a setting of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.comm_recorder import attributed
from hyper_parallel.core.fully_shard.gradient_layout import GradientLayout
from hyper_parallel.platform import get_platform

if TYPE_CHECKING:
    from hyper_parallel.core.fully_shard.unit import Unit

_platform = get_platform()

MOST_IN_FLIGHT = 2


class Reduction:
    """The gradients of a unit on their way to shards."""

    def __init__(self, unit: Unit, layouts: list[GradientLayout], gradients: list[Any], device: Any) -> None:
        self.unit, self._layouts = unit, layouts
        self._missing = [gradient is None for gradient in gradients]
        self._results: list[list[Any]] = []
        self._handles: list[Any] = []
        self._kept: list[Any] = []  # what is being sent
        with unit.naming("reduction of the gradients"):
            for layout in layouts:
                self._results.append(attributed(unit.reduce_reason, self._scatter, layout, gradients, device))
        self._is_scattered = False

    def _scatter(self, layout: GradientLayout, gradients: list[Any], device: Any) -> list[Any]:
        sent = [layout.sent_alone(p, gradients[i], device) for i, p in layout.large]
        sent.append(layout.sent_packed(gradients, device))
        if layout.num_rows == 1:
            return sent
        group = layout.axes.shard_group
        results = []
        for data in sent:
            result, handle = _platform.reduce_scatter_tensor(data, group, True)
            results.append(result)
            self._handles.append(handle)
        self._kept.append(sent)
        return results

    def _wait(self) -> None:
        with self.unit.naming("reduction of the gradients"):
            for handle in self._handles:
                handle.wait()
        self._handles, self._kept = [], []

    def go_on(self) -> None:
        """Finish the reduce-scatter and start the all-reduce between replicas."""
        if self._is_scattered:
            return
        self._wait()
        self._is_scattered = True
        state = self.unit.gradients
        state.add_partial(self._results, self._missing)
        if not state.all_reduces:
            return
        with self.unit.naming("reduction of the gradients between replicas"):
            for layout, results in zip(self._layouts, self._results, strict=True):
                if layout.axes.num_replicas > 1:
                    group = layout.axes.replicate_group
                    self._handles += [
                        attributed(self.unit.reduce_reason, _platform.all_reduce, result, group, True)[1]
                        for result in results
                    ]

    def finish(self) -> list[Any]:
        """This rank's block of each gradient; None for frozen parameters and those that no rank used."""
        self.go_on()
        self._wait()
        blocks: list[Any] = [None] * len(self._missing)
        if not self.unit.gradients.all_reduces:
            return blocks
        factor = self.unit.root.factor
        for layout, results in zip(self._layouts, self._results, strict=True):
            used = [True] * len(layout.parameters)
            if any(self._missing[i] for i, _ in layout.parameters):
                used = layout.used_by_any(results)
            results = [_platform.scale(result, factor) for result in results]
            found = layout.blocks(self.unit.gradients.as_gradients(results, layout.parameters[0][1]))
            for (i, _), is_used in zip(layout.parameters, used, strict=True):
                if is_used or not self._missing[i]:
                    blocks[i] = found[i]
        return blocks


class InFlight:
    """Reductions whose results go to ``grad`` when they are complete, in the order in which they were started."""

    def __init__(self) -> None:
        self._reductions: list[Reduction] = []

    def add(self, reduction: Reduction) -> None:
        """Let a reduction go on beside backward; those started before it are completed but for a few."""
        if self._reductions:
            self._reductions[-1].go_on()
        self._reductions.append(reduction)
        while len(self._reductions) > MOST_IN_FLIGHT:
            self._deliver(self._reductions.pop(0))

    def drain(self) -> None:
        for reduction in self._reductions:
            reduction.go_on()
        while self._reductions:
            self._deliver(self._reductions.pop(0))

    def abandon(self) -> None:
        """Forget what is in flight after an error; its memory is in use until it has come."""
        reductions, self._reductions = self._reductions, []
        for reduction in reductions:
            try:
                reduction.go_on()
            except RuntimeError:
                continue

    @staticmethod
    def _deliver(reduction: Reduction) -> None:
        reduction.unit.gradients.deliver(reduction.finish())
