"""Tensors saved for backward kept in host memory: copied on a side stream in forward, fetched when backward needs them.

Note [What is moved to the host]
    The unit of a copy is the range of bytes that a saved tensor covers: its own when it is dense, else its whole
    storage, which it keeps alive anyway. Tensors over the same bytes (``x``, ``x.t()``, ``x`` saved by three linears)
    share one copy and are rebuilt with their strides, so that backward runs the same kernels as without the swap.
    Parameters, buffers and what views them stay where they are; so do tensors that are already in host memory: on a CPU
    nothing is copied at all. Tensor subclasses and tensors without plain bytes (sparse, quantized, conjugated views)
    are kept as well.

Note [A saved tensor that is modified in place]
    Autograd refuses to use a saved tensor that was modified afterwards, but not under saved-tensor hooks. So the check
    is ours. A kept tensor is compared with its version when it is fetched. A moved one is copied on a side stream, and
    a write on the main stream may overtake the copy: its source is held until the copy has finished, or until the end
    of the context, from where on the main stream waits for it. If it was modified by then the fetch raises; if it is
    modified later, the copy is complete and right.
"""

from __future__ import annotations

import contextlib
import enum
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from hyper_parallel.platform.torch.base import devices

__all__ = ["SwapPolicy", "async_save_on_cpu", "has_plain_bytes", "saving_on_host"]


class SwapPolicy(enum.Enum):
    """What to do with one saved tensor; ``policy_fn`` may return it or a bool (true: swap)."""

    KEEP = "keep"
    SWAP = "swap"


@contextlib.contextmanager
def async_save_on_cpu(policy_fn: Callable[[torch.Tensor], bool | SwapPolicy] | None = None) -> Iterator[None]:
    """Tensors saved for backward inside go to pinned host memory on a side stream and come back when they are needed.

    ``policy_fn(tensor)`` says which (default: all); parameters are never asked for. See the notes of this file for what
    is moved and for tensors that are modified in place.
    """
    if policy_fn is not None and not callable(policy_fn):
        raise TypeError(f"async_save_on_cpu: policy_fn must be a function or None, got {type(policy_fn).__name__}")
    with saving_on_host(policy_fn, frozenset()):
        yield


@contextlib.contextmanager
def saving_on_host(policy_fn: Callable[[torch.Tensor], Any] | None, staying: frozenset[int]) -> Iterator[None]:
    """:func:`async_save_on_cpu` that also leaves alone the storages whose addresses are in ``staying``."""
    copies = _HostCopies(policy_fn, staying)
    try:
        with torch.autograd.graph.saved_tensors_hooks(copies.pack, lambda packed: packed.unpack()):
            yield
    finally:
        copies.finish()


def _is_in_host_memory(tensor: torch.Tensor) -> bool:
    return tensor.device.type in ("cpu", "meta")


def has_plain_bytes(tensor: torch.Tensor) -> bool:
    """Whether the tensor is nothing more than a strided view of its storage."""
    return (
        type(tensor) in (torch.Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    )


def _views_parameter(tensor: torch.Tensor) -> bool:
    # ``_base`` has no public spelling: a linear saves the transposed weight, which is not itself a Parameter.
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill one range of memory, each place once, in whatever order of dims."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


@functools.cache
def _side_stream(device: torch.device) -> Any:
    return devices.new_stream(device=device)


def _modified_in_place(description: str, saved: int, now: int | None) -> RuntimeError:
    found = f"is at version {now}" if now is not None else "was changed while it was copied to the host"
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{description}] was saved at version {saved} and {found}; use the out-of-place form of that operation"
    )


