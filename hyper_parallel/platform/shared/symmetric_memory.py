"""One-sided memory between the ranks of one host: every rank of a group reads and writes the others' tensors directly.

``get_symmetric_memory_handler().allocate(shape, dtype, group)`` gives each rank of the group a zeroed tensor in shared
memory and a :class:`SymmetricBuffer` that reaches everyone's. Writing needs no help from the other side, so tell it
when data is there (``signal`` and ``wait_signal``) or meet it (``barrier``). A ring, run by every rank::

    import torch
    from hyper_parallel import get_platform

    handler = get_platform().get_symmetric_memory_handler()
    with handler.allocate((2, 3), torch.float32) as buffer:
        right = (buffer.rank + 1) % buffer.num_ranks
        left = (buffer.rank - 1) % buffer.num_ranks
        buffer.put(torch.full((2, 3), float(buffer.rank)), right)  # one-sided write
        buffer.signal(right)  # after the data, for whoever waits
        buffer.wait_signal(value=1)  # my left neighbour has written
        assert buffer.local.eq(left).all()
        buffer.barrier()
        assert buffer.peer(right).eq(buffer.rank).all()  # reading someone else's memory
        buffer.barrier()  # nobody frees before everybody has read

Peers are positions in the group: 0 to ``num_ranks - 1``. The memory is host memory; ``put`` and ``get`` also take
tensors of an accelerator and return when the copy is done. All ranks must be on one host. Nothing stays in the system
after ``free``, the end of the process, or a crash: see Note [Nothing is left behind] in ``host/shared_segment.py``.
The process group serves to allocate; using the buffer needs it no more.
"""

from __future__ import annotations

import math
import operator
import os
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hyper_parallel.platform.host.group_memory import GroupMemory, allocate_group_memory

__all__ = ["SharingFramework", "SymmetricBuffer", "SymmetricMemoryHandler", "handler_of_this_process"]

DEFAULT_TIMEOUT = 300.0


@dataclass(frozen=True)
class SharingFramework:
    """What symmetric memory needs from a framework."""

    tensor: Any  # the type of its tensors
    default_dtype: Any
    itemsize: Callable[[Any], int]  # bytes of one element of a dtype
    check_dtype: Callable[[Any], None]  # raises unless it is a dtype whose values are their bytes
    over_bytes: Callable[[np.ndarray, tuple[int, ...], Any], Any]  # a tensor over these bytes, not copied
    copy: Callable[[Any, Any], None]  # (target, source): without gradient
    own_copy: Callable[[Any], Any]
    all_gather_object: Callable[[list[Any], Any, Any], None]
    place_in: Callable[[Any], tuple[int, list[int]]]  # this process's rank in a group and the group's world ranks


