"""Whether what a pickle held is plain data that can be handed out: to be walked, compared and written again.

Note [Small in memory, large to walk]
A list of two references to a list of two references to a list ... takes a few bytes for each level and twice the time
of the level below for whoever walks, compares or writes it. So what is handed out is counted as if nothing was shared.
"""

from __future__ import annotations

import collections
from pathlib import PurePosixPath
from typing import Any

from hyper_parallel.core.distributed_checkpoint.foreign.torch_pickles.torch_records import UnsafePickle, described

_LEAVES = (type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, PurePosixPath)
_SEQUENCES = (list, tuple, set, frozenset, collections.deque)
_DICTS = (dict, collections.OrderedDict, collections.defaultdict, collections.Counter)
_MAX_DEPTH = 200
_FREE_PARTS = 1_000_000
_PARTS_PER_BYTE = 16


def check_plain(value: Any, num_bytes: int) -> None:
    """Raise :class:`UnsafePickle` unless a value is plain data, of no more parts than ``num_bytes`` of pickle make."""
    _Walk(_FREE_PARTS + _PARTS_PER_BYTE * num_bytes).size(value, 0)


class _Walk:
    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sizes: dict[int, int] = {}  # by id, of what has parts; 0 while it is walked

    def size(self, value: Any, depth: int) -> int:
        """The number of characters and other parts of a value, what it shares counted wherever it occurs."""
        kind = type(value)
        if kind in (str, bytes, bytearray):
            return 1 + len(value)
        if kind in _LEAVES:
            return 1
        if kind not in _SEQUENCES and kind not in _DICTS:
            raise UnsafePickle(described(value))
        found = self._sizes.get(id(value))
        if found == 0:
            raise UnsafePickle(f"{described(value)} that contains itself")
        if found is not None:
            return found
        if depth == _MAX_DEPTH:
            raise UnsafePickle(f"parts nested {_MAX_DEPTH} deep")
        self._sizes[id(value)] = 0
        total = 1
        for part in value:
            total += self.size(part, depth + 1)
        if kind in _DICTS:
            for part in value.values():
                total += self.size(part, depth + 1)
        if kind is collections.OrderedDict:
            total += self.size(getattr(value, "_metadata", None), depth + 1)
        if total > self._limit:
            raise UnsafePickle("the same parts again and again, more than can be walked")
        self._sizes[id(value)] = total
        return total
