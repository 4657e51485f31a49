"""Calling operators on blocks: the innermost step of the dispatcher, and what it must know about results beforehand."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from hyper_parallel.platform.torch.base.dtensor_base import DTensorBase, as_dtensor, local_alias
from hyper_parallel.platform.torch.base.tensors import get_op_name, tree_map
from hyper_parallel.platform.torch.communication.pretend_groups import is_silent
from hyper_parallel.platform.torch.private_api import NoInterception, outside_of_modes


def result_wrapper(
    kind: type, layouts: tuple[Any, ...], shapes: tuple[Any, ...], brings_blocks: bool
) -> Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]:
    """A function that calls an operator on blocks and makes DTensors of its results, in their order.

    ``brings_blocks``: plain blocks may be among the arguments, made for this call.
    """
    layout, shape = (layouts[0], shapes[0]) if layouts else (None, None)

    def run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with NoInterception():
            result = func(*args, **kwargs)
        if type(result) is torch.Tensor:
            if brings_blocks:
                for value in args:
                    if result is value:  # a block that was brought here for this call, unchanged
                        result = result.view_as(result)
            result.__class__ = kind  # type: ignore[assignment]
            result._layout = layout  # type: ignore[attr-defined]
            result._global_shape = shape  # type: ignore[attr-defined]
            return result
        if isinstance(result, (tuple, list)):
            return _wrap_several(kind, result, layouts, shapes)
        return result

    return _without_memory(run) if is_silent() else run


# Note [Operators without memory]
# PyTorch finds the results of many operators on tensors without memory in Python code, which reads ``.shape``, the
# global one on a DTensor, in backward too, and so do modes that count. So in a silent world operators get aliases.
# An alias that is saved for backward keeps its DTensor alive, and what this one holds, as the DTensor itself would.


def _without_memory(run: Callable[..., Any]) -> Callable[..., Any]:
    """``run`` with plain tensors in place of DTensors."""

    def run_plain(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given: dict[int, Any] = {}

        def block(value: Any) -> Any:
            if isinstance(value, DTensorBase):
                plain = local_alias(value)
                plain._alias_of = value  # type: ignore[attr-defined]
                given[id(plain)] = (plain, value)
                return plain
            return value

        def original(value: Any) -> Any:
            found = given.get(id(value))
            return value if found is None else found[1]

        def call(*blocks: Any, **named: Any) -> Any:
            result = func(*blocks, **named)
            if isinstance(result, (tuple, list)):
                make = getattr(result, "_make", type(result))
                return make(map(original, result))
            return original(result)  # what an operator in place gives is the DTensor itself

        return run(call, tree_map(block, tuple(args)), tree_map(block, dict(kwargs)))

    return run_plain


def _wrap_several(kind: type, results: Any, layouts: tuple[Any, ...], shapes: tuple[Any, ...]) -> Any:
    described = iter(zip(layouts, shapes, strict=True))
    wrapped = []
    for item in results:
        if isinstance(item, torch.Tensor):
            layout, shape = next(described)
            item = item if isinstance(item, DTensorBase) else as_dtensor(kind, item, layout, shape)
        wrapped.append(item)
    make = getattr(results, "_make", type(results))
    return make(wrapped)


def label_all(kind: type, results: Any, layouts: list[Any], shapes: list[Any]) -> Any:
    """The tensors of a list as DTensors, in place; those without a layout stay plain."""
    for result, layout, shape in zip(results, layouts, shapes, strict=True):
        if layout is not None:
            result.__class__ = kind
            result._layout = layout
            result._global_shape = shape
    return results


def blocks_of(args: Any, kwargs: Any, gives_nothing: bool = False) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with every DTensor replaced by its block as a plain tensor."""

    def block(value: Any) -> Any:
        return local_alias(value) if isinstance(value, DTensorBase) else value

    return tree_map(block, tuple(args)), tree_map(block, dict(kwargs))


