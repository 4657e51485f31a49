"""One forward of a root and its way back: which units came and went, and what backward does in the reverse order.

Note [Order on all ranks]
Ranks that communicate must do so in one order. In forward that is the program's. In backward it is the list of what
happened in forward, read from the end: where a unit was left its values are gathered again, where it was entered its
gradients are reduced. Backward says where it has come to, by a hook on what a unit gave and by the unit's edge. What
lies between that place and the last one was not reached on this rank, because its outputs were not used: the other
ranks may have reached it, so it is done all the same, with gradients of zeros. What is left at the end of backward is
done there.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from hyper_parallel.core.fully_shard.edge import enter
from hyper_parallel.core.fully_shard.output_tensors import tensors_in
from hyper_parallel.core.fully_shard.unit import WHOLE, Unit
from hyper_parallel.platform import get_platform

if TYPE_CHECKING:
    from hyper_parallel.core.fully_shard.root import Root

_platform = get_platform()


class _Entered:
    """A unit's parameters entered the graph, or were only used if they are frozen."""

    __slots__ = ("unit",)

    def __init__(self, unit: Unit) -> None:
        self.unit = unit


class _Left:
    """A module was left: from here on backward needs the whole values of its unit, and of those it borrowed from."""

    __slots__ = ("units",)

    def __init__(self, units: list[tuple[Unit, tuple[int, ...]]]) -> None:
        self.units = units  # with what `Unit.writes` gave in forward


class ForwardPass:
    """What happened between the call of a root and its return; see Note [Order on all ranks]."""

    def __init__(self, root: Root, number: int, is_recomputed: bool) -> None:
        self.root, self.number, self.is_recomputed = root, number, is_recomputed
        self._events: list[_Entered | _Left] = []
        self._entered_at: dict[Unit, int] = {}
        self._values: dict[Unit, list[Any]] = {}
        self._cursor = 0  # events from here on are done in the backward that runs
        self.used: list[Unit] = []  # in their order, for the next pass to prefetch

    # ---------------------------------------------------------------- forward

    def values_of(self, unit: Unit) -> list[Any]:
        """The whole values of the unit's parameters, which are gathered: what forward is to see."""
        if not _platform.is_recording():
            return _unrecorded(unit)
        if unit in self._values:
            return self._values[unit]
        self._entered_at[unit] = len(self._events)
        self._events.append(_Entered(unit))
        values = _unrecorded(unit) if unit.is_frozen else enter(unit, self, self._entered_at[unit])
        self._values[unit] = values
        if not self.is_recomputed:
            unit.gradients.watch(values)
        return values

    def leave(self, unit: Unit, outputs: Any) -> None:
        """A module of the unit has given its outputs, and operators are recorded."""
        units = [one for one in (unit, *unit.lenders) if one in self._entered_at]
        index = len(self._events)
        self._events.append(_Left([(one, one.gathered_writes if one.buffers else ()) for one in units]))

        def arrive() -> None:
            self._arrive(index)

        tensors = tensors_in(outputs)
        for module, name in unit.find_side_outputs():
            tensors += tensors_in(vars(module).get(name))
        if not _platform.before_backward(tensors, arrive) and not all(one.is_frozen for one in units):
            for one in units:
                one.stays_readable = True
            if not tensors and not unit.was_warned:
                unit.was_warned = True
                warnings.warn(
                    f"fully_shard: {unit} gave no tensor that could be found, so that nothing tells when its backward "
                    "begins: its parameters stay whole until backward has ended. Return tensors in tuples, lists, "
                    "dicts or dataclasses",
                    RuntimeWarning,
                    stacklevel=2,
                )

    def end(self) -> None:
        """The root has returned."""
        self._values = {}
        self._cursor = len(self._events)

    # ---------------------------------------------------------------- backward

    def _arrive(self, index: int) -> None:
        """Backward is about to go through what was left at ``index``."""
        event = self._events[index]
        assert isinstance(event, _Left)
        self.root.begin_backward(self)
        if all(self._entered_at[unit] >= self._cursor for unit, _ in event.units):
            return  # a hook of another output of this unit, all of which is behind us
        self._advance(index)
        for unit, writes in event.units:
            unit.check_unwritten(writes)
            unit.bring()
            unit.begin_backward()
            if _platform.is_recording():
                unit.outlives_backward = True  # a graph of the gradients uses the values again
        self._prefetch(index)

    def reduce(self, index: int, unit: Unit, gradients: list[Any], may_return_later: bool) -> list[Any] | None:
        """The gradients of a unit have come, by its edge at ``index``."""
        self.root.begin_backward(self)
        self._advance(index)
        self._close(unit, gradients)
        return unit.gradients.take(gradients, self.root.in_flight if may_return_later else None)

    def _advance(self, index: int) -> None:
        """Do what was not reached on this rank, down to ``index``, which the caller does."""
        while self._cursor > index:
            self._cursor -= 1
            if self._cursor > index:
                self._skip(self._cursor)

    def _skip(self, index: int) -> None:
        event = self._events[index]
        if isinstance(event, _Left):
            for unit, _ in event.units:
                unit.launch()
                unit.outlives_backward = unit.outlives_backward or _platform.is_recording()
            self._prefetch(index)
            return
        if _platform.is_recording():
            return  # backward of the gradients' own graph is still to come, and the values are needed there
        gradients: list[Any] = [None] * len(event.unit.parameters)
        self._close(event.unit, gradients)
        if not event.unit.is_frozen and not self.is_recomputed:
            event.unit.gradients.take(gradients, self.root.in_flight)

    def finish(self) -> None:
        """Do all that is left: backward has ended, or has come to an earlier pass."""
        self._advance(-1)

    def rewind(self) -> None:
        """Backward has ended; another one may come."""
        self._cursor = len(self._events)

    @staticmethod
    def _close(unit: Unit, gradients: list[Any]) -> None:
        """Backward is through with the unit; add what a recompute inside of it left to the gradients."""
        for i, left in enumerate(unit.end_backward()):
            if left is not None:
                gradients[i] = left if gradients[i] is None else gradients[i] + left
        unit.outlives_backward = False
        if unit.reshard_after_backward:
            unit.stays_readable = False
            unit.free()

    def _prefetch(self, index: int) -> None:
        """Start to gather what backward needs next: for the modules left before this one; see Note [Bytes ahead]."""
        unit = self._events[index].units[0][0]  # type: ignore[union-attr]
        if unit.backward_prefetch is not None:
            for wanted in unit.backward_prefetch:
                wanted.launch()
            return
        room, seen = self.root.gather_bytes, set()
        for place in range(index - 1, -1, -1):
            event = self._events[place]
            for following, _ in event.units if isinstance(event, _Left) else ():
                if following.state == WHOLE or following in seen:
                    continue
                seen.add(following)
                room -= following.num_bytes
                if room < 0:
                    return
                following.launch()


def _unrecorded(unit: Unit) -> list[Any]:
    with _platform.no_grad():
        return unit.values(unit.whole_tensors())
