"""Moving blocks of tensors between the ranks of a group, exactly: uneven and empty blocks, any dim, any dtype.

The steps of a planned redistribution. Blocks are given in line order (the order of the mesh axes); ``positions[i]`` is
the place of the i-th of them in the group, None when the two orders agree. Nothing here records gradients. Results are
put together by operators that make new tensors: MindSpore loses writes into views.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mindspore import mint, ops

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.base import tensors
from hyper_parallel.platform.mindspore.communication import collectives
from hyper_parallel.platform.mindspore.operators.creation import clone
from hyper_parallel.platform.shared.region import Region


class Pending:
    """A step in flight: ``wait()`` completes it and gives the result."""

    __slots__ = ("_finish", "_handle")

    def __init__(self, handle: Any, finish: Callable[[], Any]) -> None:
        self._handle = handle
        self._finish = finish

    def wait(self) -> Any:
        """The result, complete."""
        if self._handle is not None:
            self._handle.wait()
            self._handle = None
        with private_api.no_grad():
            return self._finish()


def gather_blocks(tensor: Any, dim: int, sizes: Sequence[int], positions: Sequence[int] | None, group: Any) -> Pending:
    """All ranks' blocks of dim ``dim``, concatenated; ``sizes`` are theirs."""
    num_blocks, largest = len(sizes), max(sizes)
    with private_api.no_grad():
        block = ops.expand_dims(_padded(tensor, dim, largest), 0)
    gathered, handle = collectives.all_gather_into_tensor(block, group, True)
    order = range(num_blocks) if positions is None else positions

    def finish() -> Any:
        rows = mint.split(gathered, 1, 0)
        parts = [
            narrowed(ops.reshape(rows[place], tuple(gathered.shape[1:])), dim, 0, size)
            for place, size in zip(order, sizes, strict=True)
        ]
        return mint.cat(parts, dim)

    return Pending(handle, finish)


def reduce_blocks(
    tensor: Any, dim: int, sizes: Sequence[int], positions: Sequence[int] | None, group: Any, op: str, mine: int
) -> Pending:
    """The reduction over the group, of which this rank keeps block ``mine`` of dim ``dim``."""
    largest = max(sizes)
    with private_api.no_grad():
        blocks: list[Any] = [None] * len(sizes)
        start = 0
        for index, size in enumerate(sizes):
            part = _padded(narrowed(tensor, dim, start, size), dim, largest)
            blocks[index if positions is None else positions[index]] = ops.expand_dims(part, 0)
            start += size
        stacked = mint.cat(blocks, 0)
    reduced, handle = collectives.reduce_scatter_tensor(stacked, group, True, op)
    return Pending(handle, lambda: clone(narrowed(ops.reshape(reduced, tuple(reduced.shape[1:])), dim, 0, sizes[mine])))


def all_reduce_blocks(tensor: Any, group: Any, op: str) -> Pending:
    """The reduction over the group, whole on every rank; ``tensor`` is kept."""
    with private_api.no_grad():
        own = clone(tensor)
    reduced, handle = collectives.all_reduce(own, group, True, op)
    return Pending(handle, lambda: reduced)


def exchange_blocks(
    tensor: Any,
    sends: Sequence[Region | None],
    receives: Sequence[Region | None],
    kept: tuple[Region, Region] | None,
    shape: Sequence[int],
    group: Any,
) -> Pending:
    """``sends[r]`` of my block goes to group rank r, which fills ``receives[r]`` of the result; ``kept`` stays here."""
    with private_api.no_grad():
        parts = [ops.reshape(_part(tensor, box), (-1,)) for box in sends if box is not None and _numel(box)]
        packed = mint.cat(parts, 0) if parts else _zeros((0,), tensor)
    send_sizes = [_numel(box) for box in sends]
    receive_sizes = [_numel(box) for box in receives]
    received, handle = collectives.all_to_all_single(
        packed, (sum(receive_sizes),), group, True, output_splits=receive_sizes, input_splits=send_sizes
    )

    def finish() -> Any:
        pieces: list[tuple[Region, Any]] = []
        if kept is not None:
            pieces.append((kept[1], _part(tensor, kept[0])))
        start = 0
        for box, size in zip(receives, receive_sizes, strict=True):
            if box is not None and size:
                values = narrowed(received, 0, start, size)
                pieces.append((box, ops.reshape(values, box.sizes)))
            start += size
        return _assembled(pieces, tuple(shape), tensor)

    return Pending(handle, finish)


