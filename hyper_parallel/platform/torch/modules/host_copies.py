"""Copying the bits of tensors into memory of the host that somebody else has made, shared memory for instance.

Note [Pinned on the way]
A device copies at full speed only into pinned memory, and memory that is shared with another process is not. So the
bits go through two pinned buffers that take turns: while the device fills one, the host empties the other. They are
small and are kept, so pinning, which is slow, happens once.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from hyper_parallel.platform.torch.base import devices
from hyper_parallel.platform.torch.base.dtensor_base import detached
from hyper_parallel.platform.torch.base.tensors import as_bytes
from hyper_parallel.platform.torch.modules.raw_bits import raw_array

__all__ = ["copy_raw_to_host", "is_in_host_memory"]

_BUFFER_BYTES = 64 << 20
_one_at_a_time = threading.Lock()


def is_in_host_memory(tensor: torch.Tensor) -> bool:
    """Whether the bits of the tensor (of a DTensor: of its block) are where the host can look at them."""
    return tensor.device.type in ("cpu", "meta")


def copy_raw_to_host(copies: Iterable[tuple[torch.Tensor, np.ndarray[Any, Any]]]) -> None:
    """Fill each array of bytes with the bits of its tensor (of a DTensor: of its block), in row-major order."""
    with _one_at_a_time:
        filling, emptying = _buffers()
        for buffer in (filling, emptying):
            buffer.forget()  # what an interrupted call has left
        for tensor, target in copies:
            if is_in_host_memory(tensor):
                target[...] = np.ascontiguousarray(raw_array(tensor)).reshape(-1).view(np.uint8)
                continue
            bits = _bits(detached(tensor))
            for part, place in zip(bits.split(_BUFFER_BYTES), _split(target), strict=True):
                if filling.room < len(place):
                    filling.close()
                    filling, emptying = emptying, filling
                    filling.empty()
                filling.add(part, place)
        for buffer in (emptying, filling):
            buffer.empty()


def _bits(plain: torch.Tensor) -> torch.Tensor:
    """The bits as bytes in row-major order, on the device."""
    return as_bytes(plain.resolve_conj().resolve_neg())


def _split(array: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    return [array[at : at + _BUFFER_BYTES] for at in range(0, max(len(array), 1), _BUFFER_BYTES)]


class _Buffer:
    """Pinned memory, and where what is in it goes."""

    def __init__(self) -> None:
        self._memory = _pinned(_BUFFER_BYTES)
        self.forget()

    @property
    def room(self) -> int:
        return len(self._memory) - self._used

    def add(self, part: torch.Tensor, place: np.ndarray[Any, Any]) -> None:
        _copy(self._memory[self._used : self._used + len(part)], part)
        self._places.append(place)
        self._used += len(part)

    def close(self) -> None:
        """Nothing more comes in before it is emptied."""
        self._filled = devices.new_event()
        self._filled.record(devices.get_current_stream())

    def empty(self) -> None:
        if not self._places:
            return
        if self._filled is None:
            self.close()
        self._filled.synchronize()
        data, at = self._memory.numpy(), 0
        for place in self._places:
            place[...] = data[at : at + len(place)]
            at += len(place)
        self.forget()

    def forget(self) -> None:
        self._places: list[np.ndarray[Any, Any]] = []
        self._used = 0
        self._filled: Any = None


@functools.cache
def _buffers() -> tuple[_Buffer, _Buffer]:
    return _Buffer(), _Buffer()


def _pinned(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=devices.get_device_type() != "cpu")


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)
