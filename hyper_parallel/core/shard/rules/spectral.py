"""Fourier transforms: the dims that are transformed stay whole, all others may be cut, and pending sums pass."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.shard.empty_blocks import has_empty_block
from hyper_parallel.core.shard.rule_table import rule
from hyper_parallel.core.shard.rules.cut_letters import arguments
from hyper_parallel.core.shard.rules.index_entries import with_spare_row
from hyper_parallel.core.shard.rules.views import ALONE
from hyper_parallel.core.shard.signature import LocalCall, OpCall, Signature, TensorSpec, letters, without
from hyper_parallel.platform import get_platform

_KINDS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")


def _along(call: OpCall, spec: Any, dims: Any) -> Signature | None:
    if not isinstance(spec, TensorSpec) or len(call.tensors) > 1:
        return None
    if dims is None:
        dims = range(spec.ndim)
    elif isinstance(dims, int):
        dims = (dims,)
    labels = without(letters(spec.ndim), [dim % spec.ndim for dim in dims])
    wraps = get_platform().dtype_name(spec.dtype).startswith("uint")  # its parts count around
    linear = () if wraps else ALONE
    return Signature((labels,), (labels,), linear=linear, local=_of_nothing, needs_local=has_empty_block)


def _of_nothing(call: LocalCall) -> Any:
    """The framework's transform refuses an empty batch: one of zeros is transformed, and nothing of it is taken."""
    block = call.args[0] if call.args else call.kwargs["input"]
    empty = [dim for dim, size in enumerate(block.shape) if size == 0]
    for dim in empty:
        block = with_spare_row(block, dim)
    rest = {name: value for name, value in call.kwargs.items() if name != "input"}
    result = call.func(block, *call.args[1:], **rest)
    for dim in empty:
        result = result.narrow(dim, 0, 0)
    return result


@rule(*(f"fft_{kind}" for kind in _KINDS), by_dtype=True)
def of_one_dim(call: OpCall) -> Signature | None:
    given = arguments(call, "input", "n", "dim", dim=-1)
    return _along(call, given["input"], given["dim"])


@rule(*(f"fft_{kind}2" for kind in _KINDS), by_dtype=True)
def of_two_dims(call: OpCall) -> Signature | None:
    given = arguments(call, "input", "s", "dim", dim=(-2, -1))
    return _along(call, given["input"], given["dim"])


@rule(*(f"fft_{kind}n" for kind in _KINDS), by_dtype=True)
def of_several_dims(call: OpCall) -> Signature | None:
    given = arguments(call, "input", "s", "dim", s=None, dim=None)
    dims = given["dim"]
    if dims is None and given["s"] is not None:
        dims = tuple(range(-len(given["s"]), 0)) if isinstance(given["s"], (tuple, list)) else -1
    return _along(call, given["input"], dims)


@rule("fft_fftshift", "fft_ifftshift")
def shifts(call: OpCall) -> Signature | None:
    given = arguments(call, "input", "dim", dim=None)
    return _along(call, given["input"], given["dim"])
