"""Other dtypes and devices for the same values. A pending sum passes into floating-point types only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.shard.dispatching.special_ops import SPECIAL_OPS
from hyper_parallel.core.shard.rule_kit.rule_table import rule
from hyper_parallel.core.shard.rule_kit.signature import OpCall, Signature, letters
from hyper_parallel.core.shard.rules.views import ALONE
from hyper_parallel.platform import get_platform

_platform = get_platform()


@rule("double", "half", "bfloat16", "cfloat", "cdouble", "chalf")
@rule("cpu", "cuda", "npu", "xpu", "pin_memory", "resolve_conj", "resolve_neg", "alias_copy", "lift_fresh")
def linear_cast(call: OpCall) -> Signature:
    labels = letters(call.tensors[0].ndim)
    return Signature((labels,), (labels,), linear=ALONE)


@rule("int", "long", "short", "char", "byte", "bool")
def cast(call: OpCall) -> Signature:
    labels = letters(call.tensors[0].ndim)
    return Signature((labels,), (labels,))


@rule("complex")
def complex_(call: OpCall) -> Signature:
    """A real and an imaginary part."""
    labels = [
        tuple(
            label if size == whole else None
            for label, size, whole in zip(
                letters(len(call.outputs[0]))[len(call.outputs[0]) - spec.ndim :],
                spec.shape,
                call.outputs[0][len(call.outputs[0]) - spec.ndim :],
                strict=True,
            )
        )
        for spec in call.tensors
    ]
    both = (frozenset({0, 1}),) if len(call.tensors) == 2 else ()
    return Signature(tuple(labels), (letters(len(call.outputs[0])),), linear=both)


def _type(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``x.type()`` asks, ``x.type(dtype)`` converts."""
    tensor, *rest = args
    dtype = rest[0] if rest else kwargs.get("dtype")
    plain = _platform.local_alias(tensor)
    if dtype is None:
        return plain.type()
    if isinstance(dtype, (str, type)):  # a name such as torch.DoubleTensor
        dtype = plain.narrow(0, 0, 0).type(dtype).dtype if plain.ndim else plain.detach().type(dtype).dtype
    return tensor.to(dtype)


def _type_as(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor, other = (*args, *kwargs.values())
    return tensor.to(dtype=other.dtype, device=other.device)


def _format(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    tensor, spec = args
    if isinstance(tensor, DTensor) and not tuple(tensor.shape):
        return format(tensor.item(), spec)
    return object.__format__(tensor, spec)


def _iterate(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (tensor,) = args
    if not tuple(tensor.shape):
        raise TypeError("iteration over a 0-d tensor")
    return iter(tensor.unbind(0))


def _reversed(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    (tensor,) = args
    return tensor.flip(0) if tuple(tensor.shape) else tensor


SPECIAL_OPS.update(
    {
        "type": _type,
        "type_as": _type_as,
        "__format__": _format,
        "__iter__": _iterate,
        "__reversed__": _reversed,
    }
)
