"""Pages of this process that keep their content until another process has copied it: a snapshot that costs no copy.

Note [Copied before it is written]
A background save must have the bytes as they were when it was asked for. To copy them first keeps the training
waiting. Instead the pages are write-protected, which is quick, and the writer process copies them from there while
training goes on. Whoever writes to a page that is not copied yet, by an operator, through numpy, in another thread or
by a system call, is made to wait by the kernel until the writer has copied that page, out of turn. Linux calls this
userfaultfd.

- The writer is another process: it needs none of the locks, such as the interpreter's, that whoever waits may hold.
  For the same reason it has the guard in its hands before the first page is protected.
- Only whole pages are guarded. Nobody who does not write to the state may be made to wait, least of all this process
  itself before it has told the writer.
- The writer holds the only handle. When it ends, however it ends, the kernel lifts the protection.
- The memory must stay where it is: the caller keeps it until the copy is done. What is unmapped or moved all the same
  is told by the kernel, and the save fails.
- Only memory that nobody else writes to can be guarded: pages of a file or shared with another process are also changed
  past this process's page table, and so are those that are pinned for a device or the kernel to write to.

The kernel must be able to guard pages that were never touched (Linux 6.4) and pages that the kernel itself writes to,
which takes the right to trace processes or to open ``/dev/userfaultfd``. Where it refuses, the bytes are copied first.
"""

from __future__ import annotations

import bisect
import ctypes
import errno
import fcntl
import functools
import mmap
import os
import platform
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from typing import NamedTuple

from hyper_parallel.core.distributed_checkpoint.errors import CheckpointError

_PAGE = mmap.PAGESIZE
_BLOCK = 1 << 21  # bytes that are copied between two looks at who waits: a huge page, which stays in one piece then
_MAX_BLOCKS = 1 << 14
_GRACE = 0.02  # seconds before a copy that nobody waits for, in which the other ranks of the host end their calls

# From linux/userfaultfd.h
_SYSCALL = {"x86_64": 323, "aarch64": 282}
_DEVICE, _NEW = "/dev/userfaultfd", 0xAA00
_API, _START = 0xC018AA3F, 0xAA
_REGISTER, _WRITE_PROTECT = 0xC020AA00, 0xC018AA06
_MODE_WRITE_PROTECT = 2
_FAULTS, _MOVES, _REMOVALS, _UNMAPS, _UNTOUCHED = 1 << 0, 1 << 2, 1 << 3, 1 << 6, 1 << 13
_FEATURES = _FAULTS | _MOVES | _REMOVALS | _UNMAPS | _UNTOUCHED
_MESSAGE = struct.Struct("<B7xQQQ")
_PAGE_FAULT = 0x12

BEGIN, GIVE_UP = b"1", b"0"

_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t


class Span(NamedTuple):
    """Bytes at an address."""

    address: int
    length: int


class Part(NamedTuple):
    """Bytes at an address, and their place in the memory that they are copied to."""

    address: int
    length: int
    place: int


# ---------------------------------------------------------------------------------------------------------------------
# The process whose pages they are
# ---------------------------------------------------------------------------------------------------------------------


