"""The inverse normal distribution function: accuracy against 50-digit arithmetic, and the same bits from scalar Python
arithmetic, from numpy at every position and length, and from torch."""

import math
import statistics
from decimal import Decimal, localcontext

import numpy as np
import pytest

from hyper_parallel.core.dtensor.random import normal_quantile as module
from hyper_parallel.core.dtensor.random.normal_quantile import NormalQuantile, natural_log, normal_cdf
from tests.frameworks import torch

only_on = "torch"  # once is enough: no framework takes part

PROBABILITIES = np.concatenate(
    [
        np.random.default_rng(1).random(4000),
        2.0 ** -np.arange(1, 66, dtype=np.float64),
        1 - 2.0 ** -np.arange(2, 50, dtype=np.float64),
        [0.075, np.nextafter(0.075, 0), 0.925, math.exp(-25) * 0.999, math.exp(-25) * 1.001, 1e-300],
    ]
)


def quantile(probabilities: np.ndarray) -> np.ndarray:
    tail = np.minimum(probabilities, 1 - probabilities)
    return NormalQuantile(len(probabilities))(probabilities - 0.5, tail).copy()


def decimal_upper_tail(x: Decimal) -> Decimal:
    """1 - cdf(x) for x >= 0: the series of erf near 0, the continued fraction of erfc beyond, both to 50 digits."""
    pi = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803")
    density = (-x * x / 2).exp() / (2 * pi).sqrt()
    if x < 6:
        term = total = x
        k = 1
        while abs(term) > Decimal(10) ** -80:
            term = term * x * x / (2 * k + 1)
            total += term
            k += 1
        return Decimal("0.5") - density * total
    fraction = x
    for k in range(2000, 0, -1):
        fraction = x + k / fraction
    return density / fraction


def relative_error_of_quantile(tail: float, x: float) -> float:
    """Distance of x > 0 from the exact value that leaves `tail` beyond it, over x: one Newton step from x."""
    with localcontext() as context:
        context.prec = 90
        exact_x = Decimal(x)
        pi = Decimal("3.14159265358979323846264338327950288419716939937510582097494459230781640628620899862803")
        density = (-exact_x * exact_x / 2).exp() / (2 * pi).sqrt()
        return float((decimal_upper_tail(exact_x) - Decimal(tail)) / density / exact_x)


def test_accuracy_against_50_digits():
    tails = [*np.linspace(0.005, 0.495, 60), *(2.0 ** -np.arange(2, 66, 1.5)), 0.075, 1.3e-11, 1.5e-11, 1e-60, 1e-250]
    values = -quantile(np.array(tails))
    worst = max(abs(relative_error_of_quantile(tail, x)) for tail, x in zip(tails, values.tolist(), strict=True))
    assert worst < 1e-15


def test_known_values():
    table = {0.975: 1.959963984540054, 0.995: 2.575829303548901, 0.9: 1.2815515655446004, 0.5: 0.0}
    assert quantile(np.array(list(table))) == pytest.approx(list(table.values()), rel=1e-15, abs=0)


def test_agrees_with_the_standard_library():
    expected = [statistics.NormalDist().inv_cdf(p) for p in PROBABILITIES.tolist()]
    assert quantile(PROBABILITIES) == pytest.approx(expected, rel=1e-13, abs=1e-15)


def test_is_odd():
    tail = np.random.default_rng(2).random(1000) / 2
    function = NormalQuantile(1000)
    assert np.array_equal(function(0.5 - tail, tail).copy(), -function(tail - 0.5, tail))


def test_log_of_tail_masses_to_one_unit_in_the_last_place():
    x = np.concatenate([np.random.default_rng(4).random(2000) * 0.075, 2.0 ** -np.linspace(4, 1000, 3000)])
    with localcontext() as context:
        context.prec = 40
        errors = [
            float(abs(Decimal(ours) - Decimal(value).ln())) / math.ulp(ours)
            for value, ours in zip(x.tolist(), natural_log(x).tolist(), strict=True)
        ]
    assert max(errors) < 1.0


def polynomial(coefficients, x):
    total = x * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        total = (total + coefficient) * x
    return total + coefficients[0]


def scalar_quantile(p: float) -> float:
    """The same operations in Python floats, whose arithmetic is IEEE 754 too, without any vector unit."""
    offset, tail = p - 0.5, min(p, 1 - p)
    if tail >= 0.075:
        argument = max(0.180625 - offset * offset, 0.0)
        return (
            polynomial(module._CENTRE_NUMERATOR, argument) * offset / polynomial(module._CENTRE_DENOMINATOR, argument)
        )
    mantissa, exponent = math.frexp(tail)
    if mantissa < math.sqrt(0.5):
        mantissa, exponent = mantissa * 2, exponent - 1
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    series = polynomial(module._ATANH_COEFFICIENTS, ratio * ratio) * ratio
    root = math.sqrt(-(series + exponent * module._LOG2_LOW + exponent * module._LOG2_HIGH))
    if root <= 5:
        value = polynomial(module._NEAR_NUMERATOR, root - 1.6) / polynomial(module._NEAR_DENOMINATOR, root - 1.6)
    else:
        value = polynomial(module._FAR_NUMERATOR, root - 5) / polynomial(module._FAR_DENOMINATOR, root - 5)
    return math.copysign(value, offset)


def test_bits_are_those_of_scalar_arithmetic():
    assert quantile(PROBABILITIES).tolist() == [scalar_quantile(p) for p in PROBABILITIES.tolist()]


def test_bits_do_not_depend_on_position_or_length():
    values = quantile(PROBABILITIES)
    for start, stop in [(0, 1), (1, 2), (3, 10), (5, 22), (17, 1041), (4000, len(PROBABILITIES))]:
        assert np.array_equal(quantile(PROBABILITIES[start:stop]), values[start:stop])


def test_torch_gives_the_same_bits_with_the_same_operations():
    centre = torch.from_numpy(PROBABILITIES[(PROBABILITIES > 0.075) & (PROBABILITIES < 0.925)])
    offset = centre - 0.5
    argument = (0.180625 - offset * offset).clamp(min=0.0)
    ratio = polynomial(module._CENTRE_NUMERATOR, argument) * offset
    values = ratio / polynomial(module._CENTRE_DENOMINATOR, argument)
    assert np.array_equal(values.numpy(), quantile(centre.numpy()))


def test_cdf_is_the_inverse_and_keeps_its_tail():
    for p in (1e-300, 1e-20, 0.01, 0.3, 0.5, 0.8):
        assert normal_cdf(float(quantile(np.array([p]))[0])) == pytest.approx(p, rel=1e-12)
    assert normal_cdf(-math.inf) == 0
    assert normal_cdf(math.inf) == 1
