"""Replicas read once: where storage is far away, the ranks that need the same bytes share the reading and trade.

Who needs what follows from the layouts, so each rank knows which of the boxes it needs it reads itself, and from whom
the others come. What two ranks owe each other travels in one message each way, all at the same time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from hyper_parallel.core.distributed_checkpoint.base.errors import LostRankError
from hyper_parallel.core.distributed_checkpoint.base.metadata import dtype_size
from hyper_parallel.core.distributed_checkpoint.planning.chunks import OwnerChoice, Ranks, Spec, TensorSpec, holders_of
from hyper_parallel.core.distributed_checkpoint.planning.planner import LoadItemType, ReadItem
from hyper_parallel.platform import get_platform


class ReplicaExchange:
    """The trade of one rank: ``reader_of(item)`` says who reads an item; :meth:`trade` moves the bytes."""

    def __init__(self, items: list[ReadItem], specs: dict[str, Spec], rank: int, world_size: int) -> None:
        self._rank = rank
        self._readers: dict[int, int] = {}
        self._owed: dict[int, list[ReadItem]] = {}  # by rank, what it gets from here
        self._expected: dict[int, list[ReadItem]] = {}  # by rank, what comes from there
        choice = OwnerChoice()
        for holders, item in _in_common_order(items, specs, rank, world_size):
            spec = specs[item.dest_index.fqn]
            assert isinstance(spec, TensorSpec)
            reader = choice.choose(holders, int(np.prod(item.lengths)) * dtype_size(spec.dtype))
            self._readers[id(item)] = reader
            if reader == rank:
                for other in holders:
                    if other != rank:
                        self._owed.setdefault(other, []).append(item)
            else:
                self._expected.setdefault(reader, []).append(item)

    def reader_of(self, item: ReadItem) -> int:
        """The rank that reads an item."""
        return self._readers.get(id(item), self._rank)

    def trade(self, places: dict[int, Any]) -> None:
        """Send what was read here and fill what was read elsewhere; ``places`` has the arrays, by ``id`` of items."""
        platform = get_platform()
        work: list[tuple[int, Any]] = []
        incoming: dict[int, Any] = {}
        lost: dict[int, Exception] = {}
        for rank, items in sorted(self._expected.items()):
            num_bytes = sum(places[id(item)].nbytes for item in items)
            incoming[rank] = platform.new_tensor((num_bytes,), "uint8", "cpu")
            _try(lost, rank, lambda rank=rank: work.append((rank, platform.irecv(incoming[rank], rank))))
        outgoing = []
        for rank, items in sorted(self._owed.items()):
            message = platform.new_tensor((sum(places[id(item)].nbytes for item in items),), "uint8", "cpu")
            data = np.concatenate([np.ascontiguousarray(places[id(item)]).reshape(-1).view("u1") for item in items])
            platform.set_raw(message, data)
            outgoing.append(message)
            _try(lost, rank, lambda rank=rank, message=message: work.append((rank, platform.isend(message, rank))))
        for rank, handle in work:
            _try(lost, rank, handle.wait)
        if lost:
            reasons = "; ".join(f"rank {rank}: {str(error).splitlines()[0]}" for rank, error in lost.items())
            raise LostRankError(f"rank {self._rank} could not trade replicas with {reasons}")
        for rank, items in self._expected.items():
            data = platform.raw_array(incoming[rank])
            at = 0
            for item in items:
                place = places[id(item)]
                place[...] = data[at : at + place.nbytes].view(place.dtype).reshape(place.shape)
                at += place.nbytes


def _in_common_order(
    items: list[ReadItem], specs: dict[str, Spec], rank: int, world_size: int
) -> list[tuple[Ranks, ReadItem]]:
    """Items that several ranks need, with these ranks, in an order that is the same on all of them."""
    found = []
    for item in items:
        spec = specs.get(item.dest_index.fqn)
        if item.type is LoadItemType.BYTE_IO or not isinstance(spec, TensorSpec):
            continue
        holders = holders_of(spec, rank, world_size)
        if len(holders) > 1:
            found.append((holders, item))
    return sorted(found, key=lambda pair: (pair[0], pair[1].storage_index.fqn, pair[1].storage_index.offset))


def _try(lost: dict[int, Exception], rank: int, step: Any) -> None:
    try:
        step()
    except RuntimeError as error:
        lost.setdefault(rank, error)
