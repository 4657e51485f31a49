"""Bringing your own operators: a rule in one line, an operator with a layout function, or a function of blocks."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout, Shape
from hyper_parallel.core.shard.dispatching.dispatch import dispatch
from hyper_parallel.core.shard.dispatching.input_edges import bring_input
from hyper_parallel.core.shard.dispatching.reduce_later import by_the_law
from hyper_parallel.core.shard.rule_kit.rule_table import Rule, parse_equation, set_function_rule
from hyper_parallel.platform import get_platform

_platform = get_platform()


def register_op(rule: str | Rule, **properties: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: let a function of tensors, or an operator of a library, take DTensors by a sharding rule.

    The rule is an einsum-like line, whose letters say which dims go together (``reduces`` names what becomes a pending
    sum when it is cut), or a function from an ``OpCall`` to a ``Signature``. With plain tensors nothing changes.

    >>> @register_op("mk,kn->mn", reduces={"k": "sum"})
    ... def scaled_product(a, b, scale=1.0):
    ...     return a @ b * scale
    """
    found: Rule = parse_equation(rule, **properties) if isinstance(rule, str) else rule

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        if _platform.is_intercepted(function):
            set_function_rule(function, found)
            return function

        @functools.wraps(function)
        def on_blocks(*args: Any, **kwargs: Any) -> Any:
            blocks, named = _platform.blocks_of(args, kwargs)  # whose shapes are those of the blocks
            return function(*blocks, **named)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if _has_dtensor(args, kwargs):
                return dispatch(on_blocks, args, kwargs)
            return function(*args, **kwargs)

        set_function_rule(on_blocks, found)

        return call

    return register


