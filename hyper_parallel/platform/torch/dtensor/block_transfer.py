"""Moving blocks of tensors between the ranks of a group, exactly: uneven and empty blocks, any dim, any dtype.

The steps of a planned redistribution. Blocks are given in line order (the order of the mesh axes); ``positions[i]`` is
the place of the i-th of them in the group, None when the two orders agree. Nothing here records gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel.platform.shared.region import Region
from hyper_parallel.platform.torch.communication import collectives
from hyper_parallel.platform.torch.communication.collective_gradients import handed_out, own_copy
from hyper_parallel.platform.torch.communication.lost_ranks import completed


class Pending:
    """A step in flight: ``wait()`` completes it and gives the result."""

    __slots__ = ("_finish", "_handle")

    def __init__(self, handle: Any, finish: Callable[[], torch.Tensor]) -> None:
        self._handle = handle
        self._finish = finish

    def wait(self) -> torch.Tensor:
        """The result, complete."""
        if self._handle is not None:
            completed(self._handle)
            self._handle = None
        return self._finish()


_LARGE = 1 << 16  # elements from which torch.cat, which copies by whole rows, is faster than a permuted copy


def _joined(parts: list[torch.Tensor] | tuple[torch.Tensor, ...], dim: int) -> torch.Tensor:
    """``torch.cat`` into new memory, which autocast lets be: it refuses dtypes that are not its own."""
    shape = list(parts[0].shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    return torch.cat(parts, dim, out=parts[0].new_empty(shape))


def gather_blocks(
    tensor: torch.Tensor, dim: int, sizes: Sequence[int], positions: Sequence[int] | None, group: Any
) -> Pending:
    """All ranks' blocks of dim ``dim``, concatenated; ``sizes`` are theirs."""
    largest = max(sizes)
    even = min(sizes) == largest
    block = tensor.contiguous() if even else _padded(tensor, dim, largest)
    num_blocks = len(sizes)
    gathered, handle = collectives.all_gather_into_tensor(block.unsqueeze(0), group, True)

    def finish() -> torch.Tensor:
        if even and positions is None:
            if dim == 0:
                return gathered.flatten(0, 1)
            if gathered.numel() >= _LARGE:
                return _joined(gathered.unbind(0), dim)
            return gathered.movedim(0, dim).flatten(dim, dim + 1).contiguous()
        order = range(num_blocks) if positions is None else positions
        return _joined([gathered[place].narrow(dim, 0, size) for place, size in zip(order, sizes, strict=True)], dim)

    return Pending(handle, finish)


def reduce_blocks(
    tensor: torch.Tensor,
    dim: int,
    sizes: Sequence[int],
    positions: Sequence[int] | None,
    group: Any,
    op: str,
    mine: int,
) -> Pending:
    """The reduction over the group, of which this rank keeps block ``mine`` of dim ``dim``."""
    largest = max(sizes)
    even = min(sizes) == largest
    num_blocks = len(sizes)
    if even and positions is None:
        stacked = tensor.unflatten(dim, (num_blocks, largest)).movedim(dim, 0).contiguous()
    else:
        stacked = tensor.new_zeros((num_blocks, *tensor.shape[:dim], largest, *tensor.shape[dim + 1 :]))
        start = 0
        for index, size in enumerate(sizes):
            place = index if positions is None else positions[index]
            stacked[place].narrow(dim, 0, size).copy_(tensor.narrow(dim, start, size))
            start += size
    reduced, handle = collectives.reduce_scatter_tensor(stacked, group, True, op)
    return Pending(handle, lambda: reduced.squeeze(0).narrow(dim, 0, sizes[mine]).contiguous())


def all_reduce_blocks(tensor: torch.Tensor, group: Any, op: str) -> Pending:
    """The reduction over the group, whole on every rank; ``tensor`` is kept."""
    reduced, handle = collectives.all_reduce(own_copy(tensor), group, True, op)
    return Pending(handle, lambda: handed_out(reduced))


def exchange_blocks(
    tensor: torch.Tensor,
    sends: Sequence[Region | None],
    receives: Sequence[Region | None],
    kept: tuple[Region, Region] | None,
    shape: Sequence[int],
    group: Any,
) -> Pending:
    """``sends[r]`` of my block goes to group rank r, which fills ``receives[r]`` of the result; ``kept`` stays here."""
    parts = [tensor[box.slices].reshape(-1) for box in sends if box is not None]
    packed = _joined(parts, 0) if parts else tensor.new_empty(0)
    send_sizes = [_numel(box) for box in sends]
    receive_sizes = [_numel(box) for box in receives]
    received, handle = collectives.all_to_all_single(
        packed, (sum(receive_sizes),), group, True, output_splits=receive_sizes, input_splits=send_sizes
    )

    def finish() -> torch.Tensor:
        result = tensor.new_empty(tuple(shape))
        if kept is not None:
            result[kept[1].slices] = tensor[kept[0].slices]
        for box, values in zip(receives, received.split(receive_sizes), strict=True):
            if box is not None:
                result[box.slices] = values.view(box.sizes)
        return result

    return Pending(handle, finish)


def slice_block(tensor: torch.Tensor, box: Region) -> torch.Tensor:
    """A part of the tensor, in memory of its own."""
    return tensor[box.slices].clone(memory_format=torch.contiguous_format)


def embed_block(tensor: torch.Tensor, box: Region, shape: Sequence[int]) -> torch.Tensor:
    """A tensor of zeros with ``tensor`` at ``box``."""
    whole = tensor.new_zeros(tuple(shape))
    whole[box.slices] = tensor
    return whole


def identity_like(tensor: torch.Tensor, op: str) -> torch.Tensor:
    """What leaves a reduction unchanged: zeros for a sum, ones for a product, the tensor itself for the others."""
    if op == "sum":
        return torch.zeros_like(tensor)
    return torch.ones_like(tensor) if op == "prod" else tensor.clone()


def _numel(box: Region | None) -> int:
    return 0 if box is None else box.num_elements


def _padded(tensor: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    if tensor.shape[dim] == size:
        return tensor.contiguous()
    padded = tensor.new_zeros((*tensor.shape[:dim], size, *tensor.shape[dim + 1 :]))
    padded.narrow(dim, 0, tensor.shape[dim]).copy_(tensor)
    return padded
