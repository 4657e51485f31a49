"""Operators on lists of tensors (``foreach``, fused optimizer steps): one dispatch for the whole list.

Note [Positions]
The tensors at one position of all lists belong together: a parameter, its gradient, its state. Where they lie alike,
which is the rule, nothing has to be looked up: the function runs once on the blocks of all positions. A position
whose tensors lie otherwise is brought together first, and what was written into a moved tensor is carried back. A
position may also hold plain tensors only; a plain tensor without dims (a step count) goes with everything.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.dispatching.grad_norm import global_norms
from hyper_parallel.core.shard.dispatching.mixing import refuse_plain, same_mesh
from hyper_parallel.platform import get_platform

_platform = get_platform()

_FOREACH, _UNSCALE = "_foreach_", "_amp_foreach_non_finite_check_and_unscale_"
_FUSED = frozenset({"_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_"})
_SUMS = frozenset({"sum", "avg"})
# Pending sums pass: when all operands are pending sums; when the other operand is a number; always.
_LINEAR_TOGETHER = frozenset({"add", "sub", "lerp", "copy"})
_LINEAR_BY_NUMBERS = frozenset({"mul", "div"})
_LINEAR = frozenset({"neg", "zero", "clone"})
# Not element by element: each position by itself.
_ONE_BY_ONE: dict[str, Callable[..., Any]] = {
    "max": lambda tensor: tensor.max(),
    "powsum": lambda tensor, order=2, dtype=None: tensor.abs().pow(order).sum(dtype=dtype),
    "mm": lambda first, second: first.mm(second),
}
_GRADIENTS = 1  # the list that a fused step reads only


def takes_lists(name: str) -> bool:
    """Whether ``name`` is an operator on lists of tensors."""
    return name.startswith(_FOREACH) or name in _FUSED or name == _UNSCALE


@functools.cache
def _names(func: Callable[..., Any]) -> tuple[str, str, bool]:
    """The operator's name, the part of it that names the computation, and whether it goes element by element."""
    name = _platform.get_op_name(func)
    base = name.removeprefix(_FOREACH).removesuffix("_")
    return name, base, base not in _ONE_BY_ONE and name != "_foreach_norm"


