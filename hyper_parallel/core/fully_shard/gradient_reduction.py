"""One reduction of a unit's gradients: over the shard group, then over the replicas; and those that are in flight.

forward of the edge gathers, so its backward is a reduce-scatter: each rank ends with the sum of its own shard. Between
replicas of a shard follows an all-reduce. Always sums, scaled at the end by the factor that the root gives: with one
factor for all units, those on other meshes (experts) are right without a setting of their own.

Note [Bytes in flight]
What is sent lies beside the whole gradients of the units that backward comes to next, until the reduction is complete.
So reductions that run beside backward are bounded by the bytes that they will give back, by default those of two of the
largest units; the oldest is waited for when there would be more. What all ranks have whole is reduced where it lies and
becomes the gradients: it gives nothing back, and is not waited for before the end of backward.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hyper_parallel.core.dtensor.comm_recorder import attributed
from hyper_parallel.core.fully_shard.gradient_layout import GradientLayout
from hyper_parallel.platform import get_platform

if TYPE_CHECKING:
    from hyper_parallel.core.fully_shard.unit import Unit

_platform = get_platform()


class Reduction:
    """The gradients of a unit on their way to shards."""

    def __init__(self, unit: Unit, layouts: list[GradientLayout], gradients: list[Any], device: Any) -> None:
        self.unit, self._layouts = unit, layouts
        self.num_bytes = unit.gradients.num_bytes
        self._missing = [gradient is None for gradient in gradients]
        self._results: list[list[Any]] = []
        self._handles: list[Any] = []
        self._kept: list[Any] = []  # what is being sent
        with unit.reducing:
            for layout in layouts:
                self._results.append(attributed(unit.reduce_reason, self._scatter, layout, gradients, device))
        self._is_scattered = False

    def _scatter(self, layout: GradientLayout, gradients: list[Any], device: Any) -> list[Any]:
        sent = [layout.sent_alone(p, gradients[i], device) for i, p in layout.large]
        sent.append(layout.sent_packed(gradients, device))
        if layout.num_rows == 1:
            return sent
        self._kept.append(sent)
        group = layout.axes.shard_group
        if len(sent) > 1:  # see Note [Straight into place]
            results, handle = _platform.reduce_scatter_tensors(sent, group, True)
        else:
            result, handle = _platform.reduce_scatter_tensor(sent[0], group, True)
            results = [result]
        self._handles.append(handle)
        return results

    def _wait(self) -> None:
        with self.unit.reducing:
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
        with self.unit.reducing_replicas:
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
        factor, gradients = self.unit.root.factor, self.unit.gradients
        for layout, results in zip(self._layouts, self._results, strict=True):
            used = layout.used_by_any(results) if any(self._missing[i] for i, _ in layout.parameters) else None
            results = [_platform.scale(result, factor) for result in results]
            found = layout.blocks(gradients.as_gradients(results, layout.parameters[0][1]))
            for place, (i, _) in enumerate(layout.parameters):
                if used is None or used[place] or not self._missing[i]:
                    blocks[i] = found[i]
        return blocks


class InFlight:
    """Reductions whose results go to ``grad`` when they are complete, in the order in which they were started."""

    def __init__(self) -> None:
        self._reductions: list[Reduction] = []
        self._num_bytes = 0

    def add(self, reduction: Reduction, most_bytes: int) -> None:
        """Let a reduction go on beside backward; see Note [Bytes in flight]."""
        if self._reductions:
            self._reductions[-1].go_on()
        if not reduction.num_bytes:
            reduction.go_on()
        self._reductions.append(reduction)
        self._num_bytes += reduction.num_bytes
        while self._num_bytes > most_bytes:
            self._deliver(self._reductions.pop(0))

    def drain(self) -> None:
        for reduction in self._reductions:
            reduction.go_on()
        while self._reductions:
            self._deliver(self._reductions.pop(0))

    def abandon(self) -> None:
        """Forget what is in flight after an error; its memory is in use until it has come."""
        reductions, self._reductions, self._num_bytes = self._reductions, [], 0
        for reduction in reductions:
            try:
                reduction.go_on()
            except RuntimeError:
                continue

    def _deliver(self, reduction: Reduction) -> None:
        self._num_bytes -= reduction.num_bytes
        reduction.unit.gradients.deliver(reduction.finish())
