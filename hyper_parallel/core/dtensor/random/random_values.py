"""Random values for a region of a global tensor: bits, uniform, normal, truncated normal, Bernoulli and integers.

The value of an element depends on the draw, on its row-major index in the *global* tensor, on the distribution and on
the dtype; never on the region that was asked for. So a rank makes its shard, and nothing but its shard, with the bits
that a single device would have put there. Results are numpy arrays of the region's local shape."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from hyper_parallel.core.dtensor.random.draw import Draw
from hyper_parallel.core.dtensor.random.normal_quantile import SMALLEST_TAIL, NormalQuantile, normal_cdf
from hyper_parallel.core.dtensor.random.random_stream import GlobalRegion, words_of_region

# Note [Dtypes]
# float64 values are made from 64 random bits in float64 arithmetic; the others from 32 bits. Of those, uniform values
# are computed in float32, normal ones in float64 and rounded to float32; float16 and bfloat16 are rounded (ties to
# even) from that float32. Numpy has no bfloat16: such results are float32 arrays whose values bfloat16 holds exactly,
# so converting them loses nothing.
_MANTISSA_BITS = {"float64": 53, "float32": 24, "float16": 11, "bfloat16": 8}
_LARGEST = {
    "float64": float(np.finfo(np.float64).max),
    "float32": float(np.finfo(np.float32).max),
    "float16": float(np.finfo(np.float16).max),
    "bfloat16": float.fromhex("0x1.fep127"),
}
_LOWEST_EXPONENT = {"float64": -1074, "float32": -149, "float16": -24, "bfloat16": -133}
_STORED_AS = {"float64": np.float64, "float32": np.float32, "float16": np.float16, "bfloat16": np.float32}

# Elements worked on at a time: enough to hide the cost of a numpy call, few enough for the intermediate arrays to stay
# in cache.
_PIECE = 1 << 16

_Fill = Callable[[np.ndarray, np.ndarray], None]


def random_bits(draw: Draw, region: GlobalRegion, bits: int = 32) -> np.ndarray:
    """Raw random words: a uint32 array for `bits=32`, uint64 for `bits=64`."""
    if bits not in (32, 64):
        raise ValueError(f"random_bits: bits must be 32 or 64, got {bits!r}")

    def fill(words: np.ndarray, out: np.ndarray) -> None:
        out[:] = words

    return _generate(draw, region, bits, np.dtype(f"uint{bits}"), fill)


def uniform(
    draw: Draw, region: GlobalRegion, low: float = 0.0, high: float = 1.0, dtype: Any = "float32"
) -> np.ndarray:
    """Uniform values in [low, high), also after rounding to `dtype`; `low == high` gives that constant.

    float64 uses 53 random bits per value, the other dtypes 24.
    """
    name = _float_name(dtype, "uniform")
    low, high = _finite("uniform", low=low), _finite("uniform", high=high)
    bits, unused_bits = (64, 11) if name == "float64" else (32, 8)
    work_type = np.dtype(f"float{bits}").type
    width = high - low
    if low > high or max(-low, high) > _LARGEST[name] or width > _LARGEST[f"float{bits}"]:
        raise ValueError(
            f"uniform: need low <= high, both within {name} and high - low within float{bits}, got [{low}, {high})"
        )
    if low == high:
        smallest = largest = float(_rounded(np.full(1, low), name)[0])
    else:
        smallest, largest = _first_at_or_above(low, name), _last_below(high, name)
        if smallest > largest:
            raise ValueError(f"uniform: no {name} value lies in [{low}, {high})")
    unit = 2.0 ** -(bits - unused_bits)
    scale, start = work_type(width * unit), work_type(low)

    def fill(words: np.ndarray, out: np.ndarray) -> None:
        np.right_shift(words, unused_bits, out=words)
        values = out if out.dtype == work_type else np.empty(len(words), dtype=work_type)
        # Below 2**53 signed and unsigned are the same number, and signed converts faster.
        np.multiply(words.view(f"<i{bits // 8}"), scale, out=values, dtype=work_type, casting="unsafe")
        if start != 0:
            np.add(values, start, out=values)
        # Rounding is monotonic: a value that lies between two values of the dtype stays between them.
        np.maximum(values, work_type(smallest), out=values)
        np.minimum(values, work_type(largest), out=values)
        if name == "bfloat16":
            _round_to_bfloat16(values)
        elif values is not out:
            out[:] = values

    return _generate(draw, region, bits, _STORED_AS[name], fill)


def normal(draw: Draw, region: GlobalRegion, mean: float = 0.0, std: float = 1.0, dtype: Any = "float32") -> np.ndarray:
    """Normal values, one random word each, by the inverse of the distribution function.

    float64 uses 64 random bits per value (the tails reach 9.1 std), the other dtypes 32 (6.3 std).
    """
    name = _float_name(dtype, "normal")
    mean, std = _finite("normal", mean=mean), _finite("normal", std=std)
    if std < 0:
        raise ValueError(f"normal: std must not be negative, got {std}")
    bits = 64 if name == "float64" else 32
    capacity = min(_PIECE, region.num_elements)
    quantile = NormalQuantile(capacity)
    scratch = np.empty((2, capacity))

    def fill(words: np.ndarray, out: np.ndarray) -> None:
        offset, tail = scratch[:, : len(words)]
        if bits == 32:
            np.add(words.view("<i4"), 0.5, out=offset)
            np.multiply(offset, 2.0**-32, out=offset)
            np.abs(offset, out=tail)
            np.subtract(0.5, tail, out=tail)
        else:
            # The top bit is the sign and the rest the tail mass, so that small masses keep 53 bits.
            magnitudes = np.bitwise_and(words, np.uint64(2**63 - 1)).view("<i8")
            np.add(magnitudes, 0.5, out=tail)
            np.multiply(tail, 2.0**-64, out=tail)
            np.subtract(0.5, tail, out=offset)
            np.copysign(offset, words.view("<f8"), out=offset)
        values = quantile(offset, tail)
        if std != 1:
            np.multiply(values, std, out=values)
        np.add(values, mean, out=values)
        _store(values, out, name)

    return _generate(draw, region, bits, _STORED_AS[name], fill)


def trunc_normal(
    draw: Draw,
    region: GlobalRegion,
    mean: float = 0.0,
    std: float = 1.0,
    a: float = -2.0,
    b: float = 2.0,
    dtype: Any = "float32",
) -> np.ndarray:
    """Values of a normal distribution conditioned on [a, b]; `a` and `b` are cut-off values, not numbers of std, and
    may be infinite. Every value, rounded to `dtype`, lies in [a, b]. Bits per value: 52 for float64, else 32."""
    name = _float_name(dtype, "trunc_normal")
    mean, std = _finite("trunc_normal", mean=mean), _finite("trunc_normal", std=std)
    a, b = float(a), float(b)
    if not (std > 0 and a < b):
        raise ValueError(f"trunc_normal: need std > 0 and a < b, got std={std}, a={a}, b={b}")
    smallest, largest = _first_at_or_above(a, name), -_first_at_or_above(-b, name)
    if smallest > largest:
        raise ValueError(f"trunc_normal: no {name} value lies in [{a}, {b}]")
    lower, upper = (a - mean) / std, (b - mean) / std
    # The distribution function is precise in its lower tail, so the interval is mirrored to lie more on that side.
    sign = 1.0
    if lower + upper > 0:
        lower, upper, sign = -upper, -lower, -1.0
    lower_mass, upper_mass = normal_cdf(lower), normal_cdf(upper)
    mass = upper_mass - lower_mass
    if mass < SMALLEST_TAIL * 2.0**60:
        raise ValueError(f"trunc_normal: [{a}, {b}] has no probability in float64 for mean={mean}, std={std}")
    if mass < upper_mass * 2.0**-29:
        raise ValueError(
            f"trunc_normal: [{a}, {b}] is too narrow for mean={mean}, std={std}: fewer than 24 bits of the values "
            f"would be right; the density is constant there, use uniform"
        )
    bits, unused_bits = (64, 12) if name == "float64" else (32, 0)
    unit = 2.0 ** -(bits - unused_bits)
    capacity = min(_PIECE, region.num_elements)
    quantile = NormalQuantile(capacity)
    scratch = np.empty((2, capacity))

    def fill(words: np.ndarray, out: np.ndarray) -> None:
        offset, tail = scratch[:, : len(words)]
        np.right_shift(words, unused_bits, out=words)
        np.add(words, 0.5, out=offset)
        np.multiply(offset, unit, out=offset)
        np.multiply(offset, mass, out=offset)
        np.add(offset, lower_mass, out=offset)
        np.subtract(1.0, offset, out=tail)
        np.minimum(tail, offset, out=tail)
        np.maximum(tail, SMALLEST_TAIL, out=tail)
        np.subtract(offset, 0.5, out=offset)
        values = quantile(offset, tail)
        np.multiply(values, sign * std, out=values)
        np.add(values, mean, out=values)
        np.maximum(values, smallest, out=values)
        np.minimum(values, largest, out=values)
        _store(values, out, name)

    return _generate(draw, region, bits, _STORED_AS[name], fill)


def bernoulli(draw: Draw, region: GlobalRegion, p: float) -> np.ndarray:
    """A bool array, True with probability `p` (resolved to 2**-32; 0 and 1 are exact)."""
    p = _finite("bernoulli", p=p)
    if not 0 <= p <= 1:
        raise ValueError(f"bernoulli: p must be in [0, 1], got {p}")
    threshold = round(p * 2**32)

    def fill(words: np.ndarray, out: np.ndarray) -> None:
        if threshold == 2**32:
            out[:] = True
        else:
            np.less(words, np.uint32(threshold), out=out)

    return _generate(draw, region, 32, np.bool_, fill)


def randint(draw: Draw, region: GlobalRegion, low: int, high: int, dtype: Any = "int64") -> np.ndarray:
    """Integers in [low, high): the high half of (64 random bits) * (high - low), plus low. The same numbers in every
    integer dtype. Probabilities of the values differ by at most 2**-64 from one another."""
    integer_type = np.dtype(dtype)
    if integer_type.kind not in "iu":
        raise TypeError(f"randint: dtype must be an integer dtype, got {dtype!r}")
    for name, bound in (("low", low), ("high", high)):
        if isinstance(bound, bool) or not isinstance(bound, (int, np.integer)):
            raise TypeError(f"randint: {name} must be an int, got {bound!r}")
    low, high = int(low), int(high)
    limits = np.iinfo(integer_type)
    if low >= high or low < limits.min or high - 1 > limits.max:
        raise ValueError(f"randint: need low < high, both within {integer_type}, got [{low}, {high})")
    count = high - low

    def fill(words: np.ndarray, out: np.ndarray) -> None:
        values = words if count == 2**64 else _multiply_high(words, count)
        # Modulo 2**64, which makes signed results of unsigned sums.
        out[:] = (values + np.uint64(low % 2**64)).astype(integer_type)

    return _generate(draw, region, 64, integer_type, fill)


def _generate(draw: Draw, region: GlobalRegion, bits: int, stored_as: Any, fill: _Fill) -> np.ndarray:
    """Make the region piece by piece: `fill(words, out)` turns the random words of a piece into its values."""
    result = np.empty(region.sizes, dtype=stored_as)
    flat = result.reshape(-1)
    position = 0
    for words in words_of_region(draw, region, bits, _PIECE):
        fill(words, flat[position : position + len(words)])
        position += len(words)
    assert position == region.num_elements
    return result


def _multiply_high(words: np.ndarray, factor: int) -> np.ndarray:
    """floor(words * factor / 2**64) by 32-bit halves; `factor` < 2**64."""
    mask, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    factor_low, factor_high = np.uint64(factor & 0xFFFFFFFF), np.uint64(factor >> 32)
    low, high = words & mask, words >> shift
    middle = high * factor_low + ((low * factor_low) >> shift)
    if not factor_high:
        return middle >> shift
    return high * factor_high + (middle >> shift) + (((middle & mask) + low * factor_high) >> shift)


def _store(values: np.ndarray, out: np.ndarray, name: str) -> None:
    """Round float64 `values` to dtype `name` into `out`."""
    with np.errstate(over="ignore"):  # beyond the largest value of a dtype lies its infinity
        if name == "float16":
            out[:] = values.astype(np.float32)
        else:
            out[:] = values
    if name == "bfloat16":
        _round_to_bfloat16(out)


def _rounded(values: np.ndarray, name: str) -> np.ndarray:
    out = np.empty(len(values), dtype=_STORED_AS[name])
    _store(values, out, name)
    return out


def _round_to_bfloat16(values: np.ndarray) -> None:
    """Round a float32 array without NaN to bfloat16's 8 bits of mantissa, ties to even, in place."""
    bits = values.view(np.uint32)
    bits += ((bits >> np.uint32(16)) & np.uint32(1)) + np.uint32(0x7FFF)
    bits &= np.uint32(0xFFFF0000)


def _first_at_or_above(x: float, name: str) -> float:
    """The smallest value of dtype `name` that is >= x; infinities stay."""
    if math.isinf(x) or x == 0:
        return x
    unit = 2.0 ** max(math.frexp(x)[1] - _MANTISSA_BITS[name], _LOWEST_EXPONENT[name])
    rounded = math.ceil(x / unit) * unit
    if rounded > _LARGEST[name]:
        return math.inf
    return max(rounded, -_LARGEST[name])


def _last_below(x: float, name: str) -> float:
    """The largest value of dtype `name` that is < x, for x within the dtype."""
    return -_first_at_or_above(math.nextafter(-x, math.inf), name)


def _float_name(dtype: Any, op: str) -> str:
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None) or getattr(dtype, "__name__", None)
    if name not in _STORED_AS:
        raise ValueError(f"{op}: dtype must be one of {', '.join(_STORED_AS)}, got {dtype!r}")
    return name


def _finite(op: str, **argument: Any) -> float:
    ((name, value),) = argument.items()
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{op}: {name} must be a number, got {value!r}") from None
    if not math.isfinite(number):
        raise ValueError(f"{op}: {name} must be finite, got {value!r}")
    return number
