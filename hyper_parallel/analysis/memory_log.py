"""Every allocation of a run, with when it was made and freed: what was alive at the peak, by kind and by module.

Note [Kinds of memory]
----------------------
Parameters, gradients, the optimizer's state, buffers and inputs are what is marked as such, whenever that is. Of the
rest, what was made in a forward pass (or in one that is done again in backward) and outlives the module that made it is
an activation: it is kept for backward, or passed on. All else is temporary. So an allocation's kind is known only when
the run is over, and all that is written down while it runs is its clock.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

KINDS = ("parameters", "gradients", "optimizer state", "activations", "temporaries", "buffers", "inputs")

FORWARD, BACKWARD, RECOMPUTE, OPTIMIZER = "forward", "backward", "recompute", "optimizer"
PHASES = (FORWARD, RECOMPUTE, BACKWARD, OPTIMIZER)


class Call:
    """One call of a module, or of what is outside of all; ``end`` is None while it runs."""

    __slots__ = ("end", "line", "path")

    def __init__(self, path: str, line: str = "") -> None:
        self.path, self.line = path, line
        self.end: int | None = None


class Allocation:
    """Memory from one moment to another."""

    __slots__ = ("born", "call", "died", "kind", "num_bytes", "phase")

    def __init__(self, num_bytes: int, phase: str, call: Call, born: int) -> None:
        self.num_bytes, self.phase, self.call, self.born = num_bytes, phase, call, born
        self.died: int | None = None
        self.kind: str | None = None

    def resolved_kind(self) -> str:
        """See Note [Kinds of memory]."""
        if self.kind is not None:
            return self.kind
        if self.phase not in (FORWARD, RECOMPUTE):
            return "temporaries"
        end = self.call.end
        return "activations" if end is None or self.died is None or self.died > end else "temporaries"


@dataclass(frozen=True)
class Peak:
    """The moment at which most memory was in use."""

    num_bytes: int
    clock: int
    phase: str
    path: str  # of the module that was running
    line: str  # of the program; in backward the one that called the module in forward


class MemoryLog:
    """Told of allocations by a platform's counting mode, and of modules and phases by the run."""

    def __init__(self) -> None:
        self.flops = 0
        self.live_bytes = 0
        self.phase = FORWARD
        self.flops_by_phase: dict[str, int] = {}
        self._clock = 0
        self._outside = Call("")
        self._calls: list[Call] = []
        self._made: list[Allocation] = []
        self._peak = Peak(0, 0, FORWARD, "", "")
        # Which call was running when autograd's nodes with these numbers were made, for those who run backward.
        self._node_numbers: list[int] = []
        self._callers: list[Call] = []
        self.node_number: Callable[[], int | None] = lambda: None
        self.next_node_number: Callable[[], int] = lambda: 0

    # ---------------------------------------------------------------- told by the mode

    def allocate(self, num_bytes: int, line: Callable[[], str]) -> Allocation:
        self._clock += 1
        phase, call = self.place()
        allocation = Allocation(num_bytes, phase, call, self._clock)
        self._made.append(allocation)
        self.live_bytes += num_bytes
        if self.live_bytes > self._peak.num_bytes:
            where = call.line if phase == BACKWARD else line()
            self._peak = Peak(self.live_bytes, self._clock, phase, call.path, where)
        return allocation

    def free(self, allocation: Allocation) -> None:
        self._clock += 1
        allocation.died = self._clock
        self.live_bytes -= allocation.num_bytes

    def place(self) -> tuple[str, Call]:
        """What is running now: the phase, and the call of a module."""
        if self.phase != BACKWARD:
            return self.phase, self._calls[-1] if self._calls else self._outside
        if self._calls:
            return RECOMPUTE, self._calls[-1]
        number = self.node_number()
        found = -1 if number is None else bisect_right(self._node_numbers, number) - 1
        return BACKWARD, self._callers[found] if 0 <= found < len(self._callers) - 1 else self._outside

    # ---------------------------------------------------------------- told by the run

    def enter(self, path: str, line: str) -> None:
        """A module begins, called by ``line`` of the program."""
        self._count_flops()
        self._calls.append(Call(path, line))
        self._note_caller()

    def leave(self) -> None:
        """The module that began last ends."""
        self._count_flops()
        self._clock += 1
        self._calls.pop().end = self._clock
        self._note_caller()

    def begin_phase(self, phase: str) -> None:
        self._count_flops()
        self._clock += 1
        self.phase = phase
        self._outside.end = self._clock
        self._outside = Call("")

    def begin_counting(self) -> None:
        """From here on: what is alive stays, the peak and the operations begin anew."""
        self.flops = 0
        self.flops_by_phase = {}
        self._made = [allocation for allocation in self._made if allocation.died is None]
        self._peak = Peak(self.live_bytes, self._clock, self.phase, "", "")

    def end_counting(self) -> None:
        self._count_flops()

    def _note_caller(self) -> None:
        self._node_numbers.append(self.next_node_number())
        self._callers.append(self._calls[-1] if self._calls else self._outside)

    def _count_flops(self) -> None:
        phase = RECOMPUTE if self.phase == BACKWARD and self._calls else self.phase
        done = sum(self.flops_by_phase.values())
        self.flops_by_phase[phase] = self.flops_by_phase.get(phase, 0) + self.flops - done

    # ---------------------------------------------------------------- asked afterwards

    @property
    def peak(self) -> Peak:
        return self._peak

    def alive_at_peak(self) -> list[Allocation]:
        clock = self._peak.clock
        return [one for one in self._made if one.born <= clock and (one.died is None or one.died > clock)]
