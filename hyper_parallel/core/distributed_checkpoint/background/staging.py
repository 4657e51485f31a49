"""Copying the bytes of a save to memory that its writer process reads: all that keeps the caller of a background save.

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

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from hyper_parallel.core.distributed_checkpoint.background.shared_memory import SharedMemory
from hyper_parallel.core.distributed_checkpoint.format.shard_file import DeviceBytes, StagedItem
from hyper_parallel.platform import get_platform

_ALIGNMENT = 64
# Bytes that are copied at a time. Copies that fit into a processor's own cache are quicker than longer ones, until they
# are so long that the C library goes around the caches.
_PIECE = 1 << 19
_LONG_PIECE = 64 << 20
_MAX_THREADS = 8


def copy_to_shared_memory(
    items: Sequence[StagedItem], memory_of: Callable[[int], SharedMemory]
) -> list[tuple[Any, ...]]:
    """Copy the bytes of items to the memory that ``memory_of`` gives for their number.

    Returns the items as plain data: name, offset, dtype, shape, start and length in the memory, encoding.
    """
    starts, size = [], 0
    for item in items:
        starts.append(size)
        size += -(-len(item.data) // _ALIGNMENT) * _ALIGNMENT
    memory = memory_of(size)
    on_device: list[tuple[Any, Any]] = []
    in_host: list[tuple[Any, int]] = []
    for item, start in zip(items, starts, strict=True):
        if isinstance(item.data, DeviceBytes):
            on_device.append((item.data.tensor, memory.array[start : start + len(item.data)]))
        elif len(item.data):
            in_host.append((np.frombuffer(item.data, np.uint8), start))
    _copy(in_host, memory)
    if on_device:
        get_platform().copy_raw_to_host(on_device)
    memory.filled()
    return [
        (item.index.fqn, item.index.offset, item.dtype, item.shape, start, len(item.data), item.encoding)
        for item, start in zip(items, starts, strict=True)
    ]


def _copy(in_host: list[tuple[Any, int]], memory: SharedMemory) -> None:
    num_threads = min(_num_threads(), -(-sum(len(source) for source, _ in in_host) // _PIECE))
    if num_threads <= 1:
        for source, start in _pieces(in_host):
            memory.write(start, source)
        return
    # The name says whose threads they are: a platform may be able to call operators beside ours only.
    with ThreadPoolExecutor(num_threads, thread_name_prefix="hyper_parallel-copy") as pool:
        for written in [pool.submit(memory.write, start, source) for source, start in _pieces(in_host)]:
            written.result()


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
