"""What distributed tensors must know about views of PyTorch: which operators give them, and who shares memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hyper_parallel.platform.torch.private_api import NoInterception

# Operators whose result shares the memory of their first argument on one device.
VIEW_OPS = frozenset(
    {
        *("getitem", "select", "narrow", "slice", "split", "split_with_sizes", "chunk", "tensor_split", "unbind"),
        *("hsplit", "vsplit", "dsplit", "diagonal", "linalg_diagonal", "unfold", "as_strided", "expand", "expand_as"),
        *("broadcast_to", "view", "view_as", "view_as_real", "view_as_complex", "real", "imag", "unflatten", "squeeze"),
        *("unsqueeze", "transpose", "t", "T", "mT", "mH", "H", "adjoint", "permute", "movedim", "moveaxis"),
        *("swapaxes", "swapdims", "detach", "alias", "atleast_1d", "atleast_2d", "atleast_3d", "positive"),
        *("reshape", "reshape_as", "flatten", "ravel", "contiguous"),
    }
)


def view_ops() -> frozenset[str]:
    """Names of the operators whose result shares the memory of their first argument."""
    return VIEW_OPS


def version_of(tensor: torch.Tensor) -> int | None:
    """How often the memory of ``tensor`` was written to; None where that is not counted (inference mode, ``.data``)."""
    with NoInterception():
        base = torch.Tensor._base.__get__(tensor)  # type: ignore[attr-defined]
        if "_counts_alone" in tensor.__dict__ or (base is not None and "_counts_alone" in base.__dict__):
            return None
        return None if tensor.is_inference() else torch.Tensor._version.__get__(tensor)  # type: ignore[attr-defined]


def shares_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two blocks lie in one memory."""
    with NoInterception():
        return torch.Tensor.untyped_storage(first)._cdata == torch.Tensor.untyped_storage(second)._cdata


def block_strides(tensor: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sizes and strides of a block."""
    with NoInterception():
        plain = torch.Tensor.detach(tensor)
    return tuple(plain.shape), plain.stride()


def would_be_view(calls: Sequence[Callable[[Any], Any]], shape: Sequence[int], block: Any) -> bool:
    """Whether the last call gives a view on one device: the first is given a whole tensor whose blocks lie in memory as
    ``block`` says, and each other one what the one before it gives."""
    sizes, strides = block
    whole = [0] * len(sizes)
    here, there = 1, 1  # where the next outer dim would continue without a gap: in the block, in the whole tensor
    # Of dims with one stride those of size 1 are inside: a block of (4, 1), transposed, is not one of (1, 4).
    for dim in sorted(range(len(sizes)), key=lambda dim: (strides[dim], sizes[dim], -dim)):
        if strides[dim] == 0 and shape[dim] != 1:
            continue  # stretched
        has_gap = strides[dim] > here and strides[dim] != there  # the block may itself lie in the memory of the whole
        whole[dim] = 2 * there if has_gap else there
        here, there = strides[dim] * max(sizes[dim], 1), whole[dim] * max(shape[dim], 1)
    with torch.inference_mode(False):  # which does not keep track of views
        result = torch.empty_strided(tuple(shape), tuple(whole), device="meta")
        for call in calls:
            given, result = result, call(result)
    return shares_memory(given, result)
