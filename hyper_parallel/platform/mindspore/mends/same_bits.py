"""Logarithms, powers and softplus in float32 that have the same bits on every rank.

On a CPU most kernels of MindSpore 2.10 divide a tensor among threads, try several numbers of threads in their first
calls, and again after an operator has failed, and keep what was fastest. Those of ``Log``, ``Pow``, ``Softplus`` and
``Mish`` compute eight float32 numbers at once by one formula and what is left of a thread's share by another one, which
rounds otherwise. So the last bit depends on how busy the machine is::

    x = Tensor(np.random.RandomState(0).rand(9).astype(np.float32))
    len({ops.log(x).asnumpy().tobytes() for _ in range(12)})  # 2

Note [Replicas must not drift apart]
    Every rank computes a replicated value, its gradient and the update of a replicated parameter for itself, and
    nothing compares them afterwards. A last bit that differs once is a parameter that differs for the rest of the
    training. So what replicated tensors are computed with must round alike on all ranks: the operators of distributed
    tensors, and the norms by which gradients are clipped. Of some fifty kernels that layers, losses and norms are made
    of, tried at several sizes after an error, only those above did not. Numpy computes them here, in float64 and
    rounded once. Plain tensors are left to MindSpore: their ranks are the program's business.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.base.memory import from_array, memory_of
from hyper_parallel.platform.mindspore.mends import ACTIVE

__all__ = ["log", "log2", "log10", "log_sigmoid", "mish", "pow", "softplus"]

_Formula = Callable[..., Any]  # of numpy arrays
_PIECE = 1 << 14  # elements that are computed at once: what is between the steps stays in the caches
# As MindSpore has them: its modules are given replacements later, which look for DTensors first.
_log, _log2, _log10 = mint.log, ops.log2, ops.log10
_softplus, _mish, _log_sigmoid = ops.softplus, ops.mish, ops.logsigmoid


def _rounds_alike(value: Any) -> bool:
    """Whether MindSpore's kernels for a tensor like this one, or a number, do."""
    return not ACTIVE or not isinstance(value, Tensor) or value.dtype != ms.float32


def _computed(function: _Formula, *tensors: Tensor) -> Tensor:
    """``function`` of tensors of one shape, in float64 and rounded to float32."""
    flat = [np.ascontiguousarray(memory_of(tensor)).reshape(-1) for tensor in tensors]
    result = np.empty(flat[0].shape, np.float32)
    with np.errstate(all="ignore"):
        for start in range(0, len(result), _PIECE):
            piece = slice(start, start + _PIECE)
            result[piece] = function(*(array[piece].astype(np.float64) for array in flat))
    return from_array(result, tensors[0].shape)


class _ByNumpy(private_api.Function):
    """forward: ``value`` of each element; backward: the gradient times ``slopes``, one for each tensor."""

    @staticmethod
    def forward(ctx: Any, value: _Formula, slopes: tuple[_Formula, ...], *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        ctx.slopes = slopes
        return _computed(value, *tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        def times_slope(slope: _Formula) -> Tensor:
            return _computed(lambda given, *inputs: given * slope(*inputs), gradient, *ctx.saved_tensors)

        needed = zip(ctx.slopes, ctx.needs_input_grad[2:], strict=True)
        return None, None, *(times_slope(slope) if is_needed else None for slope, is_needed in needed)


def _of_elements(plain: Callable[..., Any], value: _Formula, slope: _Formula, input: Any) -> Any:
    return plain(input) if _rounds_alike(input) else _ByNumpy.apply(value, (slope,), input)


def log(input: Any) -> Any:
    return _of_elements(_log, np.log, lambda x: 1 / x, input)


def log2(input: Any) -> Any:
    return _of_elements(_log2, np.log2, lambda x: 1 / (x * math.log(2)), input)


def log10(input: Any) -> Any:
    return _of_elements(_log10, np.log10, lambda x: 1 / (x * math.log(10)), input)


def log_sigmoid(input: Any) -> Any:
    return _of_elements(_log_sigmoid, lambda x: -np.logaddexp(0, -x), lambda x: _sigmoid(-x), input)


def mish(input: Any) -> Any:
    def slope(x: np.ndarray) -> np.ndarray:
        share = np.tanh(np.logaddexp(0, x))
        return share + x * (1 - share * share) * _sigmoid(x)

    return _of_elements(_mish, lambda x: x * np.tanh(np.logaddexp(0, x)), slope, input)


def softplus(input: Any, beta: float = 1, threshold: float = 20) -> Any:
    def value(x: np.ndarray) -> np.ndarray:
        return np.where(x * beta > threshold, x, np.logaddexp(0, x * beta) / beta)

    def slope(x: np.ndarray) -> np.ndarray:
        return np.where(x * beta > threshold, 1, _sigmoid(x * beta))

    return _of_elements(lambda x: _softplus(x, beta, threshold), value, slope, input)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


# ---------------------------------------------------------------- powers

# Quicker, and exact or rounded once; and their gradients come from no power either.
_SHORT = {
    0.5: mint.sqrt,
    -0.5: mint.rsqrt,
    2.0: lambda x: x * x,
    3.0: lambda x: x * x * x,
    -1.0: mint.reciprocal,
}


def _power_slope(x: Any, y: Any) -> Any:
    return np.where(y == 0, 0, y * np.power(x, y - 1))


def _exponent_slope(x: Any, y: Any) -> Any:
    return np.where((x == 0) & (y >= 0), 0, np.power(x, y) * np.log(x))


def pow(input: Any, exponent: Any) -> Any:
    """``input ** exponent`` of tensors, or of a tensor and a number."""
    if _rounds_alike(input) and _rounds_alike(exponent):
        return input**exponent
    if not isinstance(exponent, Tensor):
        if exponent in _SHORT:
            return _SHORT[exponent](input)
        number = float(exponent)
        return _ByNumpy.apply(lambda x: np.power(x, number), (lambda x: _power_slope(x, number),), input)
    if not isinstance(input, Tensor):
        number = np.float64(input)
        return _ByNumpy.apply(lambda y: np.power(number, y), (lambda y: _exponent_slope(number, y),), exponent)
    if ms.float64 in (input.dtype, exponent.dtype):
        return input.to(ms.float64) ** exponent.to(ms.float64)
    shape = np.broadcast_shapes(input.shape, exponent.shape)
    return _ByNumpy.apply(np.power, (_power_slope, _exponent_slope), _spread(input, shape), _spread(exponent, shape))


def _spread(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tensor.dtype != ms.float32:
        tensor = tensor.to(ms.float32)
    return tensor if tuple(tensor.shape) == shape else ops.broadcast_to(tensor, shape)


def power(tensor: Any, exponent: float) -> Any:
    """:func:`pow` by a number that is not rounded."""
    # MindSpore rounds Python's numbers to float32, also where they meet float64.
    return pow(tensor, Tensor(exponent, ms.float64) if tensor.dtype == ms.float64 else exponent)
