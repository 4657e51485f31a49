"""What the units of one model share: the pass that runs, the order of the last one, and reductions in flight.

A module that ``fully_shard`` is called on becomes the root of the units inside it. All state of a run hangs here, so
that a process may hold many models, and many ranks.
"""

from __future__ import annotations

import itertools
from typing import Any

from hyper_parallel.core.fully_shard.data_axes import DataAxes
from hyper_parallel.core.fully_shard.forward_pass import ForwardPass
from hyper_parallel.core.fully_shard.gradient_reduction import InFlight
from hyper_parallel.core.fully_shard.sharded_parameter import ShardedParameter
from hyper_parallel.core.fully_shard.unit import WHOLE, Unit
from hyper_parallel.platform import get_platform

_platform = get_platform()


class Root:
    """The shared state of the units inside one module."""

    def __init__(self, module: Any, axes: DataAxes) -> None:
        self.module, self.axes = module, axes
        self.units: list[Unit] = []
        self.in_flight = InFlight()
        self.reduce_op = "avg"
        self.scaling_factor: float | None = None
        self.own_unit: Unit | None = None  # that of the root's module itself
        self._depth = 0
        self._current: ForwardPass | None = None
        self._number = 0
        self._active: list[ForwardPass] = []  # reached by the backward that runs
        self._following: dict[Unit, Unit] = {}  # the unit used after a unit, in the last pass
        self._last: Unit | None = None
        self._known_group: Any = None
        #: What the user allows to be on its way besides what runs; None: see Note [Bytes ahead] and [Bytes in flight].
        self.most_gather_bytes: int | None = None
        self.most_reduction_bytes: int | None = None
        self._largest_unit = 0
        self._largest_reduction = 0

    @property
    def factor(self) -> float:
        """By what a sum of gradients is multiplied: the root's number of data ranks, whatever the unit's own."""
        if self.scaling_factor is not None:
            return self.scaling_factor
        return 1.0 if self.reduce_op == "sum" else 1.0 / self.axes.num_ranks

    @property
    def gather_bytes(self) -> int:
        """Of whole values that may be gathered ahead of the unit that runs; see Note [Bytes ahead]."""
        return self._largest_unit if self.most_gather_bytes is None else self.most_gather_bytes

    @property
    def reduction_bytes(self) -> int:
        """Of gradients that may be on their way beside backward."""
        return 2 * self._largest_reduction if self.most_reduction_bytes is None else self.most_reduction_bytes

    def name_of(self, wanted: ShardedParameter) -> str:
        """The parameter's name in the model."""
        for path, module in _platform.get_cells_and_names(self.module):
            if module is wanted.places[0][0]:
                return f"{path}.{wanted.places[0][1]}" if path else wanted.places[0][1]
        return wanted.name

    # ---------------------------------------------------------------- forward

    def enter(self, unit: Unit) -> ForwardPass:
        """A module of ``unit`` is called; its values and those it borrows are whole when this returns."""
        if self._depth == 0:
            self._begin()
        self._depth += 1
        current = self._current
        assert current is not None
        for one in (unit, *unit.lenders):
            if not current.is_recomputed:
                one.drop_stale()
            one.bring()
            one.num_users += 1
        if not current.is_recomputed:
            self._prefetch(unit)
            current.used.append(unit)
        return current

    def _begin(self) -> None:
        is_recomputed = _platform.runs_in_backward()
        if not is_recomputed:
            if self._active:
                self._recover()
            self._follow_world()
            for unit in self.units:
                if unit.reshard_after_forward and unit.reshard_after_backward and not unit.outlives_backward:
                    unit.free()  # kept for a backward that never came, or is still to come
                unit.refresh()
            self._largest_unit = max(unit.num_bytes for unit in self.units)
            self._largest_reduction = max(unit.gradients.num_bytes for unit in self.units)
        self._number += 1
        self._current = ForwardPass(self, self._number, is_recomputed)

    def _follow_world(self) -> None:
        """Ask for all groups again if a program has left its world and joined another."""
        axes = self.axes
        axes.forget_groups()
        group = axes.shard_group if axes.shard_axes else axes.replicate_group
        if group is not self._known_group:
            self._known_group = group
            for one in {id(p.axes): p.axes for unit in self.units for p in unit.parameters}.values():
                one.forget_groups()

    # Note [Bytes ahead]
    # While a unit runs, those that come next are gathered, in the order of the last pass and as long as their whole
    # values are not more bytes than are allowed: by default those of the largest unit, so that there is always room
    # for one, and for several that are small. Values that are there already do not count.

    def _prefetch(self, unit: Unit) -> None:
        if unit.forward_prefetch is not None:
            for wanted in unit.forward_prefetch:
                wanted.launch()
            return
        room, seen, following = self.gather_bytes, {unit}, self._following.get(unit)
        while following is not None and following not in seen:
            if following.state != WHOLE:
                room -= following.num_bytes
                if room < 0:
                    return
                following.launch()
            seen.add(following)
            following = self._following.get(following)

    def leave(self, unit: Unit, module: Any, outputs: Any) -> None:
        """A module of ``unit`` returns ``outputs``."""
        current = self._current
        assert current is not None
        records = False
        if not current.is_recomputed:
            records = _platform.is_recording()
            if records:
                current.leave(unit, outputs)
        if len(unit.modules) > 1:
            unit.called.add(id(module))
        for one in (unit, *unit.lenders):
            one.num_users -= 1
            if one is unit and 0 < len(unit.called) < len(unit.modules):
                continue  # others of its modules are still to come; the end of the pass gives back what never was
            if not current.is_recomputed and one.num_users == 0 and not (records and self._is_kept(one)):
                one.free_between()
        self._depth -= 1
        if self._depth == 0:
            self._end()

    def _is_kept(self, unit: Unit) -> bool:
        """Whether backward will need it at once."""
        return unit is self.own_unit or unit is self._last

    def _end(self) -> None:
        current, self._current = self._current, None
        assert current is not None
        current.end()
        if current.is_recomputed:
            return
        used = current.used
        self._following = {}
        for unit, following in itertools.pairwise(used):
            self._following.setdefault(unit, following)
        inner = [unit for unit in used if unit is not self.own_unit]
        self._last = inner[-1] if inner else None
        for unit in self.units:
            if 0 < len(unit.called) < len(unit.modules) and not self._is_kept(unit):
                unit.free_between()
            unit.called.clear()
            if unit.state == "launched":
                unit.free()  # prefetched, and not used after all

    def leave_by_error(self, unit: Unit) -> None:
        """A forward was left by an exception: no module sees whole values any more, and their memory is given back.

        A recomputed forward ends so as soon as it has made what was asked for: then nothing is given back.
        """
        if self._current is not None and self._current.is_recomputed:
            if unit.depth:
                unit.depth -= 1
            if unit.depth == 0:
                unit.unshadow()
                self._depth -= 1
                for one in (unit, *unit.lenders):
                    one.num_users = max(0, one.num_users - 1)
            if self._depth == 0:
                self._end()
            return
        self._depth, self._current = 0, None
        for one in self.units:
            one.abandon()

    # ---------------------------------------------------------------- backward

    def begin_backward(self, reached: ForwardPass) -> None:
        """Backward has come to a pass; later ones that it has gone through are completed first, as on all ranks."""
        if self._active and self._active[-1] is reached:
            return
        if not self._active:
            _platform.after_backward(self.end_backward)
        for later in self._active:
            if later.number > reached.number:
                later.finish()
        if reached in self._active:
            self._active.remove(reached)
        self._active.append(reached)

    def end_backward(self) -> None:
        """Do what the backward has not reached on this rank, and complete all reductions."""
        for reached in sorted(self._active, key=lambda one: -one.number):
            reached.finish()
        self.in_flight.drain()
        self._reset()

    def _reset(self) -> None:
        for reached in self._active:
            reached.rewind()
        self._active = []
        for unit in self.units:
            unit.end_backward()
            if unit.reshard_after_backward and not unit.outlives_backward:
                unit.stays_readable = False
                unit.free()

    def _recover(self) -> None:
        """The last backward ended with an error."""
        self.in_flight.abandon()
        self._reset()
