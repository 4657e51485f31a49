"""Ranks as threads of which exactly one runs: a rank runs until it waits for others, then the next that can go on does.

Note [Taking turns]
-------------------
The order is that of the ranks, so a program that does the same again runs in the same order again. A rank hands its
turn over in two places only: where it waits, and where it ends. So there is always one thread that runs, and what a
rank does between two waits is not disturbed. When a rank waits and none can go on, none ever will: that is a deadlock,
known at once, and every rank's wait is known with it.

When a rank fails, the others are ended one after the other, each in its turn and with its own state in place: their
waits raise :class:`Stopped`, which no ``except Exception`` catches.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

from hyper_parallel.platform.shared.membership import load_state_of_rank, save_state_of_rank


class Deadlock(Exception):
    """No rank can go on; the message says what each waits for."""


class Stopped(BaseException):
    """Another rank has failed, so this one ends."""


class _Wait:
    """A rank that waits: whether it can go on, what it waits for, and whether its own time limit may end it."""

    __slots__ = ("describe", "has_limit", "is_ready", "timed_out")

    def __init__(self, is_ready: Callable[[], bool], describe: Callable[[], str], has_limit: bool) -> None:
        self.is_ready, self.describe, self.has_limit = is_ready, describe, has_limit
        self.timed_out = False


class Turns:
    """One run of a body on each of ``num_ranks`` threads."""

    def __init__(self, num_ranks: int) -> None:
        self._num_ranks = num_ranks
        self._turn = [threading.Semaphore(0) for _ in range(num_ranks)]
        self._waits: dict[int, _Wait] = {}
        self._saved: dict[int, list[Any]] = {}
        self._ended: set[int] = set()
        self._over = threading.Event()
        self.failed_rank: int | None = None
        self.failure: BaseException | None = None

    # ---------------------------------------------------------------- the run, as its caller sees it

    def run(self, body: Callable[[int], Any], timeout: float | None) -> list[Any]:
        """The results of ``body(rank)`` by rank; raises what the first rank that failed has raised."""
        before = save_state_of_rank()
        results: list[Any] = [None] * self._num_ranks
        threads = [
            threading.Thread(target=self._be_rank, args=(rank, body, results, before), name=f"rank {rank}", daemon=True)
            for rank in range(self._num_ranks)
        ]
        for thread in threads:
            thread.start()
        self._turn[0].release()
        try:
            if not self._over.wait(timeout):
                raise TimeoutError(f"the ranks did not end within {timeout:g} s:\n{_stacks(threads)}")
        except BaseException as error:  # The time is over, or Ctrl-C: whoever runs is stopped at its next wait.
            self.failure = self.failure or error
            raise
        finally:
            for thread in threads if self._over.is_set() else ():
                thread.join()
            load_state_of_rank(before)
        if self.failure is not None:
            raise self.failure
        return results

    def _be_rank(self, rank: int, body: Callable[[int], Any], results: list[Any], before: list[Any]) -> None:
        self._turn[rank].acquire()
        load_state_of_rank(before)
        try:
            if self.failure is None:
                results[rank] = body(rank)
        except Stopped:
            pass
        except BaseException as error:
            if self.failure is None:
                self.failed_rank, self.failure = rank, error
        self._ended.add(rank)
        self._hand_over(rank)

    # ---------------------------------------------------------------- waiting, as a rank does it

    def wait_until(
        self, rank: int, is_ready: Callable[[], bool], describe: Callable[[], str], has_limit: bool = False
    ) -> bool:
        """Let others run until ``is_ready()``; False if none could go on and this wait ``has_limit``."""
        if self.failure is None and is_ready():
            return True
        return self._pause(rank, _Wait(is_ready, describe, has_limit))

    def let_others_run(self, rank: int) -> None:
        """Let others run for a while: what a rank that asks again and again does."""
        self._pause(rank, _Wait(lambda: True, lambda: "looks whether an operation has ended", False))

    def _pause(self, rank: int, wait: _Wait) -> bool:
        if self.failure is not None:
            raise Stopped
        self._waits[rank] = wait
        self._saved[rank] = save_state_of_rank()
        self._hand_over(rank)
        self._turn[rank].acquire()
        load_state_of_rank(self._saved.pop(rank))
        if self.failure is not None:
            raise Stopped
        return not wait.timed_out

    def _hand_over(self, rank: int) -> None:
        if len(self._ended) == self._num_ranks:
            self._over.set()
            return
        following = [(rank + step) % self._num_ranks for step in range(1, self._num_ranks + 1)]
        others = [other for other in following if other not in self._ended]
        chosen = next((other for other in others if self._can_run(other)), None)
        if chosen is None:
            chosen = next((other for other in others if self._waits[other].has_limit), None)
            if chosen is not None:
                self._waits[chosen].timed_out = True
            else:
                self.failure = Deadlock(self._describe_deadlock())
                chosen = others[0]
        self._waits.pop(chosen, None)
        self._turn[chosen].release()

    def _can_run(self, rank: int) -> bool:
        return self.failure is not None or rank not in self._waits or self._waits[rank].is_ready()

    def _describe_deadlock(self) -> str:
        lines = [f"  rank {rank}: {wait.describe()}" for rank, wait in sorted(self._waits.items())]
        lines += [f"  rank {rank} has ended" for rank in sorted(self._ended)]
        return "no rank can go on:\n" + "\n".join(lines)


def _stacks(threads: list[threading.Thread]) -> str:
    frames = sys._current_frames()
    texts = []
    for thread in threads:
        frame = frames.get(thread.ident) if thread.ident is not None else None
        if frame is not None:
            texts.append(f"{thread.name}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(texts)
