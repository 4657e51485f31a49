"""How many rows each expert gets, on the device and, read once, on the host.

Note [The one look at values]
Split sizes of an all-to-all, and the row counts of a loop over experts, are numbers on the host: the device must have
computed the routing before anything can be sent. :func:`read_counts` is the one function that waits for it, once in a
layer, and counts how often it did (:data:`host_reads`). Without memory there is nothing to read: then every expert is
taken to get as many rows, the first ones one more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.membership import belongs_to_rank

__all__ = ["HostReads", "RowCounts", "balanced", "host_reads", "read_counts"]

_platform = get_platform()


class HostReads:
    """How often counts were read on the host, by this rank."""

    def __init__(self) -> None:
        self.number = 0


host_reads = HostReads()
belongs_to_rank(lambda: host_reads.number, lambda saved: setattr(host_reads, "number", saved))


def read_counts(counts: Any, assumed: Callable[[], list[list[int]]]) -> list[list[int]]:
    """A matrix of counts as lists; ``assumed()`` where it has no memory. See Note [The one look at values]."""
    host_reads.number += 1
    if _platform.has_no_memory(counts):
        return assumed()
    return [[int(number) for number in row] for row in _platform.tensor_to_numpy(counts)]


def balanced(num_rows: int, num_parts: int) -> list[int]:
    """As many rows for each part, the first ones one more.

    >>> balanced(7, 3)
    [3, 2, 2]
    """
    small, more = divmod(num_rows, num_parts) if num_parts else (0, 0)
    return [small + (part < more) for part in range(num_parts)]


class RowCounts:
    """The rows of each group: ``tensor`` on the device, ``numbers()`` on the host."""

    def __init__(self, tensor: Any, num_rows: int, numbers: list[int] | None = None) -> None:
        self.tensor = tensor
        self._num_rows = num_rows
        self._numbers = numbers

    def know(self, numbers: list[int]) -> None:
        """Somebody has read them already."""
        self._numbers = numbers

    def numbers(self) -> list[int]:
        if self._numbers is None:
            size = int(self.tensor.shape[0])
            self._numbers = read_counts(self.tensor.reshape(1, -1), lambda: [balanced(self._num_rows, size)])[0]
        return self._numbers