def _describe(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"


class _Kept:
    """A saved tensor that stays where it is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Without its graph: an operator that saves its own output would keep itself alive.
        self._tensor = tensor if tensor.is_leaf else tensor.detach()
        self._version = tensor._version

    def unpack(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise _modified_in_place(_describe(self._tensor), self._version, self._tensor._version)
        return self._tensor


class _HostCopy:
    """Bytes of a storage on their way to, or in, host memory."""

    def __init__(self, tensor: torch.Tensor, start: int, num_bytes: int) -> None:
        self.device = tensor.device
        self.start = start
        self._description = _describe(tensor)
        self._version = tensor._version
        self._source: torch.Tensor | None = tensor.detach()  # shares the version counter
        self._was_modified = False
        self._host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=devices.get_device_type() != "cpu")
        stream = _side_stream(self.device)
        stream.wait_stream(devices.get_current_stream())
        source = torch.empty(0, dtype=torch.uint8, device=self.device)
        source.set_(tensor.untyped_storage(), start, (num_bytes,), (1,))
        with devices.get_stream_context()(stream):
            _copy(self._host, source)
        self._copied = stream.record_event()

    def release_if_copied(self) -> bool:
        if not self._copied.query():
            return False
        self._release()
        return True

    def release_before_later_work(self) -> None:
        """Let the current stream wait for the copy, so that the source may be written and its memory be used again."""
        devices.get_current_stream().wait_event(self._copied)
        self._release()

    def _release(self) -> None:
        self._was_modified = self._source._version != self._version
        self._source = None

    def fetch(self) -> torch.UntypedStorage:
        """The bytes on the device again, ready for the current stream."""
        if self._source is not None and self._source._version != self._version:
            raise _modified_in_place(self._description, self._version, self._source._version)
        if self._was_modified:
            raise _modified_in_place(self._description, self._version, None)
        stream, current = _side_stream(self.device), devices.get_current_stream()
        with devices.get_stream_context()(stream):
            fetched = torch.empty(self._host.numel(), dtype=torch.uint8, device=self.device)
            _copy(fetched, self._host)
        current.wait_event(stream.record_event())
        devices.record_stream(fetched, current)
        return fetched.untyped_storage()


class _Moved:
    """A saved tensor as a view of a host copy."""

    def __init__(self, tensor: torch.Tensor, copy: _HostCopy) -> None:
        self._copy = copy
        self._dtype = tensor.dtype
        self._offset = tensor.storage_offset() - copy.start // tensor.element_size()
        self._shape = tensor.shape
        self._stride = tensor.stride()

    def unpack(self) -> torch.Tensor:
        tensor = torch.empty(0, dtype=self._dtype, device=self._copy.device)
        return tensor.set_(self._copy.fetch(), self._offset, self._shape, self._stride)


class _HostCopies:
    """What one context moves: decides for each saved tensor, and copies no bytes twice."""

    def __init__(self, policy_fn: Callable[[torch.Tensor], Any] | None, staying: frozenset[int]) -> None:
        self._policy_fn = policy_fn
        self._staying = staying
        # The weak reference does not keep the storage, only its identity: no other storage gets the same ``cdata``.
        self._copies: dict[tuple[int, ...], tuple[StorageWeakRef, _HostCopy]] = {}
        self._pending: list[_HostCopy] = []

    def pack(self, tensor: torch.Tensor) -> _Kept | _Moved:
        self._pending = [copy for copy in self._pending if not copy.release_if_copied()]
        if not self._is_to_move(tensor):
            return _Kept(tensor)
        storage = tensor.untyped_storage()
        if _is_dense(tensor):
            start = tensor.storage_offset() * tensor.element_size()
            num_bytes = tensor.numel() * tensor.element_size()
        else:
            start, num_bytes = 0, storage.nbytes()
        identity = StorageWeakRef(storage)
        key = (identity.cdata, tensor._version, start, num_bytes)
        if key not in self._copies:
            copy = _HostCopy(tensor, start, num_bytes)
            self._copies[key] = (identity, copy)
            self._pending.append(copy)
        return _Moved(tensor, self._copies[key][1])

    def finish(self) -> None:
        for copy in self._pending:
            copy.release_before_later_work()
        self._pending.clear()
        self._copies.clear()

    def _is_to_move(self, tensor: torch.Tensor) -> bool:
        if tensor.numel() == 0 or not has_plain_bytes(tensor) or _views_parameter(tensor):
            return False
        if tensor.untyped_storage().data_ptr() in self._staying:
            return False
        return self._is_chosen(tensor) and not _is_in_host_memory(tensor)

    def _is_chosen(self, tensor: torch.Tensor) -> bool:
        if self._policy_fn is None:
            return True
        choice = self._policy_fn(tensor)
        if isinstance(choice, SwapPolicy):
            return choice is SwapPolicy.SWAP
        if isinstance(choice, bool):
            return choice
        raise TypeError(f"the swap policy must return a bool or a SwapPolicy, got {choice!r} for {_describe(tensor)}")
