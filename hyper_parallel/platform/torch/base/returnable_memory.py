"""Memory on PyTorch that is given back while the tensors over it stay, and memory that parameters lie in side by side.

Note [Memory that comes back]
A storage is resized to nothing and back. Tensors over it are made by ``set_`` and are no views of what is written to:
they have version counters of their own, so that refilling the storage does not look like a write into what autograd has
saved.
What is read while the storage is empty is an error of PyTorch's or a crash, never garbage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from hyper_parallel.platform.contract import parameter_units
from hyper_parallel.platform.shared.region import Region
from hyper_parallel.platform.torch.base.devices import get_device_type
from hyper_parallel.platform.torch.private_api import NoInterception

__all__ = ["returnable_memory", "shard_memory"]

# Told of each storage that has another number of bytes now: no operator says so.
resize_observers: list[Callable[[torch.UntypedStorage, int], None]] = []


def returnable_memory(num_elements: int, dtype: torch.dtype, device: Any) -> ReturnableMemory:
    """Memory for the whole values of parameters, released."""
    return ReturnableMemory(num_elements, dtype, device)


def shard_memory(num_elements: int, dtype: torch.dtype, device: Any, pinned: bool) -> ShardMemory:
    """Memory for the local tensors of parameters."""
    return ShardMemory(num_elements, dtype, device, pinned)


class ReturnableMemory(parameter_units.ReturnableMemory):
    """See Note [Memory that comes back]."""

    def __init__(self, num_elements: int, dtype: torch.dtype, device: Any) -> None:
        self.num_elements = num_elements
        self.num_bytes = num_elements * dtype.itemsize
        with torch.inference_mode(False):  # it outlives the first use, which may be under inference mode
            self._flat = torch.empty(num_elements, dtype=dtype, device=device)
        self._storage = self._flat.untyped_storage()
        self._resize(0)
        self._is_there = False
        self._parts: dict[tuple[int, int], torch.Tensor] = {}
        self._first: dict[tuple[int, tuple[int, ...]], torch.Tensor] = {}
        self._targets: tuple[Any, list[int], list[torch.Tensor]] | None = None

    def _resize(self, num_bytes: int) -> None:
        self._storage.resize_(num_bytes)
        for observe in resize_observers:
            observe(self._storage, num_bytes)

    def renew(self) -> None:
        if not self._is_there:
            self._is_there = True
            self._resize(self.num_bytes)

    def release(self) -> None:
        if self._is_there:
            if not self._storage.resizable():
                raise RuntimeError(
                    "the memory of whole parameters cannot be given back: numpy holds it, by weight.numpy() in a "
                    "forward; write weight.tolist() or weight.clone().numpy()"
                )
            self._is_there = False
            self._resize(0)

    def part(self, offset: int, length: int) -> torch.Tensor:
        found = self._parts.get((offset, length))
        if found is None:
            with torch.inference_mode(False), torch.no_grad():
                found = self._parts[offset, length] = self._flat[offset : offset + length]
        return found

    def settle(self) -> None:
        """Parts and tensors lie in the same memory."""

    def tensor(self, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        first = self._first.get((offset, shape))
        if first is None:
            with torch.inference_mode(False):
                first = torch.empty(0, dtype=self._flat.dtype, device=self._flat.device)
                first.set_(self._storage, offset, shape)
            self._first[offset, shape] = first
        made = first.detach()
        made._is_param = True  # type: ignore[attr-defined]  # what nn.Parameter's instance check looks at
        return made

    def tensors(self, places: Sequence[tuple[int, tuple[int, ...]]]) -> list[torch.Tensor]:
        known = self._first
        made = [known[place].detach() if place in known else self.tensor(*place) for place in places]
        for one in made:
            one._is_param = True  # type: ignore[attr-defined]
        return made

    @torch.no_grad()
    def fill_columns(self, rows: torch.Tensor, columns: Sequence[tuple[int, int, int]]) -> None:
        num_rows, width = rows.shape
        if self._targets is None or self._targets[0] is not columns:
            targets = [self.part(offset, num_rows * size).view(num_rows, size) for _, size, offset in columns]
            self._targets = (columns, [size for _, size, _ in columns], targets)
        _, sizes, targets = self._targets
        covered = sum(sizes)
        if columns[0][0] != 0 or columns[-1][0] + sizes[-1] != covered:
            for (start, size, _), target in zip(columns, targets, strict=True):
                target.copy_(rows[:, start : start + size])
            return
        torch.split_with_sizes_copy(rows if width == covered else rows[:, :covered], sizes, dim=1, out=targets)

    @torch.no_grad()
    def fill_boxes(
        self, rows: torch.Tensor, start: int, offset: int, shape: Sequence[int], boxes: Sequence[Region]
    ) -> None:
        target = self.part(offset, prod(shape)).view(tuple(shape))
        for row, box in zip(rows, boxes, strict=True):
            if box.num_elements:
                target[box.slices] = row[start : start + box.num_elements].view(box.sizes)


class ShardMemory(parameter_units.ShardMemory):
    """One tensor, of which the parameters' local tensors are parts, each with a version counter of its own."""

    def __init__(self, num_elements: int, dtype: torch.dtype, device: Any, pinned: bool) -> None:
        with torch.inference_mode(False):
            pinned = pinned and get_device_type() != "cpu" and torch.device(device).type == "cpu"
            self._flat = torch.zeros(num_elements, dtype=dtype, device=device, pin_memory=pinned)
        self._start = 0 if self._flat.is_meta else self._flat.data_ptr()

    @torch.no_grad()
    def adopt(self, parameter: torch.Tensor, offset: int) -> None:
        with torch.inference_mode(False), NoInterception():
            size = torch.Tensor.size(parameter)
            mine = torch.empty(0, dtype=self._flat.dtype, device=self._flat.device)
            mine.set_(self._flat.untyped_storage(), offset, size)
            mine.copy_(torch.Tensor.detach(parameter))
            torch.Tensor.data.__set__(parameter, mine)  # type: ignore[attr-defined]

    def holds(self, parameters: Sequence[torch.Tensor], offsets: Sequence[int]) -> bool:
        flat, size = self._flat, self._flat.dtype.itemsize
        with NoInterception():
            if flat.is_meta:
                return all(parameter.is_meta and parameter.dtype is flat.dtype for parameter in parameters)
            data_ptr, numel = torch.Tensor.data_ptr, torch.Tensor.numel
            for parameter, offset in zip(parameters, offsets, strict=True):
                if data_ptr(parameter) != self._start + offset * size and numel(parameter):
                    return False
                if parameter.dtype is not flat.dtype:
                    return False
        return True

    def part(self, offset: int, length: int) -> torch.Tensor:
        return self._flat if length == self._flat.shape[0] else self._flat[offset : offset + length]
