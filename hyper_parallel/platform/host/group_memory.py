"""Memory that every rank of a group on one host reads and writes, with signals and a barrier; free of any framework.

Each rank owns one segment and maps the segments of all others. A platform brings two things: the bytes it needs and an
``exchange`` function (its all-gather of Python objects), and wraps the byte arrays it gets back in its own tensors.

Note [Order of data and signals]
    Data is written before the signal that announces it and must be seen in that order. Words are aligned and 64 bits
    wide, so a store or load is never torn on a 64-bit machine. x86-64 keeps stores in order, and loads. Others
    (aarch64) do not, hence ``_fence`` on both sides: taking and releasing a lock twice has a release followed by an
    acquire in the middle, which neither earlier nor later accesses cross.

Note [No update is lost]
    Every word has exactly one writer: the barrier word of a segment is written by its owner, and each signal slot has
    one word per source rank. Adding to a slot is thus a plain read and write of one's own word, and the slot's value
    is their sum.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.platform.host.shared_segment import ProcessIdentity, SegmentAddress, SharedSegment, available_memory

__all__ = ["GroupMemory", "allocate_group_memory"]

_TOKEN, _ARRIVALS, _GOODBYE, _SIGNALS = 0, 1, 2, 8  # positions of the control words at the start of a segment
_WORD_BYTES = 8
_INT64 = np.iinfo(np.int64)
_LIVENESS_INTERVAL = 0.05
_SPIN_SECONDS = 0.001
_LONGEST_SLEEP = 0.001

_fence_lock = threading.Lock()


def _fence() -> None:
    """See Note [Order of data and signals]."""
    with _fence_lock:
        pass
    with _fence_lock:
        pass


def _data_offset(num_slots: int, num_ranks: int) -> int:
    control_bytes = (_SIGNALS + num_slots * num_ranks) * _WORD_BYTES
    return -(-control_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _say_goodbye(control_words: np.ndarray, owner_pid: int) -> None:
    # A forked child inherits the mapping but must not speak for its parent.
    if os.getpid() == owner_pid:
        control_words[_GOODBYE] = 1


class GroupMemory:
    """The mapped segments of all ranks of a group. Ranks are numbered 0, 1, ... in the order of the group."""

    def __init__(
        self,
        name: str,
        segments: list[SharedSegment],
        processes: list[ProcessIdentity],
        rank: int,
        world_ranks: Sequence[int],
        data_bytes: int,
        num_slots: int,
    ) -> None:
        self.name = name
        self.rank = rank
        self.num_ranks = len(segments)
        self.num_slots = num_slots
        self.world_ranks = tuple(world_ranks)
        self._processes = processes
        control_bytes = (_SIGNALS + num_slots * self.num_ranks) * _WORD_BYTES
        self._words = [segment.array(0, control_bytes).view(np.int64) for segment in segments]
        data_offset = _data_offset(num_slots, self.num_ranks)
        self._data = [segment.array(data_offset, data_bytes) for segment in segments]
        self._owner_pid = os.getpid()
        self._num_barriers = 0
        self._barrier_lock = threading.Lock()
        self._signal_lock = threading.Lock()
        self._goodbye = weakref.finalize(self, _say_goodbye, self._words[rank], self._owner_pid)

    @property
    def is_freed(self) -> bool:
        return not self._goodbye.alive

    def check_usable(self, operation: str) -> None:
        if self.is_freed:
            raise RuntimeError(f"{operation}: {self.name} was freed on {self.describe(self.rank)}; allocate a new one")
        if os.getpid() != self._owner_pid:
            raise RuntimeError(
                f"{operation}: {self.name} belongs to process {self._owner_pid} and cannot be used in its forked child "
                f"{os.getpid()}; allocate it in the process that uses it"
            )

    def check_peer(self, operation: str, peer: int) -> None:
        if isinstance(peer, bool) or not isinstance(peer, int):
            raise TypeError(f"{operation}: peer must be a rank of the group (an int), got {peer!r}")
        if not 0 <= peer < self.num_ranks:
            raise ValueError(
                f"{operation}: peer {peer} is outside the group of {self.name}: "
                f"use 0..{self.num_ranks - 1}, the positions of world ranks {list(self.world_ranks)}"
            )

    def describe(self, rank: int) -> str:
        world_rank = self.world_ranks[rank]
        return f"rank {rank}" if world_rank == rank else f"rank {rank} (world rank {world_rank})"

    def data(self, peer: int) -> np.ndarray:
        """The data bytes of ``peer``, not copied."""
        self.check_usable("peer")
        self.check_peer("peer", peer)
        return self._data[peer]

    def barrier(self, timeout: float | None) -> None:
        """Return when every rank of the group has called it. After a timeout the same barrier may be tried again."""
        self.check_usable("barrier")
        with self._barrier_lock:
            goal = self._num_barriers + 1
            _fence()
            self._words[self.rank][_ARRIVALS] = goal

            def missing_ranks() -> list[int]:
                return [rank for rank in range(self.num_ranks) if self._words[rank][_ARRIVALS] < goal]

            def describe_missing(missing: list[int]) -> str:
                return f"{self._describe_all(missing)} did not arrive at barrier number {goal}"

            self._wait("barrier", missing_ranks, describe_missing, timeout, every_missing_rank_is_needed=True)
            self._num_barriers = goal

    def signal(self, peer: int, slot: int, value: int, op: str) -> None:
        """Add ``value`` to (or set) my word in ``slot`` of ``peer``. Who sees it sees the data written before."""
        self.check_usable("signal")
        self.check_peer("signal", peer)
        self._check_slot("signal", slot)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"signal: value must be an int, got {value!r}")
        if op not in ("add", "set"):
            raise ValueError(f"signal: op must be 'add' or 'set', got {op!r}")
        words, position = self._words[peer], _SIGNALS + slot * self.num_ranks + self.rank
        with self._signal_lock:
            new_value = value if op == "set" else int(words[position]) + value
            if not _INT64.min <= new_value <= _INT64.max:
                raise ValueError(f"signal: {new_value} does not fit in a 64-bit slot")
            _fence()
            words[position] = new_value

    def read_signal(self, slot: int, source: int | None) -> int:
        """The value of my ``slot``: the sum over all ranks, or what ``source`` put there."""
        self.check_usable("read_signal")
        self._check_slot("read_signal", slot)
        if source is not None:
            self.check_peer("read_signal", source)
        value = self._signal_value(slot, source)
        _fence()
        return value

    def wait_signal(self, slot: int, value: int, source: int | None, timeout: float | None) -> int:
        """Return the value of my ``slot`` once it is at least ``value``."""
        self.check_usable("wait_signal")
        self._check_slot("wait_signal", slot)
        if source is not None:
            self.check_peer("wait_signal", source)
        sources = range(self.num_ranks) if source is None else [source]

        def missing_ranks() -> list[int]:
            if self._signal_value(slot, source) >= value:
                return []
            return [rank for rank in sources if rank != self.rank or source == rank]

        def describe_missing(missing: list[int]) -> str:
            got = ", ".join(f"{self._signal_value(slot, rank)} from {self.describe(rank)}" for rank in sources)
            return f"slot {slot} has {self._signal_value(slot, source)} of {value} ({got})"

        self._wait("wait_signal", missing_ranks, describe_missing, timeout, source is not None)
        return self._signal_value(slot, source)

    def free(self) -> None:
        """Let go of all segments on this rank and tell the others, whose own mappings stay valid. Twice is once."""
        self._goodbye()
        self._words, self._data = [], []

    def _signal_value(self, slot: int, source: int | None) -> int:
        start = _SIGNALS + slot * self.num_ranks
        words = self._words[self.rank]
        if source is not None:
            return int(words[start + source])
        return sum(words[start : start + self.num_ranks].tolist())

    def _check_slot(self, operation: str, slot: int) -> None:
        if isinstance(slot, bool) or not isinstance(slot, int):
            raise TypeError(f"{operation}: slot must be an int, got {slot!r}")
        if not 0 <= slot < self.num_slots:
            raise ValueError(
                f"{operation}: slot {slot} is outside 0..{self.num_slots - 1}; allocate {self.name} with more num_slots"
            )

    def _describe_all(self, ranks: list[int]) -> str:
        return ", ".join(self.describe(rank) for rank in ranks)

    def _gone(self, ranks: list[int], also_after_goodbye: bool) -> list[str]:
        reasons = []
        for rank in ranks:
            if self._words[rank][_GOODBYE]:
                if also_after_goodbye:
                    reasons.append(f"{self.describe(rank)} has freed it")
            elif not self._processes[rank].is_alive():
                reasons.append(f"{self.describe(rank)} (process {self._processes[rank].pid}) has died")
        return reasons

    def _wait(
        self,
        operation: str,
        missing_ranks: Callable[[], list[int]],
        describe_missing: Callable[[list[int]], str],
        timeout: float | None,
        every_missing_rank_is_needed: bool,
    ) -> None:
        """Poll until no rank is missing. A missing rank that died ends the wait at once.

        A rank that freed its part ends it too when it is needed for certain; when any rank could still send what is
        awaited, only all of them being gone does.
        """
        start = time.monotonic()
        next_liveness_check = start + _LIVENESS_INTERVAL
        sleep = 0.0
        while missing := missing_ranks():
            self.check_usable(operation)
            now = time.monotonic()
            if timeout is not None and now - start >= timeout:
                dead = self._gone(missing, also_after_goodbye=True)
                because = f"; {', '.join(dead)}" if dead else ""
                raise TimeoutError(
                    f"{operation} of {self.name} on {self.describe(self.rank)} gave up after {timeout:g} s: "
                    f"{describe_missing(missing)}{because}"
                )
            if now >= next_liveness_check:
                next_liveness_check = now + _LIVENESS_INTERVAL
                gone = self._gone(missing, also_after_goodbye=every_missing_rank_is_needed)
                if not gone and not every_missing_rank_is_needed:
                    all_gone = self._gone(missing, also_after_goodbye=True)
                    gone = all_gone if len(all_gone) == len(missing) else []
                # It may have done its part between the look at its word and the look at its process.
                still_missing = missing_ranks()
                if gone and still_missing:
                    raise RuntimeError(
                        f"{operation} of {self.name} on {self.describe(self.rank)} cannot end: {', '.join(gone)}; "
                        f"{describe_missing(still_missing)}"
                    )
            if now - start > _SPIN_SECONDS:
                sleep = min(sleep + 5e-5, _LONGEST_SLEEP)
            time.sleep(sleep)
        _fence()


# ---------------------------------------------------------------------------------------------------------------------
# Making it together
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Request:
    what: Mapping[str, Any]
    problem: Exception | None
    process: ProcessIdentity
    available_memory: int | None


@dataclass(frozen=True)
class _Offer:
    problem: Exception | None
    address: SegmentAddress | None
    token: int


def allocate_group_memory(
    name: str,
    request: Mapping[str, Any],
    data_bytes: int,
    num_slots: int,
    exchange: Callable[[Any], list[Any]],
    rank: int,
    world_ranks: Sequence[int],
    problem: Exception | None = None,
) -> GroupMemory:
    """Collective: every rank of the group calls it, and either all get the memory or all get the same error.

    ``request`` is what the user asked for and must be equal on all ranks. ``problem`` is what was wrong with it on this
    rank: given here instead of being raised, so that the other ranks learn of it rather than wait. ``exchange(x)`` is
    the group's all-gather of picklable objects, in the order of ``world_ranks``.
    """
    requests = exchange(_Request(request, problem, ProcessIdentity.current(), available_memory()))
    _raise_problems(name, [request.problem for request in requests], world_ranks)
    segment_bytes = _data_offset(num_slots, len(world_ranks)) + data_bytes
    _check_requests(name, requests, segment_bytes, world_ranks)

    mine, token, problem = None, secrets.randbits(62), None
    try:
        try:
            mine = SharedSegment.create(segment_bytes, name)
            mine.array(0, _WORD_BYTES).view(np.int64)[_TOKEN] = token
        except Exception as error:  # whatever it is, the other ranks must hear of it
            problem = RuntimeError(str(error))
        offers = exchange(_Offer(problem, mine.address if mine is not None else None, token))
        _raise_problems(name, [offer.problem for offer in offers], world_ranks)

        assert mine is not None, "without a segment this rank would have had a problem"
        segments: list[SharedSegment] = []
        for peer, offer in enumerate(offers):
            try:
                segments.append(mine if peer == rank else _open_offered(offer))
            except Exception as error:
                problem = RuntimeError(f"cannot map the segment of world rank {world_ranks[peer]}: {error}")
                break
        # After this exchange every rank has mapped everything.
        _raise_problems(name, exchange(problem), world_ranks)
    finally:
        if mine is not None:
            mine.stop_sharing()
    processes = [request.process for request in requests]
    return GroupMemory(name, segments, processes, rank, world_ranks, data_bytes, num_slots)


def _open_offered(offer: _Offer) -> SharedSegment:
    assert offer.address is not None, "a rank without a segment has a problem, which was raised before"
    segment = SharedSegment.open(offer.address)
    if segment.array(0, _WORD_BYTES).view(np.int64)[_TOKEN] != offer.token:
        raise RuntimeError(f"{offer.address.path} is not the memory that was offered")
    return segment


def _check_requests(name: str, requests: list[_Request], segment_bytes: int, world_ranks: Sequence[int]) -> None:
    if any(request.what != requests[0].what for request in requests):
        asked = "; ".join(
            f"world rank {world_rank}: " + ", ".join(f"{key}={value}" for key, value in request.what.items())
            for world_rank, request in zip(world_ranks, requests, strict=True)
        )
        raise ValueError(f"symmetric memory must be asked for alike on every rank of the group, but got {asked}")
    if len({request.process.host_key for request in requests}) > 1:
        raise RuntimeError(
            "symmetric memory needs all ranks of the group on one host, but they are on "
            f"{_hosts(requests, world_ranks)}; use one group per host"
        )
    if len({request.process.pid_namespace for request in requests}) > 1:
        raise RuntimeError(
            "symmetric memory needs all ranks of the group in one container (one PID namespace), but they are in "
            f"different ones: {_hosts(requests, world_ranks)}; start the containers with a shared PID namespace"
        )
    available = min((r.available_memory for r in requests if r.available_memory is not None), default=None)
    if available is not None and segment_bytes * len(requests) > available:
        raise RuntimeError(
            f"symmetric memory {name!r} was not allocated: {segment_bytes} bytes on each of {len(requests)} ranks are "
            f"more than the {available} bytes of memory that the host has left; ask for less"
        )


def _hosts(requests: list[_Request], world_ranks: Sequence[int]) -> str:
    ranks_of: dict[str, list[int]] = {}
    for world_rank, request in zip(world_ranks, requests, strict=True):
        ranks_of.setdefault(request.process.hostname, []).append(world_rank)
    return ", ".join(f"{hostname} (world ranks {ranks})" for hostname, ranks in ranks_of.items())


def _raise_problems(name: str, problems: list[Exception | None], world_ranks: Sequence[int]) -> None:
    found = [(world_rank, problem) for world_rank, problem in zip(world_ranks, problems, strict=True) if problem]
    if found:
        listed = "; ".join(f"world rank {world_rank}: {problem}" for world_rank, problem in found)
        raise type(found[0][1])(f"symmetric memory {name!r} was not allocated: {listed}")
