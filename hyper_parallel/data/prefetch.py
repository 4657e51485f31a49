"""Batches that are read while the step before runs: one thread, no worker processes.

Reading is copying from memory maps, which a thread does beside a step. What it reads ahead is found by arithmetic from
the order, which it does not move, so a checkpoint never counts a batch that was read and not trained on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import numpy as np

from hyper_parallel.data.order import Order

__all__ = ["Prefetch"]

Loaded = TypeVar("Loaded")


class Prefetch(Generic[Loaded]):
    """Iterate over ``load(numbers)`` for the batches of ``order``, each begun while those before are in use.

    ``order.batch`` may change on the way: what was read with the old one is dropped. An error of ``load`` is raised by
    the step that asks for that batch. As a context, the thread ends with it; without one, call ``close``.
    """

    def __init__(self, order: Order, load: Callable[[np.ndarray], Loaded], *, ahead: int = 2) -> None:
        if ahead < 1:
            raise ValueError(f"Prefetch: ahead={ahead} must be at least 1; iterate over the order itself instead")
        self._order = order
        self._load = load
        self._ahead = ahead
        self._pending: deque[tuple[int, int, Future[Loaded]]] = deque()
        self._thread: ThreadPoolExecutor | None = ThreadPoolExecutor(1, thread_name_prefix="hyper-parallel-data")

    def __iter__(self) -> Iterator[Loaded]:
        return self

    def __next__(self) -> Loaded:
        if self._thread is None:
            raise RuntimeError("this Prefetch is closed; make a new one, the order knows where to go on")
        position = self._order.position
        count = self._order.next_count(position)
        if self._pending and self._pending[0][:2] != (position, count):
            self._drop()
        self._begin(self._thread, position)
        if not self._pending:
            raise StopIteration
        loaded = self._pending.popleft()[2].result()
        self._order.advance(count)
        self._begin(self._thread, position + count)
        return loaded

    def _begin(self, thread: ThreadPoolExecutor, position: int) -> None:
        """Have ``ahead`` batches on their way, from ``position`` on."""
        if self._pending:
            position = self._pending[-1][0] + self._pending[-1][1]
        while len(self._pending) < self._ahead and (count := self._order.next_count(position)):
            self._pending.append((position, count, thread.submit(self._read, position, count)))
            position += count

    def _read(self, position: int, count: int) -> Loaded:
        return self._load(self._order.numbers(position, count))

    def _drop(self) -> None:
        for _, _, future in self._pending:
            future.cancel()
        self._pending.clear()

    def close(self) -> None:
        """End the thread, after the batch that it is reading."""
        if self._thread is not None:
            self._drop()
            self._thread.shutdown(wait=True, cancel_futures=True)
            self._thread = None

    def __enter__(self) -> Prefetch[Loaded]:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()
