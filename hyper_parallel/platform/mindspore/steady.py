"""Logarithms and powers that have the same bits on every rank.

Note [Kernels that look for the fastest number of threads]
    On a CPU most kernels of MindSpore 2.10 cut a tensor into a part per thread, try several numbers of threads in their
    first calls, and again after an operator has failed, and keep what was fastest. Those of ``Log``, ``Pow``,
    ``Softplus`` and ``Mish`` compute eight float32 numbers at once by one formula and what is left of a part by
    another one, which rounds otherwise. So the last bit depends on the time that other programs leave, and differs
    between ranks that compute the same. The kernels used here round alike wherever an element is.
"""

from __future__ import annotations

import math
from typing import Any

import mindspore as ms
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.mindspore.start import on_ascend

__all__ = ["log", "log2", "log10", "log_sigmoid", "mish", "pow", "softplus"]

_ONE = Tensor(1.0, ms.float32)
_log, _log2, _log10, _xlogy = mint.log, ops.log2, ops.log10, mint.xlogy
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


def log(input: Any) -> Any:
    return _log(input) if _is_steady(input) else _xlogy(_ONE, input)


def log2(input: Any) -> Any:
    return _log2(input) if _is_steady(input) else log(input) / math.log(2.0)


def log10(input: Any) -> Any:
    return _log10(input) if _is_steady(input) else log(input) / math.log(10.0)


def pow(input: Any, exponent: Any) -> Any:
    """``exponent``: a number or a tensor; as exact as in float64, where it is not one of the most frequent numbers."""
    if _is_steady(input) and _is_steady(exponent):
        return input**exponent  # not mint.pow, whose second gradient fails for float64
    if not isinstance(exponent, Tensor):
        short = _SHORT.get(exponent)
        return short(input) if short is not None else (input.to(ms.float64) ** _wide(exponent)).to(ms.float32)
    if not isinstance(input, Tensor):
        return (_wide(input) ** exponent.to(ms.float64)).to(ms.float32)
    dtype = ms.float64 if ms.float64 in (input.dtype, exponent.dtype) else ms.float32
    return (input.to(ms.float64) ** exponent.to(ms.float64)).to(dtype)


def power(tensor: Any, exponent: float) -> Any:
    """:func:`pow` by a number that is not rounded."""
    return pow(tensor, _wide(exponent) if tensor.dtype == ms.float64 else exponent)


def _wide(number: Any) -> Any:
    """MindSpore rounds Python's numbers to float32, also where they meet float64."""
    return Tensor(number, ms.float64)


def softplus(input: Any, beta: float = 1, threshold: float = 20) -> Any:
    if _is_steady(input):
        return _softplus(input, beta, threshold)
    scaled = input * beta
    smooth = ops.log1p(ops.exp(mint.clamp(scaled, max=threshold))) / beta
    return mint.where(scaled > threshold, input, smooth)


def mish(input: Any) -> Any:
    return _mish(input) if _is_steady(input) else input * mint.tanh(softplus(input))


def log_sigmoid(input: Any) -> Any:
    return _log_sigmoid(input) if _is_steady(input) else -softplus(-input)
