"""Python's operators and the methods of elements on DTensors, sent straight to the dispatcher.

Note [The short way]
``x + y`` and ``x.exp()`` would reach the dispatcher by themselves: MindSpore's C++ finds that x is of a subclass, packs
the call into a new object and asks ``__fallback__``. That round trip costs several times what the dispatcher does. As
methods of DTensor they do not make it. On the blocks runs what would run on plain tensors: the very operator.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import numpy as np
from mindspore import Tensor

from hyper_parallel.platform.mindspore.dtensor.tensor_type import DTensorBase, is_distributed
from hyper_parallel.platform.mindspore.operators.all_operators import NEUTRAL

Dispatch = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]

# By Python's name: the neutral name, and what it does to blocks. Reflected, the DTensor still comes first.
_UNARY: dict[str, tuple[str, Callable[..., Any]]] = {
    "__abs__": ("abs", lambda x: abs(x)),
    "__invert__": ("bitwise_not", lambda x: ~x),
    "__neg__": ("neg", lambda x: -x),
    "__pos__": ("positive", lambda x: +x),
}
_BINARY: dict[str, tuple[str, Callable[..., Any]]] = {
    "__add__": ("add", lambda x, y: x + y),
    "__and__": ("bitwise_and", lambda x, y: x & y),
    "__eq__": ("eq", lambda x, y: x == y),
    "__floordiv__": ("floor_divide", lambda x, y: x // y),
    "__ge__": ("ge", lambda x, y: x >= y),
    "__gt__": ("gt", lambda x, y: x > y),
    "__le__": ("le", lambda x, y: x <= y),
    "__lt__": ("lt", lambda x, y: x < y),
    "__mod__": ("remainder", lambda x, y: x % y),
    "__mul__": ("mul", lambda x, y: x * y),
    "__ne__": ("ne", lambda x, y: x != y),
    "__or__": ("bitwise_or", lambda x, y: x | y),
    "__pow__": ("pow", NEUTRAL["pow"]),
    "__sub__": ("sub", lambda x, y: x - y),
    "__truediv__": ("div", lambda x, y: x / y),
    "__xor__": ("bitwise_xor", lambda x, y: x ^ y),
    "__radd__": ("add", lambda x, y: y + x),
    "__rand__": ("bitwise_and", lambda x, y: y & x),
    "__rfloordiv__": ("rfloor_divide", lambda x, y: y // x),
    "__rmod__": ("rremainder", lambda x, y: y % x),
    "__rmul__": ("mul", lambda x, y: y * x),
    "__ror__": ("bitwise_or", lambda x, y: y | x),
    "__rpow__": ("rpow", lambda x, y: NEUTRAL["pow"](y, x)),
    "__rsub__": ("rsub", lambda x, y: y - x),
    "__rtruediv__": ("rdiv", lambda x, y: y / x),
    "__rxor__": ("bitwise_xor", lambda x, y: y ^ x),
}
# Methods of C++ that take what the rules take.
_METHODS = """
    abs add atan2 ceil clamp cos div eq erf exp floor floor_divide gt ge le log logical_and logical_not logical_or lt
    masked_fill maximum minimum mul ne neg pow reciprocal relu remainder round rsqrt sigmoid sign sin sqrt square sub
    tanh trunc
"""
_SAME_BITS = ("log", "pow")  # see ``same_bits.py``
_CASTS = ("bool", "byte", "double", "half", "int", "long", "short", "bfloat16")
_OPERANDS = (Tensor, int, float, complex, np.number, np.bool_)


def give_operators(dispatch: Dispatch) -> None:
    """Give DTensor the methods."""
    for name, (neutral, run) in _UNARY.items():
        if hasattr(Tensor, name):
            setattr(DTensorBase, name, _unary(name, _named(neutral, run), dispatch))
    for name, (neutral, run) in _BINARY.items():
        if hasattr(Tensor, name):
            setattr(DTensorBase, name, _binary(name, _named(neutral, run), dispatch))
    DTensorBase.__matmul__ = _binary("__matmul__", NEUTRAL["matmul"], dispatch)
    DTensorBase.matmul = _binary("matmul", NEUTRAL["matmul"], dispatch)
    DTensorBase.__rmatmul__ = lambda self, other: dispatch(NEUTRAL["matmul"], (other, self), {})
    DTensorBase.reshape = lambda self, *shape: dispatch(NEUTRAL["reshape"], (self, *shape), {})
    DTensorBase.view = lambda self, *shape: dispatch(NEUTRAL["view"], (self, *shape), {})
    for name in ("sum", "mean"):
        setattr(DTensorBase, name, _reduction(name, dispatch))
    for name in _METHODS.split():
        plain = getattr(Tensor, name, None)
        if plain is not None and not isinstance(plain, types.FunctionType):
            op = NEUTRAL[name] if name in _SAME_BITS else _named(name, _calling(plain))
            setattr(DTensorBase, name, _method(name, op, dispatch))
    for name in ("T", "mT", "mH", "H"):
        if hasattr(Tensor, name):
            setattr(DTensorBase, name, property(_unary(name, _named(name, _attribute(name)), dispatch)))
    for name in _CASTS:
        plain = getattr(Tensor, name, None)
        if plain is not None:
            setattr(DTensorBase, name, _unary(name, _named(name, _calling(plain)), dispatch))


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    function.__name__ = name
    return function


def _calling(plain: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: plain(*args, **kwargs)


def _attribute(name: str) -> Callable[..., Any]:
    return lambda tensor: getattr(tensor, name)


def _unary(name: str, op: Callable[..., Any], dispatch: Dispatch) -> Callable[..., Any]:
    def method(self: Any) -> Any:
        return dispatch(op, (self,), {})

    return _named(name, method)


def _binary(name: str, op: Callable[..., Any], dispatch: Dispatch) -> Callable[..., Any]:
    def method(self: Any, other: Any) -> Any:
        if not is_distributed(other) and not isinstance(other, _OPERANDS):
            if not isinstance(other, (np.ndarray, list, tuple)):
                return NotImplemented
            other = Tensor(np.asarray(other))  # a plain tensor, which the dispatcher knows what to say about
        return dispatch(op, (self, other), {})

    return _named(name, method)


def _method(name: str, op: Callable[..., Any], dispatch: Dispatch) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return dispatch(op, (self, *args), kwargs)

    return _named(name, method)


_REDUCING = {"dim": "dim", "axis": "dim", "keepdim": "keepdim", "keepdims": "keepdim", "keep_dims": "keepdim"}


def _reduction(name: str, dispatch: Dispatch) -> Callable[..., Any]:
    """``x.sum(...)``: the plain method has two orders of arguments, of which the simple calls are read here."""
    plain, op = getattr(Tensor, name), NEUTRAL[name]

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) > 1 or not kwargs.keys() <= _REDUCING.keys():
            return plain(self, *args, **kwargs)
        return dispatch(op, (self, *args), {_REDUCING[key]: value for key, value in kwargs.items()})

    return _named(name, method)
