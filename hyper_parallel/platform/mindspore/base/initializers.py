"""MindSpore's initializers as what they mean: a number, a distribution, or neither.

MindSpore fills whole arrays, with random numbers that depend on the order in which they are made. A block that is made
alone needs the distribution instead; the random numbers are then HyperParallel's, addressed by global index.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore.common import initializer as inits

from hyper_parallel.platform.mindspore.base.memory import numpy_type

Shape = tuple[int, ...]
Distribution = tuple[str, dict[str, Any]]  # the kind of random numbers, and its arguments


def constant_of(initializer: Any) -> Any:
    """The number that it fills arrays with; None for other initializers."""
    if type(initializer) in (inits.Zero, inits.One):
        return float(type(initializer) is inits.One)
    if type(initializer) is inits.Constant and np.ndim(initializer.value) == 0:
        return initializer.value
    return None


def distribution_of(initializer: Any, shape: Shape, dtype: Any) -> Distribution:
    """What it fills an array of ``shape`` with.

    An initializer that MindSpore does not define, or whose elements depend on each other as those of an orthogonal
    matrix, gets a whole array to fill, from numpy's generator at a state that depends on the draw alone.
    """
    describe = _DISTRIBUTIONS.get(type(initializer))
    if describe is None or np.dtype(numpy_type(dtype)).kind not in "fV":
        return "part of whole", {"make": lambda draw: _filled(initializer, shape, dtype, draw)}
    return describe(initializer, shape)


def _filled(initializer: Any, shape: Shape, dtype: Any, draw: tuple[int, int]) -> np.ndarray:
    kind = numpy_type(dtype)
    filled = np.zeros(shape, np.float32 if np.dtype(kind).kind == "V" else kind)  # bfloat16 is no number to numpy
    before = np.random.get_state()
    np.random.set_state(np.random.RandomState(np.random.MT19937(np.random.SeedSequence(draw[:2]))).get_state())
    try:
        initializer(filled)
    finally:
        np.random.set_state(before)
    return filled


def _uniform(limit: float) -> Distribution:
    return "uniform", {"low": -limit, "high": limit}


def _normal(std: float, mean: float = 0.0) -> Distribution:
    return "normal", {"mean": mean, "std": std}


def _fans(shape: Shape) -> tuple[int, int]:
    """Of how many numbers an output is made, and how many an input goes into."""
    if len(shape) < 2:
        raise ValueError(f"a parameter of shape {shape} has no inputs and outputs; give it another initializer")
    return shape[1] * math.prod(shape[2:]), shape[0] * math.prod(shape[2:])


def _xavier(initializer: Any, shape: Shape) -> float:
    """The standard deviation."""
    return initializer.gain * math.sqrt(2.0 / sum(_fans(shape)))


def _he(initializer: Any, shape: Shape) -> float:
    """The standard deviation."""
    gains = {"tanh": 5.0 / 3.0, "relu": math.sqrt(2.0)}
    gains["leaky_relu"] = math.sqrt(2.0 / (1.0 + initializer.negative_slope**2))
    fan = _fans(shape)[initializer.mode.lower() == "fan_out"]
    return gains.get(initializer.nonlinearity, 1.0) / math.sqrt(fan)


def _scaled(initializer: Any, shape: Shape) -> Distribution:
    inputs, outputs = _fans(shape)
    fan = {"fan_in": inputs, "fan_out": outputs, "fan_avg": (inputs + outputs) / 2.0}[initializer.mode]
    variance = initializer.scale / max(1.0, fan)
    if initializer.distribution == "untruncated_normal":
        return _normal(math.sqrt(variance))
    return _uniform(math.sqrt(3.0 * variance))  # MindSpore 2.10 does so for "truncated_normal" too


def _truncated(initializer: Any, shape: Shape) -> Distribution:
    del shape
    bounds = {"a": initializer.a, "b": initializer.b}  # values, not numbers of sigma
    return "trunc_normal", {"mean": initializer.mean, "std": initializer.sigma, **bounds}


# Exact types: a subclass may fill arrays in a way of its own.
_DISTRIBUTIONS: dict[type, Callable[[Any, Shape], Distribution]] = {
    inits.Uniform: lambda initializer, shape: _uniform(initializer.scale),
    inits.Normal: lambda initializer, shape: _normal(initializer.sigma, initializer.mean),
    inits.TruncatedNormal: _truncated,
    inits.XavierUniform: lambda initializer, shape: _uniform(math.sqrt(3.0) * _xavier(initializer, shape)),
    inits.XavierNormal: lambda initializer, shape: _normal(_xavier(initializer, shape)),
    inits.HeUniform: lambda initializer, shape: _uniform(math.sqrt(3.0) * _he(initializer, shape)),
    inits.HeNormal: lambda initializer, shape: _normal(_he(initializer, shape)),
    inits.VarianceScaling: _scaled,
}
