"""Rows that are under way while something else computes: an all-to-all cut in two.

Between the two runs what the caller computes, or another micro-batch, which has its turn at a hook:

    forward        A | launch | B | wait        (C and D of the combine)
    backward       B | launch | A | wait

At the second hook the other thread of the pair has its turn, in both directions; see :class:`HookCoordinator`. What has
not come yet is kept aside: in between, autograd carries a tensor of the right shape.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.coordinator import HookCoordinator

__all__ = ["depart"]

_platform = get_platform()


class _Flight:
    """One all-to-all there, and the one back in backward; ``hooks`` are those before and behind it."""

    def __init__(
        self, sent: Sequence[int], received: Sequence[int], group: Any, coordinator: HookCoordinator | None, hooks: str
    ) -> None:
        self._splits, self._group = (list(sent), list(received)), group
        self._coordinator, self._hooks = coordinator, hooks
        self._under_way: tuple[Any, Any, Any] = (None, None, None)  # handle, memory that is filled, memory that is sent

    def launch(self, rows: Any, is_back: bool) -> Any:
        """Start it; the memory that is filled. forward: all-to-all, not awaited."""
        self._meet(is_back, self._hooks[is_back])
        sent, received = self._splits[::-1] if is_back else self._splits
        shape = (sum(received), *rows.shape[1:])
        buffer, work = _platform.all_to_all_single(rows, shape, self._group, True, received, sent)
        self._under_way = (work, buffer, rows)
        return buffer

    def land(self, is_back: bool) -> Any:
        """Let the other thread have its turn, then wait for what was launched; what has come."""
        self._meet(is_back, self._hooks[not is_back])
        (work, buffer, _), self._under_way = self._under_way, (None, None, None)
        if work is not None:
            work.wait()
        return buffer

    def _meet(self, is_back: bool, hook: str) -> None:
        if self._coordinator is None:
            return
        forward = "recompute" if _platform.runs_in_backward() else "forward"
        self._coordinator.rendezvous(hook, "backward" if is_back else forward)


class _Depart(_platform.Function):  # type: ignore[name-defined]
    """forward: all-to-all launched; backward: wait for the one back."""

    @staticmethod
    def forward(ctx: Any, rows: Any, flight: _Flight) -> Any:
        ctx.flight = flight
        return flight.launch(_platform.detached(rows), is_back=False)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        del gradient
        return ctx.flight.land(is_back=True), None


class _Arrive(_platform.Function):  # type: ignore[name-defined]
    """forward: wait for the all-to-all; backward: the one back, launched."""

    @staticmethod
    def forward(ctx: Any, rows: Any, flight: _Flight) -> Any:
        ctx.flight = flight
        del rows
        return flight.land(is_back=False)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        ctx.flight.launch(_platform.detached(gradient), is_back=True)
        return gradient, None


def depart(
    rows: Any,
    sent: Sequence[int],
    received: Sequence[int],
    group: Any,
    coordinator: HookCoordinator | None = None,
    hooks: str = "",
) -> Callable[[], Any]:
    """Start sending ``sent[r]`` rows to rank r of the group; a function that waits, once, and gives what has come.

    With a coordinator the other thread of the pair has its turn in between.

    forward: all-to-all launched, awaited by the function; backward: the one back launched there, awaited here.
    """
    flight = _Flight(sent, received, group, coordinator, hooks)
    under_way = _Depart.apply(rows, flight)
    return lambda: _Arrive.apply(under_way, flight)
