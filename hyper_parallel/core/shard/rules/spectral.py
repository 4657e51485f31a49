"""Fourier transforms: the dims that are transformed stay whole, all others may be cut, and pending sums pass."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.shard.rule_kit.empty_blocks import lacks_rows, with_spare_rows
from hyper_parallel.core.shard.rule_kit.rule_table import rule
from hyper_parallel.core.shard.rule_kit.signature import OpCall, Signature, TensorSpec, letters, without
from hyper_parallel.core.shard.rules.sharded_letters import arguments
from hyper_parallel.core.shard.rules.views import ALONE

_KINDS = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")


def _along(call: OpCall, spec: Any, dims: Any) -> Signature | None:
    if not isinstance(spec, TensorSpec) or len(call.tensors) > 1:
        return None
    if dims is None:
        dims = range(spec.ndim)
    elif isinstance(dims, int):
        dims = (dims,)
    labels = without(letters(spec.ndim), [dim % spec.ndim for dim in dims])
    # The framework's transform refuses an empty batch.
    return Signature((labels,), (labels,), linear=ALONE, local=with_spare_rows, needs_local=lacks_rows)


@rule(*(f"fft_{kind}" for kind in _KINDS))
def of_one_dim(call: OpCall) -> Signature | None:
    given = arguments(call, "input", "n", "dim", dim=-1)
    return _along(call, given["input"], given["dim"])


@rule(*(f"fft_{kind}2" for kind in _KINDS))
def of_two_dims(call: OpCall) -> Signature | None:
    given = arguments(call, "input", "s", "dim", dim=(-2, -1))
    return _along(call, given["input"], given["dim"])


@rule(*(f"fft_{kind}n" for kind in _KINDS))
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