class SymmetricBuffer:
    """One tensor per rank of a group, all reachable by every rank. Made by ``SymmetricMemoryHandler.allocate``."""

    def __init__(self, framework: SharingFramework, memory: GroupMemory, shape: tuple[int, ...], dtype: Any) -> None:
        self._framework = framework
        self._memory = memory
        self._tensors: list[Any | None] = [None] * memory.num_ranks
        self.shape = shape
        self.dtype = dtype
        self.numel = math.prod(shape)
        self.name = memory.name
        self.rank = memory.rank
        self.num_ranks = memory.num_ranks
        self.num_slots = memory.num_slots
        self.world_ranks = memory.world_ranks

    @property
    def local(self) -> Any:
        """My tensor. Others write to it; it is shared memory, not a copy."""
        return self.peer(self.rank)

    def peer(self, rank: int) -> Any:
        """The tensor of ``rank``, readable and writable, not a copy."""
        self._memory.check_usable("peer")
        self._memory.check_peer("peer", rank)
        tensor = self._tensors[rank]
        if tensor is None:
            tensor = self._framework.over_bytes(self._memory.data(rank), self.shape, self.dtype)
            self._tensors[rank] = tensor
        return tensor

    def put(self, source: Any, peer: int, offset: int = 0) -> None:
        """Copy ``source`` into the tensor of ``peer``, from its flat element ``offset`` on."""
        self._check_tensor("put", "source", source)
        window = self._window("put", peer, source.shape, offset)
        self._framework.copy(window, source)

    def get(self, peer: int, shape: Iterable[int] | None = None, offset: int = 0, out: Any | None = None) -> Any:
        """A copy of ``shape`` (default: as ``out``, else all) of ``peer``'s tensor from flat element ``offset`` on."""
        if out is not None:
            self._check_tensor("get", "out", out)
            if shape is not None and tuple(shape) != tuple(out.shape):
                raise ValueError(
                    f"get: shape {tuple(shape)} differs from that of out, {tuple(out.shape)}; give only one of them"
                )
            shape = out.shape
        shape = self.shape if shape is None else tuple(shape)
        window = self._window("get", peer, shape, offset)
        if out is None:
            return self._framework.own_copy(window)
        self._framework.copy(out, window)
        return out

    def barrier(self, timeout: float | None = DEFAULT_TIMEOUT) -> None:
        """Return when every rank of the group is here; what they wrote before is then visible.

        Raises ``TimeoutError`` after ``timeout`` seconds (``None``: never) and ``RuntimeError`` as soon as a rank that
        is missing has died or freed the buffer; both name the ranks.
        """
        self._memory.barrier(timeout)

    def signal(self, peer: int, slot: int = 0, value: int = 1, op: str = "add") -> None:
        """Add ``value`` to slot ``slot`` of ``peer``; with ``op="set"`` replace what this rank has put there so far.

        A slot is the sum of what each rank has put there, so signals of several ranks are never lost. Whoever sees the
        signal also sees the data that this rank wrote before it.
        """
        self._memory.signal(peer, slot, value, op)

    def read_signal(self, slot: int = 0, source: int | None = None) -> int:
        """The value of my slot now: the sum over all ranks, or only the part of ``source``."""
        return self._memory.read_signal(slot, source)

    def wait_signal(
        self, slot: int = 0, value: int = 1, timeout: float | None = DEFAULT_TIMEOUT, source: int | None = None
    ) -> int:
        """Wait until my slot (or the part of ``source``) is at least ``value``, and return it. Slots are never reset.

        Raises as ``barrier`` does; without ``source``, a rank that freed the buffer is no error while another can
        still signal.
        """
        return self._memory.wait_signal(slot, value, source, timeout)

    def free(self) -> None:
        """Let go of the memory on this rank; not collective, and the others may go on with theirs.

        The buffer raises afterwards. Tensors taken from it stay valid; the memory is returned when the last is gone.
        """
        self._tensors = [None] * self.num_ranks
        self._memory.free()

    @property
    def is_freed(self) -> bool:
        return self._memory.is_freed

    def __enter__(self) -> SymmetricBuffer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.free()

    def __repr__(self) -> str:
        state = ", freed" if self.is_freed else ""
        return (
            f"SymmetricBuffer({self.name!r}, shape={tuple(self.shape)}, dtype={self.dtype}, "
            f"rank={self.rank} of {self.num_ranks}{state})"
        )

    def _check_tensor(self, operation: str, role: str, tensor: Any) -> None:
        if not isinstance(tensor, self._framework.tensor):
            raise TypeError(f"{operation}: {role} must be a tensor, got {type(tensor).__name__}")
        if tensor.dtype != self.dtype:
            raise ValueError(
                f"{operation}: {role} is {tensor.dtype} but {self.name} holds {self.dtype}; "
                f"convert it first, {role}.to({self.dtype})"
            )

    def _window(self, operation: str, peer: int, shape: tuple[int, ...], offset: int) -> Any:
        self._memory.check_usable(operation)
        self._memory.check_peer(operation, peer)
        if isinstance(offset, bool) or not isinstance(offset, int):
            raise TypeError(f"{operation}: offset must be an int, got {offset!r}")
        end = offset + math.prod(shape)
        if any(size < 0 for size in shape) or not 0 <= offset <= end <= self.numel:
            raise ValueError(
                f"{operation}: elements {offset} to {end} (offset {offset}, shape {tuple(shape)}) are not inside "
                f"{self.name}, which has {self.numel} elements"
            )
        data = self._memory.data(peer)
        itemsize = self._framework.itemsize(self.dtype)
        return self._framework.over_bytes(data[offset * itemsize : end * itemsize], tuple(shape), self.dtype)


