"""The zip archives that ``torch.save`` writes, of which a checkpoint's file is a row: where in it a member lies.

torch stores members as they are, without compression, and the directory at the very end, without a comment. So no more
is read than the directory, which is small, and a member whose bytes are all in the file: nothing is inflated.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from hyper_parallel.core.distributed_checkpoint.base.shown_text import shown

_MAX_DIRECTORY = 1 << 20  # That of a tensor has about 500 bytes.
_TAIL = 1 << 10

_END = struct.Struct("<4s4H2LH")
_LOCATOR = struct.Struct("<4sLQL")
_END_64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_LARGE = 0xFFFFFFFF

Read = Callable[[int, int], bytes]  # bytes of the archive from a place on, so many


class Member(NamedTuple):
    """Where a member's bytes lie in its archive, how many they are, and their crc32."""

    start: int
    size: int
    crc32: int


class Archive:
    """The directory of an archive of ``length`` bytes. All errors are ValueErrors."""

    def __init__(self, read: Read, length: int) -> None:
        self._read = read
        self._end, self._entries = 0, b""
        self._read_directory(length)

    def _read_directory(self, length: int) -> None:
        tail_at = max(length - _TAIL, 0)
        tail = self._read(tail_at, length - tail_at)
        if len(tail) < _END.size:
            raise ValueError(f"its {length} bytes are no archive")
        end_at = length - _END.size
        signature, *_, num, size, start, comment = _END.unpack_from(tail, end_at - tail_at)
        if signature != b"PK\x05\x06" or comment:
            raise ValueError("it does not end like an archive of torch's")
        locator_at = end_at - _LOCATOR.size
        if locator_at >= tail_at + _END_64.size and tail[locator_at - tail_at :].startswith(b"PK\x06\x07"):
            _, _, end_at, _ = _LOCATOR.unpack_from(tail, locator_at - tail_at)
            if end_at != locator_at - _END_64.size:
                raise ValueError("its end is not where it says")
            signature, *_, num, size, start = _END_64.unpack_from(tail, end_at - tail_at)
            if signature != b"PK\x06\x06":
                raise ValueError("its end is damaged")
        if start + size != end_at or size > _MAX_DIRECTORY or num * _ENTRY.size > size:
            raise ValueError(f"a directory of {num} members, {size} bytes at {start}, is not what torch writes")
        self._end, self._num = start, num
        self._entries = tail[start - tail_at : end_at - tail_at] if start >= tail_at else self._read(start, size)

    def member(self, ending: str) -> Member:
        """The member whose name is ``ending``, in the one folder that an archive of torch's has."""
        wanted = ending.encode("utf-8", "surrogatepass")
        at, found = 0, None
        for _ in range(self._num):
            if at + _ENTRY.size > len(self._entries):
                raise ValueError("its directory is cut short")
            fields = _ENTRY.unpack_from(self._entries, at)
            name_length, extra_length, comment_length = fields[10:13]
            name_at = at + _ENTRY.size
            at = name_at + name_length + extra_length + comment_length
            if fields[0] != b"PK\x01\x02" or at > len(self._entries):
                raise ValueError("its directory is damaged")
            name = self._entries[name_at : name_at + name_length]
            if name.partition(b"/")[2] == wanted:
                if found is not None:
                    raise ValueError(f"it has two members '{shown(ending)}'")
                extra = self._entries[name_at + name_length : name_at + name_length + extra_length]
                found = fields, extra
        if found is None:
            raise ValueError(f"it has no member '{shown(ending)}'")
        return self._placed(ending, *found)

    def _placed(self, ending: str, fields: tuple[Any, ...], extra: bytes) -> Member:
        flags, method, crc32, packed_size, size, header_at = fields[3], fields[4], *fields[7:10], fields[16]
        if _LARGE in (packed_size, size, header_at):
            large = iter(_large_numbers(extra))
            size, packed_size, header_at = (
                next(large, 0) if number == _LARGE else number for number in (size, packed_size, header_at)
            )
        if method != 0 or flags & 1 or size != packed_size:
            raise ValueError(f"'{shown(ending)}' is compressed or encrypted, and torch stores what it writes as it is")
        if header_at + _LOCAL.size > self._end:
            raise ValueError(f"'{shown(ending)}' is not in it")
        signature, *_, name_length, extra_length = _LOCAL.unpack(self._read(header_at, _LOCAL.size))
        start = header_at + _LOCAL.size + name_length + extra_length
        if signature != b"PK\x03\x04" or start + size > self._end:
            raise ValueError(f"'{shown(ending)}' is not in it")
        return Member(start, size, crc32)


def _large_numbers(extra: bytes) -> list[int]:
    """Those that have more than 32 bits, from what is added to an entry."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            num = min(length, len(extra) - at - 4) // 8
            return list(struct.unpack_from(f"<{num}Q", extra, at + 4))
        at += 4 + length
    return []
