"""Copying the bytes of a save to memory that its writer process reads: all that keeps the caller of a background save.

What lies in pages that can be guarded is not copied here: the writer does that, see ``page_guard.py``.

Note [Why not a snapshot by fork]
A fork shares all pages with the child and would copy only those that training changes. It is not done:
- The copy is not saved, it is made later and dearer, page by page, by the training that writes to its weights. Measured
  with 4 ranks of 256 MiB on 2 cores: the copy takes 77 ms; the fork 38 ms, and the next update of the weights 360 ms
  where it takes 70 without. What the fork takes grows with the whole process, not with what is saved.
- Memory that is shared (``share_memory_()``, a mapped file) is not copied on write: the child would write later values.
- Threads hold locks while another one forks, and the child has the locks and not the threads.
- What is on a device has to be copied anyway.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from typing import Any

import numpy as np

from hyper_parallel.core.distributed_checkpoint.background import WriterProcess, wait_for_end
from hyper_parallel.core.distributed_checkpoint.page_guard import (
    BEGIN,
    GIVE_UP,
    Part,
    PrivateMemory,
    Span,
    has_pinned_memory,
    whole_pages,
)
from hyper_parallel.core.distributed_checkpoint.shard_file import DeviceBytes, StagedItem
from hyper_parallel.platform import get_platform

_ALIGNMENT = 64
# Bytes that are copied at a time. Copies that fit into a processor's own cache are quicker than longer ones, until they
# are so long that the C library goes around the caches.
_PIECE = 1 << 19
_LONG_PIECE = 64 << 20
_MAX_THREADS = 8
# What is smaller is copied sooner than it is guarded: a tensor, and all of them.
_GUARDED_BYTES = 1 << 18
_GUARDED_BYTES_IN_ALL = 1 << 24


class Copying:
    """A copy of items to the memory that ``process`` reads. It goes on in threads until :meth:`finish`.

    Nothing may change the items before that. What is on a device is copied by :meth:`finish`. What is guarded is copied
    by the writer, after :meth:`finish`, so that it does not take the processors from the ranks that are not as far yet.
    """

    def __init__(self, items: Sequence[StagedItem], process: WriterProcess, copy_first: bool = False) -> None:
        self.process = process
        starts, at = [], 0
        for item in items:
            starts.append(at)
            at += -(-len(item.data) // _ALIGNMENT) * _ALIGNMENT
        self._memory = process.memory(at)
        self._described: list[tuple[Any, ...]] = []
        self._on_device: list[tuple[Any, Any]] = []
        in_host: list[tuple[Any, int]] = []
        for item, start in zip(items, starts, strict=True):
            if isinstance(item.data, DeviceBytes):
                place = self._memory.array[start : start + len(item.data)]
                self._on_device.append((item.data.tensor, place))
            elif len(item.data):
                in_host.append((np.frombuffer(item.data, np.uint8), start))
            index = item.index
            self._described.append(
                (index.fqn, index.offset, item.dtype, item.shape, start, len(item.data), item.encoding)
            )
        self._guarded: _GuardedMemory | None = None
        if not copy_first and process.can_guard and get_platform().get_device_type() == "cpu":
            with contextlib.suppress(OSError):
                in_host = self._guard(in_host)
        self._error: BaseException | None = None
        self._pieces = _pieces(in_host)
        self._lock = threading.Lock()
        count = min(_num_threads(), -(-sum(len(source) for source, _ in in_host) // _PIECE))
        self._threads = [_thread(self._copy) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    @property
    def is_guarded(self) -> bool:
        """Whether the writer copies a part of it."""
        return self._guarded is not None

    def _guard(self, in_host: list[tuple[Any, int]]) -> list[tuple[Any, int]]:
        """Let the writer copy what can be guarded; returns the rest. OSError where nothing can be."""
        if sum(len(source) for source, _ in in_host) < _GUARDED_BYTES_IN_ALL or has_pinned_memory():
            return in_host
        private = PrivateMemory()
        parts: list[Part] = []
        kept, rest = [], []
        for source, start in in_host:
            span = Span(source.ctypes.data, len(source))
            pages = whole_pages(span)
            if pages.length < _GUARDED_BYTES or span not in private:
                rest.append((source, start))
                continue
            before = pages.address - span.address
            behind = before + pages.length
            parts.append(Part(*pages, start + before))
            kept.append(source)
            rest += [(source[:before], start), (source[behind:], start + behind)]
        if sum(part.length for part in parts) < _GUARDED_BYTES_IN_ALL or not private.can_be_cut(len(parts)):
            return in_host
        self._guarded = _GuardedMemory(kept, *self.process.copy_guarded(parts))
        return rest

    def _copy(self) -> None:
        try:
            while True:
                with self._lock:
                    source, start = next(self._pieces, (None, 0))
                if source is None:
                    return
                self._memory.write(start, source)
        except BaseException as error:
            self._error = error

    def give_up(self) -> None:
        """Wait until nobody reads the items or writes to the memory any more; what is guarded is not copied."""
        for thread in self._threads:
            thread.join()
        if self._guarded is not None:
            self._guarded.give_up()

    def finish(self) -> list[tuple[Any, ...]]:
        """The items as plain data, with their places in the memory, where all their bytes are or will be."""
        for thread in self._threads:
            thread.join()
        if self._error is not None:
            raise self._error
        if self._on_device:
            get_platform().copy_raw_to_host(self._on_device)
        if self._guarded is not None:
            self._guarded.begin_copy()
        self._memory.is_new = False
        return self._described


class _GuardedMemory:
    """Memory that the writer copies, and that is kept until it has done so or is gone."""

    def __init__(self, sources: list[Any], say: FileIO, done: FileIO) -> None:
        self._say = say
        self._keeper = _thread(_keep, sources, done)
        self._keeper.start()

    def begin_copy(self) -> None:
        self._tell(BEGIN)

    def give_up(self) -> None:
        self._tell(GIVE_UP)
        self._keeper.join()

    def _tell(self, word: bytes) -> None:
        if not self._say.closed:  # It is said once.
            with contextlib.suppress(BrokenPipeError), self._say:  # A writer that is gone is found out later.
                self._say.write(word)


def _keep(sources: list[Any], done: FileIO) -> None:
    wait_for_end(done)
    sources.clear()


def _thread(target: Callable[..., None], *args: Any) -> threading.Thread:
    """One of those of the library: a platform may be able to call operators beside them only."""
    return threading.Thread(target=target, args=args, name=f"hyper_parallel-{target.__name__}", daemon=True)


def _pieces(in_host: list[tuple[Any, int]]) -> Iterator[tuple[Any, int]]:
    for source, start in in_host:
        step = _PIECE if len(source) < _LONG_PIECE else _LONG_PIECE
        for at in range(0, len(source), step):
            yield source[at : at + step], start + at


def _num_threads() -> int:
    """This rank's share of the host's processors."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or ""
    cores = len(os.sched_getaffinity(0)) // max(1, int(ranks) if ranks.isdecimal() else 1)
    return min(max(1, cores), _MAX_THREADS)
