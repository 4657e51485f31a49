"""Tensors as plain bits: numpy arrays of unsigned integers as wide as the elements, for files and messages."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.autograd.graph import increment_version

from hyper_parallel.platform.torch.base.dtensor_base import detached

__all__ = ["raw_array", "set_raw"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_RAW = {1: np.dtype("u1"), 2: np.dtype("u2"), 4: np.dtype("u4"), 8: np.dtype("u8"), 16: np.dtype("V16")}


def raw_array(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """The bits of the tensor (of a DTensor: of its block): the same memory if that is the host's, else a copy."""
    plain = detached(tensor)
    if plain.is_meta:
        raise ValueError("a tensor on the meta device has no values; materialise it first, with init_parameters")
    if plain.layout is not torch.strided or plain.is_quantized:
        raise TypeError(f"a tensor of layout {plain.layout} and dtype {plain.dtype} is not dense; take its to_dense()")
    if not plain.is_cpu:
        plain = plain.cpu()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    size = plain.element_size()
    if size in _INTEGERS:
        plain = plain.view(_INTEGERS[size])
    return plain.numpy().view(_RAW[size])


def set_raw(tensor: torch.Tensor, array: np.ndarray[Any, Any]) -> None:
    """Give the tensor (a DTensor: its block) these bits, unless ``array`` is its own memory already."""
    plain = detached(tensor)
    is_whole_memory = plain.is_cpu and not (plain.is_conj() or plain.is_neg())
    if plain.numel() == 0 or (is_whole_memory and array.__array_interface__["data"][0] == plain.data_ptr()):
        if not plain.is_inference():
            increment_version((plain,))  # Autograd did not see it: gradients that need the older values are an error.
        return
    size = plain.element_size()
    signed = np.complex128 if size == 16 else np.uint8 if size == 1 else np.dtype(f"i{size}")
    contiguous = np.ascontiguousarray(array).view(signed)
    if not contiguous.flags.writeable:
        contiguous = contiguous.copy()  # torch warns of arrays that it could not write to
    plain.copy_(torch.from_numpy(contiguous).view(plain.dtype).reshape(plain.shape))
