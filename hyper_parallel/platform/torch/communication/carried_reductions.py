"""How a reduction of any dtype is carried by a backend that lacks it, and the same reductions on stacked tensors.

Note [Carrying what a backend lacks]
------------------------------------
Measured with Gloo of PyTorch 2.13; the table ``BACKENDS`` says which backend needs what.

* float16 and bfloat16 sums are rounded after each rank's addend (a third of the elements differ from the rounded exact
  sum on 4 ranks). They travel as float32 and are rounded once. So do the float8 types, which Gloo does not know.
* max and min compare with ``<``, so a NaN is lost, or wins over everything, depending on the rank it is on. Floats
  travel as integers of the same order, in which NaN is the largest (max) or the smallest (min): NaN wins, as in torch.
* A sum of bools leaves bytes other than 0 and 1. Bools are bytes whose sum, max, any is the maximum (True + True is
  True) and whose product, min, all is the minimum.
* int16 and the unsigned types are unknown. They travel as wider integers and wrap around as they should; uint64 travels
  as int64, whose sums and products have the same bits, shifted by half the range for max and min.
* Complex numbers are pairs of floats for a sum; their product does not factor, so it is gathered and multiplied here.
* The average is the sum divided once, before rounding.

Whatever is left (float64 on a backend without it) is gathered as raw bytes and reduced here by every rank in the same
order, so all ranks have the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from hyper_parallel.platform.torch.base.tensors import as_bytes

_ReduceOp = dist.ReduceOp

REDUCE_OPS = ("sum", "avg", "max", "min", "prod", "band", "bor", "bxor", "all", "any")
_NATIVE_OPS = {
    "sum": _ReduceOp.SUM,
    "avg": _ReduceOp.AVG,
    "max": _ReduceOp.MAX,
    "min": _ReduceOp.MIN,
    "prod": _ReduceOp.PRODUCT,
    "band": _ReduceOp.BAND,
    "bor": _ReduceOp.BOR,
    "bxor": _ReduceOp.BXOR,
}
_BITWISE = {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}
# What each reduction of bools is on bytes that are 0 or 1.
_OF_BOOLS = {
    **dict.fromkeys(("sum", "max", "any", "bor"), "max"),
    **dict.fromkeys(("prod", "min", "all", "band"), "min"),
    "bxor": "bxor",
}
_FLOAT8 = tuple(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
)
# Types without arithmetic of their own, or with too little of it: where their reductions are computed.
_WIDER = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    **dict.fromkeys(_FLOAT8, torch.float32),
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.complex32: torch.complex64,
}
_COMMON = frozenset({torch.float32, torch.int8, torch.uint8, torch.int32, torch.int64})
_HALVES = frozenset({torch.float16, torch.bfloat16})


@dataclass(frozen=True)
class Backend:
    """What a backend can do by itself: the dtypes it moves, those it reduces rightly, and which operations."""

    moves: frozenset[torch.dtype]
    reduces: frozenset[torch.dtype]
    orders_nan: bool
    averages: bool
    bitwise: bool
    scatters_reductions: bool


BACKENDS = {
    # Its reduce-scatter is an all-reduce of everything: twice as slow as an all-to-all and a local sum.
    "gloo": Backend(
        moves=_COMMON | _HALVES | {torch.float64, torch.bool},
        reduces=_COMMON | {torch.float64},
        orders_nan=False,
        averages=False,
        bitwise=True,
        scatters_reductions=False,
    ),
    "nccl": Backend(
        moves=_COMMON | _HALVES | {torch.float64, torch.bool},
        reduces=_COMMON | _HALVES | {torch.float64},
        orders_nan=True,
        averages=True,
        bitwise=False,
        scatters_reductions=True,
    ),
    "hccl": Backend(
        moves=_COMMON | _HALVES,
        reduces=_HALVES | {torch.float32, torch.int8, torch.int32, torch.int64},
        orders_nan=True,
        averages=False,
        bitwise=False,
        scatters_reductions=True,
    ),
}
OTHER_BACKEND = Backend(
    moves=_COMMON,
    reduces=frozenset({torch.float32, torch.int32, torch.int64}),
    orders_nan=True,
    averages=False,
    bitwise=False,
    scatters_reductions=True,
)


def why_not(op: str, dtype: torch.dtype) -> str | None:
    """Why ``op`` cannot reduce ``dtype``, with what to write instead, or None when it can."""
    if op not in REDUCE_OPS:
        return f"there is no reduction {op!r}; there are {', '.join(REDUCE_OPS)}"
    if op in ("all", "any"):
        return None if dtype is torch.bool else f"{op} reduces bools, not {dtype}; write (data != 0)"
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        return f"the average of {dtype} is not a {dtype}; cast to a floating dtype, or use op='sum'"
    if op in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        return f"{op} reduces integers and bools, not {dtype}"
    if op in ("max", "min") and dtype.is_complex:
        return f"complex numbers have no order, so there is no {op}; reduce data.abs()"
    if dtype.is_floating_point and dtype.itemsize == 1 and dtype not in _FLOAT8:
        return f"{dtype} has no arithmetic; cast to float32"
    return None


# ---------------------------------------------------------------- on the wire


@dataclass(frozen=True)
class Carrier:
    """How one (dtype, op) is all-reduced: ``load`` gives the tensor to reduce with ``op``, ``store`` the result of it.

    Without ``load`` the tensor itself is reduced; without ``store`` what was loaded shares its memory.
    """

    op: dist.ReduceOp
    load: Callable[[torch.Tensor], torch.Tensor] | None = None
    store: Callable[[torch.Tensor, int], torch.Tensor] | None = None


def find_carrier(op: str, dtype: torch.dtype, backend: Backend) -> Carrier | None:
    """How ``backend`` all-reduces contiguous tensors of ``dtype``; None: gather and reduce locally."""
    if op in _BITWISE and not backend.bitwise and (dtype is not torch.bool or op == "bxor"):
        return None
    if dtype is torch.bool:
        byte = torch.uint8 if torch.uint8 in backend.reduces else torch.int8
        if byte not in backend.reduces:
            return None
        return Carrier(_NATIVE_OPS[_OF_BOOLS[op]], lambda data: data.view(byte))
    if op in _BITWISE:
        if dtype in backend.reduces:
            return Carrier(_NATIVE_OPS[op])
        return Carrier(_NATIVE_OPS[op], as_bytes)
    if dtype.is_complex:
        return _carry_complex(op, dtype, backend)
    if dtype is torch.uint64:
        if op in ("max", "min"):
            return Carrier(
                _NATIVE_OPS[op],
                lambda data: _shift_half(data.view(torch.int64)),
                lambda carried, _: _shift_half(carried).view(torch.uint64),
            )
        return Carrier(_NATIVE_OPS[op], lambda data: data.view(torch.int64))
    wide = dtype if dtype in backend.reduces else _WIDER.get(dtype)
    if wide not in backend.reduces:
        return None
    if op in ("max", "min") and wide.is_floating_point and not backend.orders_nan:
        return Carrier(
            _NATIVE_OPS[op],
            lambda data: _to_ordered(data.to(wide), op),
            lambda carried, _: _from_ordered(carried, wide).to(dtype),
        )
    if op == "avg" and not backend.averages:
        return Carrier(
            _ReduceOp.SUM,
            lambda data: data.to(wide),
            lambda carried, group_size: carried.div_(group_size).to(dtype),
        )
    if wide is dtype:
        return Carrier(_NATIVE_OPS[op])
    return Carrier(_NATIVE_OPS[op], lambda data: data.to(wide), lambda carried, _: carried.to(dtype))


def _carry_complex(op: str, dtype: torch.dtype, backend: Backend) -> Carrier | None:
    wide = _WIDER.get(dtype, dtype)
    if op == "prod" or wide.to_real() not in backend.reduces:
        return None

    def load(data: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(data.resolve_conj().to(wide))

    def store(carried: torch.Tensor, group_size: int) -> torch.Tensor:
        if op == "avg":
            carried.div_(group_size)
        return torch.view_as_complex(carried).to(dtype)

    return Carrier(_ReduceOp.SUM, load, store)


def _shift_half(data: torch.Tensor) -> torch.Tensor:
    """Unsigned bits seen as signed ones, or back, with the order kept."""
    return data ^ torch.iinfo(torch.int64).min


def _to_ordered(data: torch.Tensor, op: str) -> torch.Tensor:
    """Integers in the order of the floats, with NaN above all for max and below all for min."""
    integers = torch.int64 if data.dtype is torch.float64 else torch.int32
    limits = torch.iinfo(integers)
    bits = data.view(integers)
    ordered = bits ^ ((bits >> (limits.bits - 1)) & limits.max)
    return ordered.masked_fill_(data.isnan(), limits.max if op == "max" else limits.min)


def _from_ordered(ordered: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    limits = torch.iinfo(ordered.dtype)
    return (ordered ^ ((ordered >> (limits.bits - 1)) & limits.max)).view(dtype)


# ---------------------------------------------------------------- here


def reduce_stacked(stacked: torch.Tensor, op: str, out: torch.Tensor) -> None:
    """Reduce dim 0 of ``stacked`` into ``out``, of the same dtype."""
    dtype = stacked.dtype
    if op == "sum" and (dtype is torch.float32 or dtype is torch.float64):
        torch.sum(stacked, 0, out=out)
    else:
        out.copy_(_reduced(stacked, op))


def _reduced(stacked: torch.Tensor, op: str) -> torch.Tensor:
    dtype = stacked.dtype
    if op in _BITWISE and dtype is not torch.bool:
        shape = stacked.shape[1:]
        rows = stacked.reshape(stacked.shape[0], -1).view(torch.uint8).unbind(0)
        return functools.reduce(_BITWISE[op], rows).view(dtype).view(shape)
    if dtype is torch.bool:
        op = _OF_BOOLS[op]
        if op == "bxor":
            return functools.reduce(torch.bitwise_xor, stacked.unbind(0))
        return stacked.any(0) if op == "max" else stacked.all(0)
    if dtype is torch.uint64:
        signed = stacked.view(torch.int64)
        if op in ("max", "min"):
            return _shift_half(_reduced(_shift_half(signed), op)).view(torch.uint64)
        return _reduced(signed, op).view(torch.uint64)
    wide = stacked.to(_WIDER.get(dtype, dtype))
    if op == "max":
        return wide.amax(0)
    if op == "min":
        return wide.amin(0)
    if op == "prod":
        return wide.prod(0, dtype=wide.dtype)
    total = wide.sum(0, dtype=wide.dtype)
    return total / stacked.shape[0] if op == "avg" else total
