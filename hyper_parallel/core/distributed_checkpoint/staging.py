"""Copying the bytes of a save to memory that its writer process reads: all that keeps the caller of a background save.

Note [Why not a snapshot by copy-on-write]
A fork shares all pages with the child and would copy only those that training changes. It is not done:
- The copy is not saved, it is made later and dearer, page by page, by the training that writes to its weights. Measured
  with 4 ranks of 256 MiB on 2 cores: the copy takes 77 ms; the fork 38 ms, and the next update of the weights 360 ms
  where it takes 70 without. What the fork takes grows with the whole process, not with what is saved.
- Memory that is shared (``share_memory_()``, a mapped file) is not copied on write: the child would write later values.
- Pages that a network card reads or writes are, in kernels before 5.12, no longer the ones that the program has.
- Threads hold locks while another one forks, and the child has the locks and not the threads.
- What is on a device has to be copied anyway.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hyper_parallel.core.distributed_checkpoint.background import WriterProcess
from hyper_parallel.core.distributed_checkpoint.shard_file import DeviceBytes, StagedItem
from hyper_parallel.platform import get_platform

_ALIGNMENT = 64
# Bytes that are copied at a time. Copies that fit into a processor's own cache are quicker than longer ones, until they
# are so long that the C library goes around the caches.
_PIECE = 1 << 19
_LONG_PIECE = 64 << 20
_MAX_THREADS = 8


class Copying:
    """A copy of items to the memory that ``process`` reads. It goes on in threads until :meth:`finish`.

    Nothing may change the items before that. What is on a device is copied by :meth:`finish`.
    """

    def __init__(self, items: Sequence[StagedItem], process: WriterProcess) -> None:
        self.process = process
        starts, at = [], 0
        for item in items:
            starts.append(at)
            at += -(-len(item.data) // _ALIGNMENT) * _ALIGNMENT
        memory = process.memory(at)
        self._described: list[tuple[Any, ...]] = []
        self._on_device: list[tuple[Any, Any]] = []
        in_host: list[tuple[Any, Any]] = []
        for item, start in zip(items, starts, strict=True):
            place = memory[start : start + len(item.data)]
            if isinstance(item.data, DeviceBytes):
                self._on_device.append((item.data.tensor, place))
            elif len(item.data):
                in_host.append((np.frombuffer(item.data, np.uint8), place))
            index = item.index
            self._described.append(
                (index.fqn, index.offset, item.dtype, item.shape, start, len(item.data), item.encoding)
            )
        self._error: BaseException | None = None
        self._pieces = _pieces(in_host)
        self._lock = threading.Lock()
        count = min(_num_threads(), -(-at // _PIECE))
        self._threads = [threading.Thread(target=self._copy, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _copy(self) -> None:
        try:
            while True:
                with self._lock:
                    source, place = next(self._pieces, (None, None))
                if source is None:
                    return
                place[:] = source  # without the interpreter's lock
        except BaseException as error:
            self._error = error

    def wait(self) -> None:
        """Until no thread reads the items any more."""
        for thread in self._threads:
            thread.join()

    def finish(self) -> list[tuple[Any, ...]]:
        """The items as plain data, with their places in the memory, where all their bytes are now."""
        self.wait()
        if self._error is not None:
            raise self._error
        if self._on_device:
            get_platform().copy_raw_to_host(self._on_device)
        return self._described


def _pieces(pairs: list[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    for source, place in pairs:
        step = _PIECE if len(source) < _LONG_PIECE else _LONG_PIECE
        for at in range(0, len(source), step):
            yield source[at : at + step], place[at : at + step]


def _num_threads() -> int:
    """This rank's share of the host's processors."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE") or ""
    cores = len(os.sched_getaffinity(0)) // max(1, int(ranks) if ranks.isdecimal() else 1)
    return min(max(1, cores), _MAX_THREADS)
