"""Recorded programs as compiled code: AOTAutograd traces both passes without values, inductor compiles them.

Note [Communication in compiled code]
A redistribution or collective is one operator of ours in the graph, whose body is the function that dispatch calls: so
observers, checks of the ranks and the search for lost ones work as ever. Ranks must communicate in one order, and the
compiler is free to reorder what does not depend on each other: so each operator takes the result of the one before,
too, in forward and in backward. That is the order of dispatch, and one rank may run uncompiled what others compile.

Note [Compiled at the first call]
Tracing needs tensors and runs nothing; the compiled code then runs on the same tensors. So compiling costs no
communication of its own. Both get parameters as plain blocks: compiled code looks at shapes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hyper_parallel.platform.checks.taps import tapped_by
from hyper_parallel.platform.torch.base.dtensor_base import local_alias
from hyper_parallel.platform.torch.communication import collectives
from hyper_parallel.platform.torch.communication.collective_gradients import own_copy
from hyper_parallel.platform.torch.lowering.programs import ambient_key, facts_of
from hyper_parallel.platform.torch.private_api import (
    compile_both_passes,
    is_in_backward,
    is_without_values,
)

__all__ = ["compiled"]

Made = Callable[[torch.Tensor], torch.Tensor]

_table: list[tuple[Made, tuple[int, ...]]] = []  # what an operator does, and the shape of what it gives
_numbers: dict[Any, int] = {}
_lock = threading.Lock()

# Not by ``custom_op``: what it puts around a function costs as much as the call of a collective.
_operators = torch.library.Library("hyper_parallel", "DEF")
_operators.define("communicate(Tensor data, Tensor[] after, int number) -> Tensor")


@torch.library.impl(_operators, "communicate", "CompositeExplicitAutograd")
def _communicate(data: torch.Tensor, after: list[torch.Tensor], number: int) -> torch.Tensor:
    """Entry ``number`` of the table on ``data``; see Note [Communication in compiled code]."""
    result = _table[number][0](data)
    return result.clone() if _share(result, data) else result.contiguous()


@torch.library.register_fake("hyper_parallel::communicate", lib=_operators)
def _communicated(data: torch.Tensor, after: list[torch.Tensor], number: int) -> torch.Tensor:
    return data.new_empty(_table[number][1])


def _share(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() and one.numel() > 0


class _Tracer:
    """Puts operators in place of communication; a tap of ``platform/checks/taps.py``."""

    def __init__(self) -> None:
        self._last: dict[bool, torch.Tensor] = {}

    def begin(self) -> None:
        """The program is traced from its first line on; that happens more than once."""
        self._last.clear()

    def operator(self, key: Any, make: Callable[[], Made], shape: Sequence[int], data: torch.Tensor) -> torch.Tensor:
        with _lock:
            if key not in _numbers:
                _numbers[key] = len(_table)
                _table.append((make(), tuple(shape)))
            number = _numbers[key]
        phase = is_in_backward()
        before = [self._last[phase]] if phase in self._last else []
        result = torch.ops.hyper_parallel.communicate(data, before, number)
        self._last[phase] = result
        return result

    def line(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A redistribution ``(block, source, target, shape)``."""
        data, source, target, shape = args
        if source is target:
            return data
        inside = target.mesh.get_coordinate() is not None
        if source.mesh != target.mesh or not inside:
            raise RuntimeError("a redistribution between two meshes is not compiled")
        key = (function, source, target, tuple(shape), data.dtype)
        return self.operator(key, lambda: _moved(function, source, target, shape), target.local_shape(shape), data)

    def aside(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Checks that the lines' own functions make when they run."""
        return None

    def outside(self, what: str) -> None:
        raise RuntimeError(what)


def _moved(function: Callable[..., Any], source: Any, target: Any, shape: Any) -> Made:
    return lambda data: function(data, source, target, shape)


_tracing = threading.local()
_num_tracing = 0


@contextmanager
def _operators_instead() -> Iterator[_Tracer]:
    """Inside, collectives on tensors without values are operators of the graph that this thread traces."""
    global _num_tracing
    tracer = _tracing.tracer = _Tracer()
    with _lock:
        _num_tracing += 1
        if _num_tracing == 1:
            for name, form in _FORMS.items():
                setattr(collectives, name, form)
    try:
        with tapped_by(tracer):
            yield tracer
    finally:
        _tracing.tracer = None
        with _lock:
            _num_tracing -= 1
            if not _num_tracing:
                for name, own in _OWN.items():
                    setattr(collectives, name, own)


_OWN = {name: getattr(collectives, name) for name in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")}


def _all_reduce(data: torch.Tensor, group: Any, async_op: bool = False, op: str = "sum") -> Any:
    if not is_without_values(data):
        return _OWN["all_reduce"](data, group, async_op, op)

    def make() -> Made:
        return lambda one: _OWN["all_reduce"](own_copy(one), group, op=op)

    return _given("all_reduce", data, group, async_op, op, make, data.shape)


def _all_gather(data: torch.Tensor, group: Any, async_op: bool = False, *, out: Any = None) -> Any:
    if not is_without_values(data) or out is not None:
        return _OWN["all_gather_into_tensor"](data, group, async_op, out=out)

    def make() -> Made:
        return lambda one: _OWN["all_gather_into_tensor"](one, group)

    return _given("all_gather", data, group, async_op, "", make, (data.shape[0] * group.size(), *data.shape[1:]))


def _reduce_scatter(data: torch.Tensor, group: Any, async_op: bool = False, op: str = "sum", *, out: Any = None) -> Any:
    if not is_without_values(data) or out is not None:
        return _OWN["reduce_scatter_tensor"](data, group, async_op, op, out=out)

    def make() -> Made:
        return lambda one: _OWN["reduce_scatter_tensor"](one, group, op=op)

    return _given("reduce_scatter", data, group, async_op, op, make, (data.shape[0] // group.size(), *data.shape[1:]))


_FORMS = {
    "all_reduce": _all_reduce,
    "all_gather_into_tensor": _all_gather,
    "reduce_scatter_tensor": _reduce_scatter,
}


def _given(name: str, data: Any, group: Any, async_op: bool, op: str, make: Callable[[], Made], shape: Any) -> Any:
    if async_op:
        raise RuntimeError(f"a {name} that is waited for later is not compiled")
    return _tracing.tracer.operator((name, group, op, tuple(data.shape), data.dtype), make, shape, data)


class _Results(torch.autograd.Function):
    """The results of compiled code, whose backward makes zeros of gradients that never came: which did is noted."""

    @staticmethod
    def forward(ctx: Any, came: list[bool], *results: torch.Tensor) -> Any:
        ctx.came = came
        ctx.set_materialize_grads(False)
        return tuple(one.view_as(one) for one in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.came[:] = [one is not None for one in gradients]
        return None, *gradients


class _Inputs(torch.autograd.Function):
    """The inputs of compiled code: those that no gradient reached have none, as without the compiler."""

    @staticmethod
    def forward(ctx: Any, came: list[bool], reach: list[list[bool]], *inputs: torch.Tensor) -> Any:
        ctx.came, ctx.reach = came, reach
        return tuple(one.view_as(one) for one in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        came = [row for row, has_come in zip(ctx.reach, ctx.came, strict=True) if has_come]
        is_reached = [any(column) for column in zip(*came, strict=True)]
        return None, None, *[one if is_reached[place] else None for place, one in enumerate(gradients)]


def _where_gradients_came(code: Callable[..., Any], reach: list[list[bool]]) -> Callable[..., Any]:
    """``code`` with gradients for the inputs only that gradients of its results reach."""

    def run(*blocks: torch.Tensor) -> Any:
        came: list[bool] = []
        wanted = [place for place, one in enumerate(blocks) if one.requires_grad]
        if not torch.is_grad_enabled() or not wanted:
            return code(*blocks)
        given = list(blocks)
        rows = [[row[place] if place < len(row) else False for place in wanted] for row in reach]
        for place, one in zip(wanted, _Inputs.apply(came, rows, *[blocks[place] for place in wanted]), strict=True):
            given[place] = one
        results = list(code(*given))
        differentiable = [place for place, one in enumerate(results) if one.requires_grad]
        rows[:] = [rows[place] for place in differentiable]
        for place, one in zip(
            differentiable, _Results.apply(came, *[results[place] for place in differentiable]), strict=True
        ):
            results[place] = one
        return tuple(results)

    return run


def compiled(
    program: Callable[..., Any],
    failed: Callable[[str], Any],
    identity: Any,
    shared: dict[Any, Any],
    reach: list[list[bool]] | None = None,
) -> Callable[..., Any]:
    """A program as compiled code, made at its first call; where that fails, ``failed(why)`` is told.

    Programs of one ``identity`` that are called with tensors of the same facts have their code in common, in
    ``shared``. ``reach``: for each result which inputs its gradient reaches; None: all results the same.
    """
    ready: list[Callable[..., Any]] = []

    @functools.wraps(program)
    def run(*args: Any) -> Any:
        if ready:
            return ready[0](*args)
        key = (identity, *ambient_key(), *facts_of(args))
        if key in shared:
            ready.append(shared[key])
            return ready[0](*args)
        try:
            with _operators_instead() as tracer:

                def traced(*tensors: Any) -> Any:
                    tracer.begin()
                    return program(*tensors)

                code = compile_both_passes(traced, [local_alias(one) for one in args])
        except Exception as error:  # whatever a compiler finds wrong, the program is right as it is
            failed(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
            ready.append(program)
        else:
            inner = code if reach is None else _where_gradients_came(code, reach)
            ready.append(lambda *blocks: inner(*map(local_alias, blocks)))
            shared[key] = ready[0]
        return ready[0](*args)

    return run
