"""Operators on corresponding elements, with broadcasting: dims of equal size go together, stretched dims stay whole."""

from __future__ import annotations

import math
from typing import Any

from hyper_parallel.core.shard.rule_kit.agreed_errors import on_host, with_agreed_errors
from hyper_parallel.core.shard.rule_kit.empty_blocks import block_tensors
from hyper_parallel.core.shard.rule_kit.rule_table import rule
from hyper_parallel.core.shard.rule_kit.signature import (
    LocalCall,
    OpCall,
    Signature,
    TensorSpec,
    broadcast_labels,
    letters,
)
from hyper_parallel.platform import get_platform

_platform = get_platform()

# Linear in all their tensor operands together: a pending sum passes when every operand is one.
_JOINTLY_LINEAR = ("add", "sub", "rsub", "lerp")
# Linear in each operand while the others are fixed.
_EACH_LINEAR = ("mul",)
_LINEAR = ("neg", "positive", "alias", "clone", "detach", "contiguous", "real", "imag", "conj", "conj_physical")

_NON_LINEAR = (
    *("abs", "acos", "acosh", "addcdiv", "addcmul", "angle", "asin", "asinh", "atan", "atan2", "atanh"),
    *("bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or", "bitwise_right_shift", "bitwise_xor"),
    *("ceil", "celu", "clamp", "clamp_max", "clamp_min", "copysign", "cos", "cosh", "deg2rad", "digamma", "elu", "eq"),
    *("erf", "erfc", "erfinv", "exp", "exp2", "expm1", "float_power", "floor", "fmax", "fmin"),
    *(
        "frac",
        "gcd",
        "ge",
        "gelu",
        "gt",
        "hardshrink",
        "hardsigmoid",
        "hardswish",
        "hardtanh",
        "heaviside",
        "hypot",
        "i0",
    ),
    *("isclose", "isfinite", "isinf", "isnan", "isneginf", "isposinf", "isreal", "lcm", "ldexp", "le"),
    *("leaky_relu", "lgamma", "log", "log10", "log1p", "log2", "log_sigmoid", "logaddexp", "logaddexp2", "logical_and"),
    *("logical_not", "logical_or", "logical_xor", "logit", "lt", "masked_fill", "maximum", "minimum", "mish", "ne"),
    *("nan_to_num", "nextafter", "polygamma", "pow", "rad2deg", "reciprocal", "relu", "relu6", "round"),
    *("rpow", "rsqrt", "selu", "sgn", "sigmoid", "sign", "signbit", "silu", "sin", "sinc", "sinh", "softplus"),
    *("softshrink", "sqrt", "square", "tan", "tanh", "threshold", "trunc", "where", "xlogy", "special_xlog1py"),
    *("special_entr", "special_i0e", "special_i1", "special_i1e", "special_ndtr", "special_ndtri", "special_zeta"),
    *("special_log_ndtr", "special_erfcx", "special_bessel_j0", "special_bessel_j1"),
    *("special_bessel_y0", "special_bessel_y1", "special_airy_ai", "special_spherical_bessel_j0", "igamma", "igammac"),
    *(f"special_{scaled}modified_bessel_k{order}" for scaled in ("", "scaled_") for order in (0, 1)),
    *("special_modified_bessel_i0", "special_modified_bessel_i1", "mvlgamma", "polar", "frexp"),
    *(f"special_{shifted}chebyshev_polynomial_{kind}" for shifted in ("", "shifted_") for kind in "tuvw"),
    *(f"special_{family}_polynomial_{kind}" for family, kind in zip(("laguerre", "legendre"), "lp", strict=True)),
    *("special_hermite_polynomial_h", "special_hermite_polynomial_he"),
)


def _labels(call: OpCall) -> tuple[Any, Any]:
    output = call.outputs[0]
    return broadcast_labels([spec.shape for spec in call.tensors], output), letters(len(output))


@rule(*_NON_LINEAR, ignores_scalars=True)
def non_linear(call: OpCall) -> Signature:
    inputs, output = _labels(call)
    return Signature(inputs, (output,) * len(call.outputs))


@rule(*_LINEAR, ignores_scalars=True)
def linear(call: OpCall) -> Signature:
    inputs, output = _labels(call)
    return Signature(inputs, (output,), linear=(frozenset({0}),))


@rule(*_JOINTLY_LINEAR, ignores_scalars=True)
def jointly_linear(call: OpCall) -> Signature:
    inputs, output = _labels(call)
    operands = [value for value in call.args[:2] if not isinstance(value, TensorSpec)]
    only_tensors = len(call.tensors) == 2 and not operands and call.name.rstrip("_") != "lerp"
    if call.name.rstrip("_") in ("add", "sub") and len(call.args) == 2 and type(call.args[1]) in (int, float):
        return Signature(
            inputs,
            (output,),
            linear=(frozenset({0}),),
            local=_without_number,
            needs_local=lambda local: not local.counts_here(),
        )
    return Signature(inputs, (output,), linear=(frozenset({0, 1}),) if only_tensors else ())


