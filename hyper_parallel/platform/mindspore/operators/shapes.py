"""Neutral operators that give a tensor another shape, or put tensors together and take them apart along a dim."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspore import mint, ops

from hyper_parallel.platform.mindspore.mends.empty_blocks import aligned_sizes, zeros_of
from hyper_parallel.platform.mindspore.operators.positions import getitem
from hyper_parallel.platform.mindspore.operators.table import neutral

# As MindSpore has it: its module is given a replacement later (``takes_over/``), which looks for DTensors first.
_reshape = ops.reshape


@neutral
def reshape(input: Any, *shape: Any) -> Any:
    return _reshape(input, tuple(shape[0]) if isinstance(shape[0], (tuple, list)) else shape)


@neutral
def flatten(input: Any, start_dim: int = 0, end_dim: int = -1) -> Any:
    return mint.flatten(input, start_dim, end_dim)


@neutral
def permute(input: Any, *dims: Any) -> Any:
    return ops.transpose(input, tuple(dims[0]) if isinstance(dims[0], (tuple, list)) else dims)


@neutral
def transpose(input: Any, dim0: int, dim1: int) -> Any:
    order = list(range(input.ndim))
    order[dim0], order[dim1] = order[dim1], order[dim0]
    return ops.transpose(input, tuple(order))


@neutral
def unsqueeze(input: Any, dim: int) -> Any:
    return ops.expand_dims(input, dim)


@neutral
def squeeze(input: Any, *dim: Any) -> Any:
    return ops.squeeze(input, *dim)


@neutral
def expand(input: Any, *sizes: Any) -> Any:
    wanted = tuple(sizes[0]) if isinstance(sizes[0], (tuple, list)) else sizes
    return ops.broadcast_to(input, wanted)


@neutral
def broadcast_to(input: Any, *shape: Any) -> Any:
    return expand(input, *shape)


@neutral
def view(input: Any, *shape: Any) -> Any:
    return reshape(input, *shape)


@neutral
def tile(input: Any, repeats: Sequence[int]) -> Any:
    if 0 not in input.shape:
        return ops.tile(input, tuple(repeats))
    sizes = aligned_sizes(input.shape, tuple(repeats))
    return zeros_of([size * times for size, times in sizes], input.dtype, input)


@neutral
def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    return mint.cat(list(tensors), dim)


@neutral
def stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    return ops.stack(list(tensors), dim)


@neutral
def split(input: Any, sections: Any, dim: int = 0) -> Any:
    return tuple(mint.split(input, sections, dim))


@neutral
def split_with_sizes(input: Any, sizes: Sequence[int], dim: int = 0) -> Any:
    return tuple(mint.split(input, tuple(sizes), dim))


@neutral
def chunk(input: Any, chunks: int, dim: int = 0) -> Any:
    return tuple(mint.chunk(input, chunks, dim))


@neutral
def unbind(input: Any, dim: int = 0) -> Any:
    dim %= input.ndim
    shape = (*input.shape[:dim], *input.shape[dim + 1 :])
    return tuple(ops.reshape(one, shape) for one in mint.split(input, 1, dim))


@neutral
def narrow(input: Any, dim: int, start: int, length: int) -> Any:
    if start == 0 and length == input.shape[dim]:
        return input
    index = [slice(None)] * input.ndim
    index[dim] = slice(start, start + length)
    return getitem(input, tuple(index))


@neutral
def flip(input: Any, *dims: Any) -> Any:
    return mint.flip(input, tuple(dims[0]) if isinstance(dims[0], (tuple, list)) else dims)


@neutral
def tril(input: Any, diagonal: int = 0) -> Any:
    return input if 0 in input.shape else ops.tril(input, diagonal)


@neutral
def triu(input: Any, diagonal: int = 0) -> Any:
    return input if 0 in input.shape else ops.triu(input, diagonal)


@neutral
def diagonal(input: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    return ops.diagonal(input, offset, dim1, dim2)


@neutral
def pad(input: Any, pad: Sequence[int], mode: str = "constant", value: Any = None) -> Any:
    return ops.pad(input, tuple(pad), mode, value)