def run_on_lists(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator on lists gives when some of the tensors are DTensors."""
    name, base, by_element = _names(func)
    if not by_element:
        return _norms(*args, **kwargs) if name == "_foreach_norm" else _one_by_one(_ONE_BY_ONE[base], args, kwargs)
    columns = [value for value in args if _is_tensor_list(value)]
    if kwargs:
        columns += [value for value in kwargs.values() if _is_tensor_list(value)]
    if any(_platform.is_tensor(value) and _platform.needs_grad(value) for value in (*args, *kwargs.values())):
        return _one_by_one(_method(base, name), args, kwargs)  # one factor for all: its gradient adds up over the ranks
    written = columns[0]
    together = None
    labels = _common_labels(columns)
    if labels is None:
        together = _Together(name, base, columns, args, kwargs)
        if together.broadcasts:
            return _one_by_one(_method(base, name), args, kwargs)
        replacements = iter(together.columns)
        args = tuple(next(replacements) if _is_tensor_list(value) else value for value in args)
        kwargs = {key: next(replacements) if _is_tensor_list(value) else value for key, value in kwargs.items()}
        labels = _labels_of(together.columns)
    args, kwargs = _with_full_tensors(args, kwargs)
    result = _platform.without_interception(func, *args, **kwargs)
    if together is not None:
        together.carry_back()
    if name == _UNSCALE:
        _agree_on_found_inf(written, args[1])
    if result is None:
        return None
    return type(result)(written) if name.endswith("_") else _platform.label_all(DTensor, result, *labels)


def _is_tensor_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) > 0 and _platform.is_tensor(value[0])


Labels = tuple[list["Layout | None"], list[Any]]  # the layout and shape of each position, None where it is plain


def _common_labels(columns: Sequence[Sequence[Any]]) -> Labels | None:
    """The layouts and shapes of the positions; None unless the tensors of every position lie alike, nothing pending."""
    first, *rest = columns
    if {type(tensor) for column in columns for tensor in column} == {DTensor}:  # the rule: no loop of our own
        layouts, shapes = [tensor._layout for tensor in first], [tensor._global_shape for tensor in first]
        for column in rest:
            if [tensor._layout for tensor in column] != layouts or [
                tensor._global_shape for tensor in column
            ] != shapes:
                return None
        return None if any(layout.has_partial for layout in set(layouts)) else (layouts, shapes)
    return _common_labels_of_mixture(columns)


def _common_labels_of_mixture(columns: Sequence[Sequence[Any]]) -> Labels | None:
    """As :func:`_common_labels`, for lists in which some tensors are plain."""
    layouts: list[Layout | None] = []
    shapes: list[Any] = []
    for position in zip(*columns, strict=True):
        layout, shape, has_plain = None, None, False
        for tensor in position:
            if type(tensor) is DTensor:
                if layout is None:
                    layout, shape = tensor._layout, tensor._global_shape
                elif tensor._layout is not layout or tensor._global_shape != shape:
                    return None
            elif isinstance(tensor, DTensor):
                return None
            elif tensor.ndim:
                has_plain = True
        if layout is not None and has_plain:
            return None
        layouts.append(layout)
        shapes.append(shape)
    return None if any(layout is not None and layout.has_partial for layout in set(layouts)) else (layouts, shapes)


def _labels_of(columns: Sequence[Sequence[Any]]) -> Labels:
    """The layout and shape of the first DTensor of each position."""
    found = [
        next(((t._layout, t._global_shape) for t in position if isinstance(t, DTensor)), (None, None))
        for position in zip(*columns, strict=True)
    ]
    return [layout for layout, _ in found], [shape for _, shape in found]


def _with_full_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with distributed tensors outside lists (a clipping factor) whole."""

    def full(value: Any) -> Any:
        if isinstance(value, DTensor) and not value._layout.is_replicated:
            return value.redistribute(value.device_mesh, value._layout.replicated())
        return value

    if not any(isinstance(value, DTensor) for value in (*args, *kwargs.values())):
        return args, kwargs
    return tuple(map(full, args)), {key: full(value) for key, value in kwargs.items()}


def _has_no_zero(value: Any) -> bool:
    """Whether a number, or all of a list, is known not to be zero."""
    numbers = value if isinstance(value, (list, tuple)) else [value]
    return all(isinstance(number, (int, float, complex)) and number != 0 for number in numbers)


class _Together:
    """Lists in which every position was brought to one layout."""

    def __init__(
        self, name: str, base: str, columns: Sequence[Sequence[Any]], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.name = name
        self.broadcasts = False
        self._base = base
        self._writes = name.endswith("_")
        self._moved: list[tuple[DTensor, DTensor]] = []  # (the tensor that is to be written, what was written instead)
        # See Note [inf - inf].
        self._may_be_infinite = base == "div" and not all(map(_has_no_zero, (*args[1:], *kwargs.values())))
        self._has_number = any(not _is_tensor_list(value) for value in (*args[1:], *kwargs.values()))
        positions = [self._bring_together(position) for position in zip(*columns, strict=True)]
        self.columns = [list(column) for column in zip(*positions, strict=True)]

    def _bring_together(self, position: tuple[Any, ...]) -> tuple[Any, ...]:
        distributed = [tensor._completed() for tensor in position if isinstance(tensor, DTensor)]
        if not distributed:
            return position
        mesh = None
        for tensor in position:
            if isinstance(tensor, DTensor):
                mesh = same_mesh(self.name, mesh, tensor)
            else:
                refuse_plain(self.name, tensor)
        if any(tensor._global_shape != distributed[0]._global_shape for tensor in distributed):
            self.broadcasts = True
            return position
        target = self._target(distributed)
        return tuple(
            self._move(tensor, target, number) if isinstance(tensor, DTensor) else tensor
            for number, tensor in enumerate(position)
        )

    def _target(self, tensors: list[DTensor]) -> Layout:
        first = tensors[0]._layout
        if not any(tensor._layout.has_partial for tensor in tensors) or self._keeps_sums(tensors):
            return first
        if self._writes and first.has_partial and self._base != "zero":
            raise RuntimeError(
                f"{self.name} cannot write into a tensor under {first}: a partial value only passes through linear "
                f"operators: call reduce_partial() first, or use {self.name.rstrip('_')}, which makes new tensors"
            )
        return first if not first.has_partial else first.reduced()

    def _keeps_sums(self, tensors: list[DTensor]) -> bool:
        first = tensors[0]._layout
        if self._base in _LINEAR:
            return all(op is None or op in _SUMS for op in first.partials) or self._base != "neg"
        if any(tensor._layout is not first for tensor in tensors) or not set(first.partials) <= {None, *_SUMS}:
            return False
        if self._base == "lerp":
            return len(tensors) == 2
        if self._base == "copy" and tensors[0].dtype != tensors[1].dtype:
            return False  # the parts of a sum do not round as the sum does
        if self._base in _LINEAR_TOGETHER:
            return len(tensors) == 2 and (not self._has_number or self._base in ("add", "sub"))
        return self._base in _LINEAR_BY_NUMBERS and len(tensors) == 1 and not self._may_be_infinite

    def _move(self, tensor: DTensor, target: Layout, number: int) -> DTensor:
        if tensor._layout is target:
            return tensor
        moved = tensor.redistribute(target.mesh, target)
        is_written = number == 0 if self.name.startswith(_FOREACH) else number != _GRADIENTS
        if self._writes and is_written:
            self._moved.append((tensor, moved))
        return moved

    def carry_back(self) -> None:
        """Write into the tensors that were moved what was written into their stand-ins."""
        with _platform.no_grad():
            for tensor, moved in self._moved:
                tensor.copy_(moved)


def _one_by_one(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``function`` of the tensors of each position; numbers that are not in lists are the same for all."""
    count = next(len(value) for value in (*args, *kwargs.values()) if _is_tensor_list(value))

    def at(value: Any, index: int) -> Any:
        return value[index] if isinstance(value, (list, tuple)) else value

    results = [
        function(*(at(value, index) for value in args), **{key: at(value, index) for key, value in kwargs.items()})
        for index in range(count)
    ]
    return tuple(results)


def _method(base: str, name: str) -> Callable[..., Any]:
    """The operator on single tensors."""
    in_place = "_" if name.endswith("_") else ""

    def call(first: Any, *rest: Any, **kwargs: Any) -> Any:
        if not _platform.is_tensor(first):  # a number to the power of each tensor
            return rest[0].__rpow__(first)
        if base in ("addcmul", "addcdiv") and len(rest) > 2:
            rest, kwargs = rest[:2], {"value": rest[2], **kwargs}
        scalars = kwargs.pop("scalars", None)
        if scalars is not None:
            kwargs["value" if base in ("addcmul", "addcdiv") else "weight"] = scalars
        return getattr(first, base + in_place)(*rest, **kwargs)

    call.__name__ = base + in_place
    return call


def _norms(tensors: Sequence[Any], ord: float = 2, dtype: Any = None) -> tuple[Any, ...]:
    if any(_platform.needs_grad(tensor) for tensor in tensors):
        return tuple(tensor.norm(ord, dtype=dtype) for tensor in tensors)
    norms = global_norms(tensors, float(ord), dtype)
    return tuple(
        _platform.as_dtensor(DTensor, norm, Layout.of(tensor.device_mesh, ()), ())
        if isinstance(tensor, DTensor)
        else norm
        for tensor, norm in zip(tensors, norms, strict=True)
    )


def _agree_on_found_inf(gradients: Sequence[Any], found_inf: Any) -> None:
    """A step is left out by all ranks when any has found an infinity in its part of the gradients."""
    meshes = dict.fromkeys(tensor.device_mesh for tensor in gradients if isinstance(tensor, DTensor))
    block = _platform.detached(found_inf)
    for mesh in meshes:
        if mesh.get_coordinate() is not None:
            _platform.all_reduce(block, mesh.get_group(tuple(range(mesh.ndim))), op="max")


_platform.install_optimizer_steps(DTensor)