class DistributedOp(ABC):
    """An operator's layout function, found by name: making an instance registers it.

    ``infer_layout(layouts, extra_args)`` gets the layout of every positional argument (None for those that are no
    DTensors) and the other arguments, and returns the output's layout, or a tuple of them. The inputs go in as they
    lie. ``preprocess(args, kwargs)`` may change the local arguments, ``local`` may replace the function.
    """

    def __init__(self, op_name: str) -> None:
        self.op_name = op_name
        _distributed_ops[op_name] = self

    @abstractmethod
    def infer_layout(self, layouts: Sequence[Layout | None], extra_args: Sequence[Any]) -> Any:
        """The layout of the result, or of each of the results."""

    def preprocess(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments for the local call, given those with plain blocks."""
        return args, kwargs

    def local(self, func: Callable[..., Any]) -> Callable[..., Any]:
        """The function to run on the blocks."""
        return func


_distributed_ops: dict[str, DistributedOp] = {}


def find_distributed_op(name: str) -> DistributedOp | None:
    """The registered operator of that name."""
    return _distributed_ops.get(name)


def run_distributed_op(
    op: DistributedOp, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run ``func`` on the blocks of its arguments and give the results the layouts that ``op`` infers."""
    args, kwargs = by_the_law((args, kwargs))
    layouts = [value.layout if isinstance(value, DTensor) else None for value in args]
    extra = [value for value in (*args, *kwargs.values()) if not isinstance(value, DTensor)]
    inferred = op.infer_layout(layouts, extra)
    local_args, local_kwargs = op.preprocess(*_enter_all(args, kwargs, {}))
    result = op.local(func)(*local_args, **local_kwargs)
    return _distribute_results(op.op_name, result, inferred, _entered(args, kwargs, {}))


def custom_shard(
    func: Callable[..., Any],
    device_mesh: Any = None,
    out_placements: Any = None,
    in_placements: Any = None,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """``func``, written for local blocks, as a function of DTensors.

    ``in_placements`` has one entry per positional argument: its placements, or None for a value that is no DTensor or
    may lie as it does. An input that lies otherwise is an error, or is moved with ``redistribute_inputs``.
    ``out_placements`` is the placements of the result, or a tuple of them for several; None leaves a result plain.
    The gradient of an input that is whole is summed over the axes along which other inputs differ.
    """

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _has_dtensor(args, kwargs):
            return func(*args, **kwargs)
        args, kwargs = by_the_law((args, kwargs))
        mesh = device_mesh
        targets: dict[int, Layout] = {}
        for index, value in enumerate(args):
            if not isinstance(value, DTensor):
                continue
            mesh = value.device_mesh if mesh is None else mesh
            wanted = None if in_placements is None else in_placements[index]
            if wanted is None:
                continue
            layout = Layout.resolve(mesh, wanted, value.ndim)
            if layout is not value.layout and not redistribute_inputs:
                raise ValueError(
                    f"{_name(func)}: argument {index} has {value.layout}, in_placements says {layout}; "
                    "redistribute it, or pass redistribute_inputs=True"
                )
            targets[index] = layout
        if in_placements is not None and len(in_placements) != len(args):
            raise ValueError(
                f"{_name(func)}: {len(in_placements)} in_placements for {len(args)} arguments; give one each"
            )
        local_args, local_kwargs = _enter_all(args, kwargs, targets)
        result = func(*local_args, **local_kwargs)
        several = isinstance(result, (tuple, list))
        placements = list(out_placements) if several else [out_placements]
        results = list(result) if several else [result]
        if len(placements) != len(results):
            raise ValueError(
                f"{_name(func)}: {len(placements)} out_placements for {len(results)} results; give one each"
            )
        layouts = [
            None if spelling is None else Layout.resolve(mesh, spelling, item.ndim)
            for spelling, item in zip(placements, results, strict=True)
        ]
        entered = _entered(args, kwargs, targets)
        return _distribute_results(_name(func), result, tuple(layouts) if several else layouts[0], entered)

    return call


def local_map(
    func: Callable[..., Any],
    out_placements: Any,
    in_placements: Any = None,
    in_grad_placements: Any = None,
    device_mesh: Any = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """:func:`custom_shard` in torch's spelling; gradients follow from the layouts, without ``in_grad_placements``."""
    del in_grad_placements
    return custom_shard(func, device_mesh, out_placements, in_placements, redistribute_inputs)


def _name(func: Callable[..., Any]) -> str:
    return getattr(func, "__name__", type(func).__name__)


def _has_dtensor(args: Any, kwargs: Any) -> bool:
    return any(
        isinstance(value, DTensor)
        or (isinstance(value, (list, tuple)) and any(isinstance(item, DTensor) for item in value))
        for value in (*args, *kwargs.values())
    )


def _enter_all(
    args: tuple[Any, ...], kwargs: dict[str, Any], targets: dict[int, Layout]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The plain blocks of all arguments; whole ones enter through an edge where others make the call vary."""
    varying = {axis for layout, _ in _entered(args, kwargs, targets) for axis in _varying_axes(layout)}

    def block(value: Any, target: Layout | None) -> Any:
        if not isinstance(value, DTensor):
            return value
        target = target or value.layout
        axes = tuple(sorted(varying - _varying_axes(target)))
        return _platform.local_alias(bring_input(value, target, axes))

    new_args = tuple(block(value, targets.get(index)) for index, value in enumerate(args))
    return new_args, {name: block(value, None) for name, value in kwargs.items()}


def _entered(args: tuple[Any, ...], kwargs: dict[str, Any], targets: dict[int, Layout]) -> list[tuple[Layout, Shape]]:
    """The layouts under which the distributed arguments go in, and their global shapes."""
    values = [*enumerate(args), *((-1, value) for value in kwargs.values())]
    return [
        (targets.get(index) or value.layout, tuple(value.shape))
        for index, value in values
        if isinstance(value, DTensor)
    ]


def _varying_axes(layout: Layout) -> set[int]:
    cut = {axis for axes in layout.shard_axes for axis in axes}
    return cut | {axis for axis, op in enumerate(layout.partials) if op is not None}


def _distribute_results(name: str, result: Any, layouts: Any, entered: Sequence[tuple[Layout, Shape]]) -> Any:
    if isinstance(result, (tuple, list)):
        if not isinstance(layouts, (tuple, list)) or len(layouts) != len(result):
            raise ValueError(f"{name} returned {len(result)} values, but its layouts are {layouts}")
        return type(result)(
            _distribute_results(name, item, layout, entered) for item, layout in zip(result, layouts, strict=True)
        )
    if layouts is None or not _platform.is_tensor(result):
        return result
    if not isinstance(layouts, Layout):
        raise TypeError(f"{name}: the layout of a result must be a Layout, got {layouts!r}")
    shape = _global_shape(tuple(result.shape), layouts, entered)
    if shape is None:
        return DTensor.from_local(result, layouts.mesh, layouts, run_check=True)
    return DTensor.from_local(result, layouts.mesh, layouts, shape=shape)


def _global_shape(local: Shape, layout: Layout, entered: Sequence[tuple[Layout, Shape]]) -> Shape | None:
    """The shape of a result, where the inputs tell it: a dim cut like one dim of the inputs is as long as that one.

    What it depends on is the same on every rank, so that all ranks ask each other for their sizes, or none does.
    """
    shape = []
    for size, axes in zip(local, layout.shard_axes, strict=True):
        like = {
            total for given, sizes in entered for total, cut in zip(sizes, given.shard_axes, strict=True) if cut == axes
        }
        if axes and len(like) != 1:
            return None
        shape.append(like.pop() if axes else size)
    return tuple(shape)
