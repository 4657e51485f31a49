"""What reading a pickle may cost in memory and time, and which keys its dicts may have.

Note [What a pickle may cost]
Every opcode pays for the memory that it takes and for what it looks through, from a budget in proportion to the
pickle's length, so neither a few bytes that ask for much (a long text encoded again and again, empty sets one after
the other) nor comparisons of long keys can outgrow the file. Keys are small, and many of one hash are refused: of
numbers and tuples an attacker can make as many as they like, and a dict looks through them all. What is left is
proportional to the length of the file.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

from hyper_parallel.core.distributed_checkpoint.foreign.torch_pickles.torch_records import (
    DamagedPickle,
    Record,
    UnsafePickle,
    described,
)

LIST, TUPLE, DICT, SET, RECORD, LARGE = 64, 56, 80, 232, 80, 800  # bytes, about; the last for a deque and the like
ITEM, PAIR, MEMBER = 9, 104, 104  # and for each thing in a list or tuple, a dict, a set

_FREE_BYTES = 32 << 20
_BYTES_PER_BYTE = 32  # Metadata of real checkpoints takes 12 by this count.
_MAX_KEY_PARTS = 20
_MAX_SAME_HASH = 16
_LONG_TEXT = 1000
_LITTLE_KEYS = (type(None), bool, float)
_MAX_LITTLE_INT = 1 << 60  # Smaller ones are their own hash.


class PickleCost:
    """What is left to spend on a pickle of ``num_bytes``."""

    def __init__(self, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._budget = _FREE_BYTES + _BYTES_PER_BYTE * num_bytes
        self._by_hash: dict[int, list[Any]] = {}

    def charge(self, num_bytes: int) -> None:
        """Pay for memory, or for looking through as much."""
        self._budget -= num_bytes
        if self._budget < 0:
            raise DamagedPickle(f"its {self._num_bytes} bytes make far more than any that torch writes")

    def check_keys(self, keys: list[Any]) -> list[Any]:
        """The keys of a dict or members of a set, as they are, if it is cheap to look them up."""
        for key in keys:
            if type(key) is str:
                if len(key) > _LONG_TEXT:
                    self.charge(len(key))
            elif type(key) is not Record:  # which is the same as itself only
                self._check_key(key)
        return keys

    def _check_key(self, key: Any) -> None:
        if self._num_parts(key, _MAX_KEY_PARTS) == 1 and not (type(key) is int and abs(key) >= _MAX_LITTLE_INT):
            return
        same = self._by_hash.setdefault(hash(key), [])
        if key not in same:
            if len(same) == _MAX_SAME_HASH:
                raise DamagedPickle(f"it has more than {_MAX_SAME_HASH} keys with the same hash")
            self.charge(PAIR)
            same.append(key)

    def _num_parts(self, key: Any, limit: int) -> int:
        """How many values a key consists of, itself included and counted twice if it has parts."""
        if limit <= 0:
            raise UnsafePickle(f"a key of more than {_MAX_KEY_PARTS} parts")
        kind = type(key)
        if kind in _LITTLE_KEYS:
            return 1
        if kind in (str, bytes, int, PurePosixPath):
            self.charge(8 if kind is int else len(str(key)) if kind is PurePosixPath else len(key))
            return 1
        if kind not in (complex, tuple, frozenset):
            raise UnsafePickle(f"{described(key)} as a key")
        num = 2
        for part in key if kind is not complex else ():
            num += self._num_parts(part, limit - num)
        self.charge(ITEM * num)
        return num
