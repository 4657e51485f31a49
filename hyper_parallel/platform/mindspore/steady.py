"""Logarithms and powers that have the same bits on every rank.

Note [Kernels that look for the fastest number of threads]
    On a CPU most kernels of MindSpore 2.10 cut a tensor into a part per thread, try several numbers of threads in their
    first calls, and again after an operator has failed, and keep what was fastest. Those of ``Log``, ``Pow``,
    ``Softplus`` and ``Mish`` compute eight float32 numbers at once by one formula and what is left of a part by
    another one, which rounds otherwise. So the last bit depends on the time that other programs leave, and differs
    between ranks that compute the same. Here numpy computes them, in float64 and rounded once, in about the time of
    MindSpore's kernels (100,000 logarithms: 0.1 ms).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.memory import from_array, memory_of
from hyper_parallel.platform.mindspore.start import on_ascend

__all__ = ["log", "log2", "log10", "log_sigmoid", "mish", "pow", "softplus"]

_PIECE = 1 << 14  # elements that are computed at once: what is between the steps stays in the caches
_log, _log2, _log10 = mint.log, ops.log2, ops.log10
_softplus, _mish, _log_sigmoid = ops.softplus, ops.mish, ops.logsigmoid
# Exact, or rounded once; and their gradients come from no power either.
_SHORT = {
    0.5: mint.sqrt,
    -0.5: mint.rsqrt,
    1.0: lambda x: x * 1,
    2.0: lambda x: x * x,
    3.0: lambda x: x * x * x,
    -1.0: mint.reciprocal,
}


def _is_steady(value: Any) -> bool:
    """Whether MindSpore's kernels for a tensor like this one, or a number, are."""
    return not isinstance(value, Tensor) or value.dtype != ms.float32 or on_ascend()


def _computed(function: Callable[..., np.ndarray], *tensors: Tensor) -> Tensor:
    """``function`` of tensors of one shape, in float64 and rounded to float32."""
    flat = [np.ascontiguousarray(memory_of(tensor)).reshape(-1) for tensor in tensors]
    result = np.empty(flat[0].shape, np.float32)
    with np.errstate(all="ignore"):
        for start in range(0, len(result), _PIECE):
            piece = slice(start, start + _PIECE)
            result[piece] = function(*(array[piece].astype(np.float64) for array in flat))
    return from_array(result, tensors[0].shape)


# ---------------------------------------------------------------- logarithms


class _Log(private_api.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, function: Any, base: float) -> Tensor:
        ctx.save_for_backward(input)
        ctx.log_of_base = math.log(base)
        return _computed(function, input)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (input,) = ctx.saved_tensors
        return gradient / (input if ctx.log_of_base == 1.0 else input * ctx.log_of_base), None, None


def log(input: Any) -> Any:
    return _log(input) if _is_steady(input) else _Log.apply(input, np.log, math.e)


def log2(input: Any) -> Any:
    return _log2(input) if _is_steady(input) else _Log.apply(input, np.log2, 2.0)


def log10(input: Any) -> Any:
    return _log10(input) if _is_steady(input) else _Log.apply(input, np.log10, 10.0)


# ---------------------------------------------------------------- powers


class _PowerByNumber(private_api.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, exponent: float) -> Tensor:
        ctx.save_for_backward(input)
        ctx.exponent = exponent
        return _computed(lambda x: np.power(x, exponent), input)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (input,) = ctx.saved_tensors
        if ctx.exponent == 0:
            return gradient * 0, None
        return gradient * (pow(input, ctx.exponent - 1) * ctx.exponent), None


class _PowerOfNumber(private_api.Function):
    @staticmethod
    def forward(ctx: Any, exponent: Tensor, base: float) -> Tensor:
        ctx.save_for_backward(exponent)
        ctx.base = base
        return _computed(lambda y: np.power(base, y), exponent)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (exponent,) = ctx.saved_tensors
        if ctx.base == 0:
            return mint.where(exponent >= 0, gradient * 0, -gradient * math.inf), None
        return gradient * (pow(ctx.base, exponent) * (math.log(ctx.base) if ctx.base > 0 else math.nan)), None


class _Power(private_api.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, exponent: Tensor) -> Tensor:
        ctx.save_for_backward(input, exponent)
        return _computed(np.power, input, exponent)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        input, exponent = ctx.saved_tensors
        by_input = by_exponent = None
        if ctx.needs_input_grad[0]:
            by_input = mint.where(exponent == 0, gradient * 0, gradient * (exponent * pow(input, exponent - 1)))
        if ctx.needs_input_grad[1]:
            is_constant = ops.logical_and(input == 0, exponent >= 0)
            by_exponent = mint.where(is_constant, gradient * 0, gradient * (pow(input, exponent) * log(input)))
        return by_input, by_exponent


def pow(input: Any, exponent: Any) -> Any:
    """``exponent``: a number or a tensor; as exact as in float64, where it is not one of the most frequent numbers."""
    if _is_steady(input) and _is_steady(exponent):
        return input**exponent  # not mint.pow, whose second gradient fails for float64
    if not isinstance(exponent, Tensor):
        short = _SHORT.get(exponent)
        return short(input) if short is not None else _PowerByNumber.apply(input, float(exponent))
    if not isinstance(input, Tensor):
        return _PowerOfNumber.apply(exponent, float(input))
    if ms.float64 in (input.dtype, exponent.dtype):
        return input.to(ms.float64) ** exponent.to(ms.float64)
    shape = np.broadcast_shapes(input.shape, exponent.shape)
    return _Power.apply(_spread(input, shape), _spread(exponent, shape))


def _spread(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tensor.dtype != ms.float32:
        tensor = tensor.to(ms.float32)
    return tensor if tuple(tensor.shape) == shape else ops.broadcast_to(tensor, shape)


def power(tensor: Any, exponent: float) -> Any:
    """:func:`pow` by a number that is not rounded."""
    # MindSpore rounds Python's numbers to float32, also where they meet float64.
    return pow(tensor, Tensor(exponent, ms.float64) if tensor.dtype == ms.float64 else exponent)


# ---------------------------------------------------------------- softplus


class _Softplus(private_api.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, beta: float, threshold: float) -> Tensor:
        ctx.save_for_backward(input)
        ctx.numbers = beta, threshold

        def compute(x: np.ndarray) -> np.ndarray:
            scaled = x * beta
            smooth = (np.log1p(np.exp(-np.abs(scaled))) + np.maximum(scaled, 0)) / beta
            return np.where(scaled > threshold, x, smooth)

        return _computed(compute, input)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (input,) = ctx.saved_tensors
        beta, threshold = ctx.numbers
        scaled = input * beta
        return mint.where(scaled > threshold, gradient, gradient * mint.sigmoid(scaled)), None, None


def softplus(input: Any, beta: float = 1, threshold: float = 20) -> Any:
    return _softplus(input, beta, threshold) if _is_steady(input) else _Softplus.apply(input, beta, threshold)


def mish(input: Any) -> Any:
    """``input * tanh(softplus(input))``, without MindSpore's tanh, of which four digits are right."""
    if _is_steady(input):
        return _mish(input)
    grown = mint.exp(mint.clamp(input, max=20.0))
    ratio = grown * (grown + 2)
    return input * (ratio / (ratio + 2))


def log_sigmoid(input: Any) -> Any:
    return _log_sigmoid(input) if _is_steady(input) else -softplus(-input)