def _without_number(call: LocalCall) -> Any:
    """A number is added to one part of a pending sum only."""
    target = call.args[0] if call.written is None else call.written
    return call.func(target, type(call.args[1])(0), **call.kwargs)


@rule(*_EACH_LINEAR, ignores_scalars=True)
def each_linear(call: OpCall) -> Signature:
    inputs, output = _labels(call)
    same_tensor = len(call.tensors) == 2 and call.tensors[0] is call.tensors[1]
    alone = tuple(frozenset({index}) for index in range(len(call.tensors)))
    return Signature(inputs, (output,), linear=() if same_tensor or _number(call) in _INFINITE else alone)


# Note [inf - inf]
# The parts of a pending sum may have other signs than the sum. Divided by zero, or times infinity, they become inf and
# -inf, and their sum NaN where that of one device is infinite. So the sum is done first where a number is 0 or infinite
# (the only values that a rule with ``ignores_scalars`` sees), and always before it is divided by a tensor.
_INFINITE = (math.inf, -math.inf)


def _number(call: OpCall) -> Any:
    """The second operand if it is a number."""
    other = call.bind("input", "other").get("other")
    return other if isinstance(other, (int, float, complex)) else None


@rule("div", "rdiv", ignores_scalars=True)
def division(call: OpCall) -> Signature | None:
    inputs, output = _labels(call)
    if call.kwargs.get("rounding_mode"):
        return whole_division(call)
    is_linear = call.name.startswith("div") and _number(call)
    return Signature(inputs, (output,), linear=(frozenset({0}),) if is_linear else ())


@rule("floor_divide", "fmod", "remainder", "rfloor_divide", "rremainder", ignores_scalars=True)
def whole_division(call: OpCall) -> Signature:
    """A zero that divides whole numbers is refused, on the host, by the rank that has it."""
    inputs, output = _labels(call)
    found = Signature(inputs, (output,))
    is_by_number = _number(call) and call.name not in ("rfloor_divide", "rremainder")
    return found if is_by_number else with_agreed_errors(found, _divides_whole_numbers)


def _divides_whole_numbers(call: LocalCall) -> bool:
    kinds = [_platform.dtype_name(tensor.dtype) for tensor in block_tensors(call)]
    return on_host(call) and all(kind.startswith(("int", "uint", "bool")) for kind in kinds)


@rule("copy_", ignores_scalars=True, by_dtype=True)
def copy_(call: OpCall) -> Signature:
    """A pending sum is converted part by part, unless that rounds each part."""
    inputs, output = _labels(call)
    dtypes = [_platform.dtype_name(spec.dtype) for spec in call.tensors]
    is_exact = dtypes[0] == dtypes[-1] or dtypes[0].startswith(("float", "bfloat", "complex"))
    is_moved = is_exact and len(call.tensors) == 2  # a number is written as it is
    return Signature(inputs, (output,), linear=(frozenset({0, 1}),) if is_moved else ())


@rule("isin")
def isin(call: OpCall) -> Signature:
    """Every element is looked for among all of the others, which stay whole."""
    elements = call.bind("elements", "test_elements")["elements"]
    labels = letters(len(call.outputs[0]))
    first = [labels] if isinstance(elements, TensorSpec) else []
    others = call.tensors[len(first) :]
    return Signature((*first, *((None,) * spec.ndim for spec in others)), (labels,))


@rule("zero_", "fill_", ignores_scalars=True)
def overwrite(call: OpCall) -> Signature:
    inputs, output = _labels(call)
    return Signature(inputs, (output,), linear=(frozenset({0}),) if call.name == "zero_" else ())


@rule("prelu")
def prelu(call: OpCall) -> Signature | None:
    """One slope for all elements, or one for each channel, which is dim 1."""
    if len(call.tensors) != 2:
        return None
    values, slope = call.tensors
    names = letters(values.ndim)
    is_per_channel = slope.ndim == 1 and slope.shape[0] != 1 and values.ndim > 1
    of_slope = (names[1],) if is_per_channel else (None,) * slope.ndim
    return Signature((names, of_slope), (names,))


@rule("glu")
def glu(call: OpCall) -> Signature:
    """One half of a dim, which stays whole, gates the other."""
    (values,) = call.tensors
    dim = call.bind("input", "dim", dim=-1)["dim"] % values.ndim
    labels = tuple(None if place == dim else letter for place, letter in enumerate(letters(values.ndim)))
    return Signature((labels,), (labels,))