def whole_pages(span: Span) -> Span:
    """The pages that are part of the span from their first to their last byte; perhaps none."""
    start = -(-span.address // _PAGE) * _PAGE
    end = (span.address + span.length) // _PAGE * _PAGE
    return Span(start, max(end - start, 0))


class Guard:
    """Whole pages that can be protected. OSError where the kernel cannot, here or in :meth:`protect`.

    They are protected until all who have ``file`` have closed it.
    """

    def __init__(self, spans: Sequence[Span]) -> None:
        self.file = _open()
        self._runs = _runs(spans)
        try:
            for start, end in self._runs:
                request = struct.pack("<QQQQ", start, end - start, _MODE_WRITE_PROTECT, 0)
                fcntl.ioctl(self.file, _REGISTER, bytearray(request))
        except BaseException:
            self.close()
            raise

    def protect(self) -> None:
        """From now on whoever writes to one of the pages waits."""
        for start, end in self._runs:
            _set_protection(self.file, start, end, True)

    def close(self) -> None:
        os.close(self.file)


class PrivateMemory:
    """The memory that only this process can write to, as it is mapped now."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._num_mappings = 0
        with open("/proc/self/maps", "rb") as lines:
            for line in lines:
                self._num_mappings += 1
                where, rights, _, _, inode, *_ = line.split(None, 5)
                if inode != b"0" or rights[1:2] != b"w" or rights[3:4] != b"p":
                    continue
                start, _, end = where.partition(b"-")
                if self._ends and self._ends[-1] == int(start, 16):
                    self._ends[-1] = int(end, 16)
                else:
                    self._starts.append(int(start, 16))
                    self._ends.append(int(end, 16))

    def __contains__(self, span: Span) -> bool:
        at = bisect.bisect_right(self._starts, span.address) - 1
        return at >= 0 and span.address + span.length <= self._ends[at]

    def can_be_cut(self, num_spans: int) -> bool:
        """Whether enough mappings are left for others when so many spans and what is between them have their own."""
        with open("/proc/sys/vm/max_map_count", "rb") as limit:
            return self._num_mappings + 2 * num_spans <= int(limit.read()) // 2


def has_pinned_memory() -> bool:
    """Whether any memory of this process is pinned, as for RDMA."""
    with open("/proc/self/status", "rb") as lines:
        return any(int(line.split()[1]) > 0 for line in lines if line.startswith(b"VmPin:"))


def _open() -> int:
    try:
        file = _new()
    except OSError as error:
        try:
            device = os.open(_DEVICE, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            raise error from None
        try:
            file = fcntl.ioctl(device, _NEW, os.O_CLOEXEC | os.O_NONBLOCK)
        finally:
            os.close(device)
    try:
        fcntl.ioctl(file, _API, bytearray(struct.pack("<QQQ", _START, _FEATURES, 0)))
    except BaseException:
        os.close(file)
        raise
    return file


def _new() -> int:
    number = _SYSCALL.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    file = _libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK)
    if file < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return file


def _runs(spans: Sequence[Span | Part]) -> list[tuple[int, int]]:
    """Start and end of what the spans cover; what is adjacent or overlaps is one run."""
    runs: list[tuple[int, int]] = []
    for start, length, *_ in sorted(spans):
        if runs and start <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(runs[-1][1], start + length)
        else:
            runs.append((start, start + length))
    return runs


def _set_protection(file: int, start: int, end: int, is_protected: bool) -> None:
    fcntl.ioctl(file, _WRITE_PROTECT, bytearray(struct.pack("<QQQ", start, end - start, is_protected)))


# ---------------------------------------------------------------------------------------------------------------------
# The process that copies them
# ---------------------------------------------------------------------------------------------------------------------


def can_copy_from(process: int, address: int) -> bool:
    """Whether this process may look at an address of another one, and the kernel guards pages."""
    target = ctypes.create_string_buffer(8)  # held by its name while it is written to
    try:
        os.close(_open())
        _read(process, address, ctypes.addressof(target), len(target))
    except OSError:
        return False
    return True


def copy_guarded(file: int, word: int, process: int, ended: int, parts: Sequence[Part], memory: int) -> None:
    """Copy whole pages of another process, which ``file`` guards, to places in the memory at an address of this one.

    Those that somebody waits for are copied at once, the others when ``BEGIN`` comes from the file ``word``. When
    something else does, or the process has ended, as ``ended`` tells, nobody wants them any more. Each page is released
    as soon as it is copied.
    """
    copy = _GuardedCopy(file, process, parts, memory)
    try:
        while True:
            ready = wait([file, word, ended])
            if word in ready or ended in ready:
                break
            copy.let_go_on()
        if word in ready and os.read(word, 1) == BEGIN:
            wait([file, ended], _GRACE)
            copy.run()
    except OSError as error:
        raise _lost(error.strerror) from error


@dataclass
class _Block:
    """Pages that are copied and released together; ``parts`` of them are wanted."""

    start: int
    end: int
    parts: list[Part] = field(default_factory=list)
    is_copied: bool = False


class _GuardedCopy:
    def __init__(self, file: int, process: int, parts: Sequence[Part], memory: int) -> None:
        self._file, self._process, self._memory = file, process, memory
        self._parts = parts

    @functools.cached_property
    def _blocks(self) -> list[_Block]:
        """Made when they are needed: before, the processors belong to the ranks, which are still protecting pages."""
        return _blocks(self._parts)

    @functools.cached_property
    def _starts(self) -> list[int]:
        return [block.start for block in self._blocks]

    def run(self) -> None:
        for block in self._blocks:
            self.let_go_on()
            self._copy(block)
        self.let_go_on()

    def _copy(self, block: _Block) -> None:
        if not block.is_copied:
            block.is_copied = True
            for part in block.parts:
                _read(self._process, part.address, self._memory + part.place, part.length)
        while True:  # Also what was copied before: somebody may have waited before all was protected.
            try:
                return _set_protection(self._file, block.start, block.end, False)
            except BlockingIOError:  # while the mappings change: the message about it comes first
                os.sched_yield()
                self.let_go_on()

    def let_go_on(self) -> None:
        """Copy the blocks that somebody waits for."""
        while True:
            try:
                messages = os.read(self._file, 64 * _MESSAGE.size)
            except BlockingIOError:
                return
            for event, _, address, _ in _MESSAGE.iter_unpack(messages):
                if event != _PAGE_FAULT:
                    raise _lost("it was unmapped or moved")
                self._copy(self._blocks[bisect.bisect_right(self._starts, address) - 1])


def _blocks(parts: Sequence[Part]) -> list[_Block]:
    runs = _runs(parts)
    size = max(1, sum(end - start for start, end in runs) // _MAX_BLOCKS // _BLOCK) * _BLOCK
    blocks = [
        _Block(max(at, start), min(at + size, end))
        for start, end in runs
        for at in range(start // size * size, end, size)
    ]
    starts = [block.start for block in blocks]
    for part in parts:
        number = bisect.bisect_right(starts, part.address) - 1
        at, left, place = part
        while left > 0:
            length = min(left, blocks[number].end - at)
            blocks[number].parts.append(Part(at, length, place))
            at, left, place = at + length, left - length, place + length
            number += 1
    return blocks


class _IoVector(ctypes.Structure):
    _fields_ = (("address", ctypes.c_void_p), ("length", ctypes.c_size_t))


_ONE, _NO_FLAGS = ctypes.c_ulong(1), ctypes.c_ulong(0)


def _read(process: int, address: int, target: int, length: int) -> None:
    while length > 0:
        here, there = _IoVector(target, length), _IoVector(address, length)
        got = _libc.process_vm_readv(process, ctypes.byref(here), _ONE, ctypes.byref(there), _ONE, _NO_FLAGS)
        if got <= 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        address, target, length = address + got, target + got, length - got


def _lost(why: str | None) -> CheckpointError:
    return CheckpointError(
        f"the memory of the state was lost while it was copied ({why}): do not resize the storage of what is being "
        "saved before done(), or pass copy_first=True to async_save"
    )
