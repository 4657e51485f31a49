"""The inverse of the normal distribution function, with the same bits wherever an element stands and whatever computes
it. Libraries' own log and erfinv differ in the last bit between machines, and between the vector body and the tail of a
loop; here every step is one float64 operation that IEEE 754 rounds exactly (+, -, *, /, sqrt) or moves bits."""

from __future__ import annotations

import math

import numpy as np

# Wichura, "Algorithm AS 241: the percentage points of the normal distribution" (1988), routine PPND16: three ratios of
# polynomials, lowest power first, for the centre and for two parts of the tail; relative error about 1e-16.
_CENTRE_NUMERATOR = (
    3.3871328727963666080e0,
    1.3314166789178437745e2,
    1.9715909503065514427e3,
    1.3731693765509461125e4,
    4.5921953931549871457e4,
    6.7265770927008700853e4,
    3.3430575583588128105e4,
    2.5090809287301226727e3,
)
_CENTRE_DENOMINATOR = (
    1.0,
    4.2313330701600911252e1,
    6.8718700749205790830e2,
    5.3941960214247511077e3,
    2.1213794301586595867e4,
    3.9307895800092710610e4,
    2.8729085735721942674e4,
    5.2264952788528545610e3,
)
_NEAR_NUMERATOR = (
    1.42343711074968357734e0,
    4.63033784615654529590e0,
    5.76949722146069140550e0,
    3.64784832476320460504e0,
    1.27045825245236838258e0,
    2.41780725177450611770e-1,
    2.27238449892691845833e-2,
    7.74545014278341407640e-4,
)
_NEAR_DENOMINATOR = (
    1.0,
    2.05319162663775882187e0,
    1.67638483018380384940e0,
    6.89767334985100004550e-1,
    1.48103976427480074590e-1,
    1.51986665636164571966e-2,
    5.47593808499534494600e-4,
    1.05075007164441684324e-9,
)
_FAR_NUMERATOR = (
    6.65790464350110377720e0,
    5.46378491116411436990e0,
    1.78482653991729133580e0,
    2.96560571828504891230e-1,
    2.65321895265761230930e-2,
    1.24266094738807843860e-3,
    2.71155556874348757815e-5,
    2.01033439929228813265e-7,
)
_FAR_DENOMINATOR = (
    1.0,
    5.99832206555887937690e-1,
    1.36929880922735805310e-1,
    1.48753612908506148525e-2,
    7.86869131145613259100e-4,
    1.84631831751005468180e-5,
    1.42151175831644588870e-7,
    2.04426310338993978564e-15,
)
_TAIL_STARTS_AT = 0.075  # tail mass below which the tail formulas hold; the centre is |p - 1/2| <= 0.425
_FAR_TAIL_STARTS_AT = 5.0  # in sqrt(-log(tail mass))

# log 2 in two parts: 33 bits, so that its product with an exponent is exact, and the rest.
_LOG2_HIGH = float.fromhex("0x1.62e42feep-1")
_LOG2_LOW = float.fromhex("0x1.a39ef35793c76p-33")
_SQRT_HALF_BITS = np.int64(0x3FE6A09E667F3BCD)
_ATANH_COEFFICIENTS = tuple(2.0 / (2 * power + 1) for power in range(12))

SMALLEST_TAIL = 2.0**-1000
"""Tail masses must be at least this (a normal float64, and within the range of the approximation)."""


class NormalQuantile:
    """Inverse normal distribution function for up to `capacity` elements per call; work space is allocated once."""

    def __init__(self, capacity: int) -> None:
        self._scratch = np.empty((3, capacity))

    def __call__(self, offset: np.ndarray, tail: np.ndarray) -> np.ndarray:
        """The x with cdf(x) = p, where `offset` is p - 1/2 and `tail` is min(p, 1 - p), both float64.

        Taking both lets a caller give the tail with more precision than p has. The result is work space of this object:
        writable, and valid until the next call.
        """
        values, denominator, argument = self._scratch[:, : len(offset)]
        np.multiply(offset, offset, out=argument)
        np.subtract(0.180625, argument, out=argument)
        np.maximum(argument, 0.0, out=argument)  # tail elements: any finite value, they are replaced below
        _polynomial(_CENTRE_NUMERATOR, argument, values)
        np.multiply(values, offset, out=values)
        _polynomial(_CENTRE_DENOMINATOR, argument, denominator)
        np.divide(values, denominator, out=values)

        tail_elements = np.flatnonzero(tail < _TAIL_STARTS_AT)
        if len(tail_elements):
            magnitude = _tail_quantile(tail[tail_elements])
            values[tail_elements] = np.copysign(magnitude, offset[tail_elements], out=magnitude)
        return values


def normal_cdf(x: float) -> float:
    """The normal distribution function of one number, accurate in the lower tail.

    Uses the C library's erfc: ranks agree when they run the same C library, as ranks of one job do.
    """
    return 0.5 * math.erfc(-x / math.sqrt(2.0))


def _tail_quantile(tail: np.ndarray) -> np.ndarray:
    """The distance from the mean that leaves mass `tail` beyond it, for tail < 0.075."""
    root = natural_log(tail)
    np.negative(root, out=root)
    np.sqrt(root, out=root)
    near = root - 1.6
    values = _polynomial(_NEAR_NUMERATOR, near, np.empty_like(near))
    np.divide(values, _polynomial(_NEAR_DENOMINATOR, near, np.empty_like(near)), out=values)
    far_elements = np.flatnonzero(root > _FAR_TAIL_STARTS_AT)
    if len(far_elements):
        far = root[far_elements] - _FAR_TAIL_STARTS_AT
        numerator = _polynomial(_FAR_NUMERATOR, far, np.empty_like(far))
        values[far_elements] = numerator / _polynomial(_FAR_DENOMINATOR, far, np.empty_like(far))
    return values


def natural_log(x: np.ndarray) -> np.ndarray:
    """log(x) of positive normal float64 numbers, to about one unit in the last place, by exactly rounded operations.

    x = 2**e * m with m in [sqrt(1/2), sqrt(2)), and log m = 2 atanh(s) with s = (m - 1) / (m + 1), |s| < 0.172; the
    series of atanh in s**2 is cut where its terms are below 2**-60.
    """
    bits = x.view(np.int64)
    exponent = (bits - _SQRT_HALF_BITS) >> 52
    mantissa = (bits - (exponent << 52)).view(np.float64)
    exponents = exponent.astype(np.float64)
    ratio = mantissa - 1.0
    np.divide(ratio, np.add(mantissa, 1.0, out=mantissa), out=ratio)
    square = np.multiply(ratio, ratio, out=mantissa)
    result = _polynomial(_ATANH_COEFFICIENTS, square, np.empty_like(square))
    np.multiply(result, ratio, out=result)
    np.add(result, np.multiply(exponents, _LOG2_LOW, out=ratio), out=result)
    return np.add(result, np.multiply(exponents, _LOG2_HIGH, out=ratio), out=result)


def _polynomial(coefficients: tuple[float, ...], x: np.ndarray, out: np.ndarray) -> np.ndarray:
    """Horner's rule, each product and each sum rounded on its own (no fused multiply-add). `out` is not `x`."""
    np.multiply(x, coefficients[-1], out=out)
    for coefficient in coefficients[-2:0:-1]:
        np.add(out, coefficient, out=out)
        np.multiply(out, x, out=out)
    return np.add(out, coefficients[0], out=out)