def _checked_request(
    framework: SharingFramework, shape: Any, dtype: Any, name: Any, num_slots: Any
) -> tuple[tuple[int, ...], int]:
    if isinstance(shape, int):
        shape = (shape,)
    try:
        size = tuple(operator.index(length) for length in shape)
    except TypeError as error:
        raise TypeError(f"shape must be ints, got {shape!r}") from error
    if any(length < 0 for length in size):
        raise ValueError(f"shape must not be negative, got {tuple(size)}")
    framework.check_dtype(dtype)
    if name is not None and not isinstance(name, str):
        raise TypeError(f"name must be a string, got {name!r}")
    if isinstance(num_slots, bool) or not isinstance(num_slots, int) or num_slots < 1:
        raise ValueError(f"num_slots must be a positive int, got {num_slots!r}")
    return size, math.prod(size) * framework.itemsize(dtype)


class SymmetricMemoryHandler:
    """Allocates symmetric memory; one per process, from :func:`get_symmetric_memory_handler`."""

    def __init__(self, framework: SharingFramework) -> None:
        self._framework = framework
        self._buffers: weakref.WeakSet[SymmetricBuffer] = weakref.WeakSet()
        self._num_allocations = 0

    @property
    def buffers(self) -> list[SymmetricBuffer]:
        """The buffers of this process that are not freed."""
        return [buffer for buffer in self._buffers if not buffer.is_freed]

    def allocate(
        self,
        shape: int | Iterable[int],
        dtype: Any = None,
        group: Any = None,
        name: str | None = None,
        num_slots: int = 16,
    ) -> SymmetricBuffer:
        """Collective over ``group`` (``None``: all ranks): a zeroed tensor per rank, and ``num_slots`` signal slots.

        Every rank must ask for the same. Otherwise, or when any rank cannot, all ranks raise the same error.
        ``name`` appears in messages and in /proc/<pid>/maps.
        """
        dtype = self._framework.default_dtype if dtype is None else dtype
        rank, world_ranks = self._framework.place_in(group)

        size: tuple[int, ...] = ()
        num_bytes, request, problem = 0, dict[str, Any](), None
        try:
            size, num_bytes = _checked_request(self._framework, shape, dtype, name, num_slots)
            request = {"shape": tuple(size), "dtype": str(dtype), "name": name, "num_slots": num_slots}
        except (TypeError, ValueError) as error:
            problem = type(error)(str(error))  # without the traceback, which would keep this frame alive

        def exchange(value: Any) -> list[Any]:
            values: list[Any] = [None] * len(world_ranks)
            self._framework.all_gather_object(values, value, group)
            return values

        label = name if isinstance(name, str) else f"symmetric buffer {self._num_allocations}"
        self._num_allocations += 1
        memory = allocate_group_memory(label, request, num_bytes, num_slots, exchange, rank, world_ranks, problem)
        buffer = SymmetricBuffer(self._framework, memory, size, dtype)
        self._buffers.add(buffer)
        return buffer

    def free_all(self) -> None:
        """Free every buffer of this process."""
        for buffer in self.buffers:
            buffer.free()


_handlers: dict[int, SymmetricMemoryHandler] = {}  # by process: a forked child gets its own


def handler_of_this_process(framework: SharingFramework) -> SymmetricMemoryHandler:
    """The handler of this process; a forked child gets its own."""
    if os.getpid() not in _handlers:
        _handlers.clear()
        _handlers[os.getpid()] = SymmetricMemoryHandler(framework)
    return _handlers[os.getpid()]