def output_shapes(func: Callable[..., Any], args: Any, kwargs: Any) -> list[tuple[int, ...]]:
    """The global shapes of the tensors that ``func`` returns, found by calling it on tensors without memory.

    What refuses these is called on zeros: it may be right there, and else the error is that of the device's kernels.
    """

    def without_memory(value: Any) -> Any:
        if isinstance(value, DTensorBase):
            return torch.empty(value._global_shape, dtype=value.dtype, device="meta")
        return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) and value.ndim else value

    def without_numbers(value: Any) -> Any:  # some functions read a plain tensor of no dims, some refuse it
        return torch.empty_like(value, device="meta") if isinstance(value, torch.Tensor) else value

    def zeros(value: Any) -> Any:  # in one cell of memory
        if isinstance(value, DTensorBase):
            return torch.zeros((), dtype=value.dtype, device=value.device).expand(value._global_shape)
        return value

    try:
        return _shapes_with(without_memory, func, args, kwargs)
    except Exception as error:
        if "same device" in str(error):
            return _shapes_with(lambda value: without_numbers(without_memory(value)), func, args, kwargs)
        name = get_op_name(func)
        is_write = (name.endswith("_") and not name.endswith("__")) or name == "setitem" or kwargs.get("inplace")
        if is_write or depends_on_values(error):
            raise
        return _shapes_with(zeros, func, args, kwargs)


def _shapes_with(
    stand_in: Callable[[Any], Any], func: Callable[..., Any], args: Any, kwargs: Any
) -> list[tuple[int, ...]]:
    """The shapes of the results for what stands in for the tensors."""
    # Outside of modes: what they count and keep (selective checkpoints do both) is the work of the program, which plans
    # a call only once.
    with outside_of_modes(), torch.no_grad():
        result = func(*tree_map(stand_in, args), **tree_map(stand_in, kwargs))
    if result is NotImplemented:  # a TypeError lets Python ask the other operand
        raise TypeError(f"unsupported operands: {', '.join(type(arg).__name__ for arg in args)}")
    results = result if isinstance(result, (tuple, list)) else [result]
    shapes = [tuple(item.shape) for item in results if isinstance(item, torch.Tensor)]
    if get_op_name(func) in _BATCH_NORMS and not _is_training(args, kwargs):
        shapes[1:] = [(0,)] * (len(shapes) - 1)  # The CPU gives no statistics that nobody asked for; meta tensors do.
    return shapes


_BATCH_NORMS = frozenset({"native_batch_norm", "_native_batch_norm_legit"})


def _is_training(args: Any, kwargs: Any) -> bool:
    found = [value for value in args if isinstance(value, bool)]
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    return bool(kwargs.get("training", found[0] if found else True)) or tensors[0].device.type != "cpu"


@functools.cache
def argument_names(func: Callable[..., Any]) -> tuple[str, ...]:
    """The names of a function's arguments in their order; empty when they are not known."""
    try:
        return tuple(inspect.signature(func).parameters)
    except (TypeError, ValueError):  # written in C: the longest form in the table of operators
        forms = getattr(torch.ops.aten, getattr(func, "__name__", ""), None)
        schemas = [getattr(forms, name)._schema for name in forms.overloads()] if forms is not None else []
        longest: Any = max(schemas, key=lambda schema: len(schema.arguments), default=None)
        names = [] if longest is None else [argument.name for argument in longest.arguments]
        return tuple("input" if name == "self" else name for name in names)


def depends_on_values(error: Exception) -> bool:
    """Whether :func:`output_shapes` failed because the shapes follow from values, which tensors without memory lack."""
    return isinstance(error, NotImplementedError) or "meta" in str(error)


def zeros_kept_in_graph(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros that keep ``tensor`` in the graph, with a gradient of zeros."""
    return tensor.masked_fill(torch.ones_like(tensor, dtype=torch.bool), 0)
