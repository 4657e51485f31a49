"""A forward and a backward of other microbatches at once: what one sends is under way while the other computes.

Note [Two threads, one at a time]
The backward runs in a thread of its own. The two take turns at the hooks around what travels, where one has launched a
collective that it would wait for next; see Note [In turns] of the coordinator. The order of turns follows from the
hooks alone, so collectives come in one order on all ranks, and the numbers are those of one after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from hyper_parallel.core.dtensor.random.sample_address import current
from hyper_parallel.core.modules.meeting_point import meeting_at
from hyper_parallel.core.pipeline_parallel.table import Table
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.coordinator import HookCoordinator
from hyper_parallel.platform.shared.membership import state_of_thread

__all__ = ["Overlap", "overlap_for"]

_platform = get_platform()
_NEVER = 1e8  # seconds: one of the two always runs, and what it waits for has a limit of its own


def _draws() -> Callable[[], None]:
    """Random numbers as they are: what is computed again sets them, and the other half may come in between."""
    state, address = _platform.get_draw_state(), current.address

    def bring_back() -> None:
        _platform.set_draw_state(state)
        current.address = address

    return bring_back


class Overlap:
    """Runs pairs of computations in turns; see Note [Two threads, one at a time]."""

    def __init__(self) -> None:
        self.coordinator = HookCoordinator(timeout=_NEVER, in_turns=True, keep=_draws)

    def around(self) -> AbstractContextManager[None]:
        """Around every computation of a table, so that what travels can meet the other half of a pair."""
        return meeting_at(self.coordinator)

    def both(self, forward: Callable[[], None], backward: Callable[[], None]) -> None:
        """Run both; the error of the one that failed first is raised when both have ended."""
        coordinator, failures = self.coordinator, list[BaseException]()
        take_over, stream = state_of_thread(), _platform.get_current_stream()

        def work(direction: str, body: Callable[[], None]) -> None:
            with coordinator.taking_part(direction):
                try:
                    body()
                except BaseException as error:
                    failures.append(error)
                    raise

        def beside() -> None:
            take_over()
            try:
                with _platform.get_stream_context()(stream):
                    work("backward", backward)
            except BaseException as error:
                failures.append(error)

        coordinator.enable()
        thread = threading.Thread(target=beside, name=f"{threading.current_thread().name}, backward", daemon=True)
        thread.start()
        try:
            work("forward", forward)
        except BaseException as error:
            failures.append(error)
        finally:
            bring_back = _draws()
            thread.join()
            bring_back()
            coordinator.disable()
        if failures:
            raise failures[0]


def overlap_for(table: Table) -> Overlap | None:
    """What runs the pairs of a table; None where it has none, or one after the other is all that a framework can do."""
    has_pairs = any(action.parts and action.is_computed for _, _, action in table)
    return Overlap() if has_pairs and _platform.records_during_backward else None
