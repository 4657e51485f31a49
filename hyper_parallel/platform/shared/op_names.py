"""Canonical names of operators: one for all spellings of the same computation, on every framework."""

from __future__ import annotations

_BINARY_OPERATORS = {
    "add": "add",
    "and": "bitwise_and",
    "div": "div",
    "floordiv": "floor_divide",
    "lshift": "bitwise_left_shift",
    "matmul": "matmul",
    "mod": "remainder",
    "mul": "mul",
    "or": "bitwise_or",
    "pow": "pow",
    "rshift": "bitwise_right_shift",
    "sub": "sub",
    "truediv": "div",
    "xor": "bitwise_xor",
}
_OTHER_OPERATORS = {"inv": "bitwise_not", "invert": "bitwise_not", "pos": "positive"} | {
    name: name for name in ("abs", "eq", "ge", "getitem", "gt", "le", "lt", "ne", "neg", "setitem")
}
_COMMUTATIVE = {"add", "bitwise_and", "bitwise_or", "bitwise_xor", "mul"}

_ALIASES = {
    "absolute": "abs",
    "arccos": "acos",
    "arccosh": "acosh",
    "arcsin": "asin",
    "arcsinh": "asinh",
    "arctan": "atan",
    "arctan2": "atan2",
    "arctanh": "atanh",
    "clip": "clamp",
    "concat": "cat",
    "concatenate": "cat",
    "divide": "div",
    "fix": "trunc",
    "ger": "outer",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "linalg_matmul": "matmul",
    "moveaxis": "movedim",
    "multiply": "mul",
    "negative": "neg",
    "not_equal": "ne",
    "row_stack": "vstack",
    "special_digamma": "digamma",
    "special_erf": "erf",
    "special_erfc": "erfc",
    "special_erfinv": "erfinv",
    "special_exp2": "exp2",
    "special_expit": "sigmoid",
    "special_expm1": "expm1",
    "special_gammaln": "lgamma",
    "special_i0": "i0",
    "special_log1p": "log1p",
    "special_log_softmax": "log_softmax",
    "special_logit": "logit",
    "special_logsumexp": "logsumexp",
    "special_psi": "digamma",
    "special_round": "round",
    "special_sinc": "sinc",
    "special_softmax": "softmax",
    "special_xlogy": "xlogy",
    "subtract": "sub",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "true_divide": "div",
}


def canonical_name(name: str) -> str:
    if name.startswith("__") and name.endswith("__"):
        return _name_of_python_operator(name)
    if name.endswith("_"):
        return f"{_ALIASES.get(name[:-1], name[:-1])}_"
    return _ALIASES.get(name, name)


def _name_of_python_operator(dunder: str) -> str:
    operator = dunder[2:-2]
    if operator in _BINARY_OPERATORS:
        return _BINARY_OPERATORS[operator]
    if operator in _OTHER_OPERATORS:
        return _OTHER_OPERATORS[operator]
    name = _BINARY_OPERATORS.get(operator[1:])
    if name is not None and operator[0] == "i":
        return f"{name}_"
    if name is not None and operator[0] == "r":
        return name if name in _COMMUTATIVE else f"r{name}"
    return dunder  # __bool__ and the like: they read the tensor, while Tensor.bool() casts it