def _assembled(pieces: list[tuple[Region, Any]], shape: tuple[int, ...], like: Any) -> Any:
    """The tensor whose parts are given, in memory of its own, by joining them dim by dim: pieces of a grid."""
    pieces = [(box, piece) for box, piece in pieces if 0 not in piece.shape]
    if not pieces:
        return _zeros(shape, like)
    if len(pieces) == 1:
        with private_api.no_grad():
            return clone(pieces[0][1])
    return _joined(pieces, 0, len(shape))


def _joined(pieces: list[tuple[Region, Any]], dim: int, ndim: int) -> Any:
    if len(pieces) == 1:
        return pieces[0][1]
    rows: dict[tuple[int, int], list[tuple[Region, Any]]] = {}
    for box, piece in pieces:
        rows.setdefault((box.offsets[dim], box.sizes[dim]), []).append((box, piece))
    joined = [_joined(row, dim + 1, ndim) for _, row in sorted(rows.items())]
    return joined[0] if len(joined) == 1 else mint.cat(joined, dim)


def slice_block(tensor: Any, box: Region) -> Any:
    """A part of the tensor, in memory of its own; of one on the meta device, which has none, another there."""
    if tensors.is_meta(tensor):
        return tensors.new_tensor(box.sizes, tensor.dtype, tensor.device)
    with private_api.no_grad():
        return clone(_part(tensor, box))


def embed_block(tensor: Any, box: Region, shape: Sequence[int]) -> Any:
    """A tensor of zeros with ``tensor`` at ``box``."""
    with private_api.no_grad():
        padded = tensor
        for dim, (start, length, size) in enumerate(zip(*box, shape, strict=True)):
            sizes = [start, size - start - length]
            if not any(sizes):
                continue
            before, after = (_zeros((*padded.shape[:dim], count, *padded.shape[dim + 1 :]), padded) for count in sizes)
            padded = mint.cat([part for part in (before, padded, after) if part.shape[dim]] or [before], dim)
        return clone(padded) if padded is tensor else padded


def add_rows(total: Any, part: Any, start: int) -> Any:
    """``total`` with ``part`` added to the rows of dim -2 from ``start``."""
    offsets = (*(0,) * (total.ndim - 2), start, 0)
    return total + embed_block(part, Region(offsets, tuple(part.shape)), tuple(total.shape))


def identity_like(tensor: Any, op: str) -> Any:
    """What leaves a reduction unchanged: zeros for a sum, ones for a product, the tensor itself for the others."""
    with private_api.no_grad():
        if op == "sum":
            return _zeros(tensor.shape, tensor)
        return tensors.full_like(tensor, 1.0) if op == "prod" else clone(tensor)


def narrowed(tensor: Any, dim: int, start: int, length: int) -> Any:
    """``length`` rows of a dim, from ``start``; none are allowed."""
    if start == 0 and length == tensor.shape[dim]:
        return tensor
    index = [slice(None)] * tensor.ndim
    index[dim] = slice(start, start + length)
    return tensor[tuple(index)]


def _part(tensor: Any, box: Region) -> Any:
    for dim, (start, length) in enumerate(zip(*box, strict=True)):
        tensor = narrowed(tensor, dim, start, length)
    return tensor


def _numel(box: Region | None) -> int:
    return 0 if box is None else box.num_elements


def _padded(tensor: Any, dim: int, size: int) -> Any:
    missing = size - tensor.shape[dim]
    if not missing:
        return tensor.contiguous()
    return mint.cat([tensor, _zeros((*tensor.shape[:dim], missing, *tensor.shape[dim + 1 :]), tensor)], dim)


def _zeros(shape: Sequence[int], like: Any) -> Any:
    return tensors.zeros(shape, like.dtype, like.device)
