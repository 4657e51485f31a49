"""The dispatcher: every operator that meets a DTensor comes through :func:`dispatch`.

Note [The hot path]
One look-up: the function, the layouts and global shapes of its tensors, and the other arguments that matter, to what
must be done. Layouts are interned, so they are compared by identity; nothing is copied and no layout arithmetic is
done. The first call of a kind finds, in this order: a handler of our own; a rule, of whose legal shardings the
cheapest is taken; the function's own body, where it is written in Python; and for everything else the way that is
always right, by gathering.

Note [Keys]
A *short* key, in ``_direct``, is quick to make and covers calls without keywords:

    (x)                 (func, layout, shape)
    (x, y)              (func, layout, shape, layout, shape)
    (x, y, z)           (func, layout, layout, layout, (shape, shape, shape))
    (x, 2.0)            (func, layout, shape, float)                  if the plan does not depend on the number
    (x, (1, 2:3, ...))  (func, layout, shape, tuple, 1, slice, 2, 3, None, Ellipsis [, dtype])

A *full* key, in ``_calls``, is made of all arguments in order and covers every call: layout and shape of a DTensor;
kind, length and items of a list or tuple; slice and its bounds; kind (and value, if it is exceptional) of a number that
the plan does not depend on; kind and ndim of a plain tensor; kind and value of anything else; the names of keywords
before their values; and at the end the dtypes of the DTensors, where the plan depends on them. Whether it depends on
numbers and dtypes is among the function's :class:`OperatorFacts`.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.skip_dispatch import is_skipped, skipping
from hyper_parallel.core.shard import rules
from hyper_parallel.core.shard.dispatching import autograd_helpers
from hyper_parallel.core.shard.dispatching.foreach import run_on_lists, takes_lists
from hyper_parallel.core.shard.dispatching.gather_fallback import run_gathered, write_into_plain
from hyper_parallel.core.shard.dispatching.mixing import (
    MixedMeshesError,
    MixedTensorsError,
    PartialWriteError,
    PlainScalarError,
    finish_sum_in_place,
    on_one_mesh,
    plain_as_replicated,
    replicating,
)
from hyper_parallel.core.shard.dispatching.order_guard import OrderGuard, check_made_inside, on_change_of_guard
from hyper_parallel.core.shard.dispatching.plan_call import PlannedCall, plan_call
from hyper_parallel.core.shard.dispatching.random_ops import RANDOM_BODIES, RANDOM_OPS
from hyper_parallel.core.shard.dispatching.special_ops import SPECIAL_OPS
from hyper_parallel.core.shard.rule_kit.rule_table import (
    EXCEPTIONAL_NUMBERS,
    depends_on_dtypes,
    find_rule,
    ignores_scalars,
)
from hyper_parallel.platform import get_platform

_platform = get_platform()
_MAX_CALLS = 65536

Handler = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


class OperatorFacts:
    """What is known of a function, whatever it is called with."""

    __slots__ = ("handler", "inplace_at", "is_bookkeeping", "key_has_dtypes", "key_ignores_numbers", "writes_first")

    def __init__(
        self,
        handler: Handler | None,
        *,
        is_bookkeeping: bool = False,
        key_ignores_numbers: bool = False,
        key_has_dtypes: bool = False,
        inplace_at: int | None = None,
        writes_first: bool = False,
    ) -> None:
        self.handler = handler  # None: by a rule
        self.is_bookkeeping = is_bookkeeping  # about the graph or the tensor object, not about values
        self.key_ignores_numbers = key_ignores_numbers
        self.key_has_dtypes = key_has_dtypes
        self.inplace_at = inplace_at  # where `inplace` is among the arguments, for all to find it by name
        self.writes_first = writes_first  # into its first argument


_facts: dict[Callable[..., Any], OperatorFacts] = {}
_calls: dict[tuple[Any, ...], PlannedCall | None] = {}
_direct: dict[Any, Handler] = {}  # how to run calls of up to three tensors, by a key that is quick to make
_plans_are_under: OrderGuard | None = None
_set_aside: dict[OrderGuard | None, Any] = {}  # both tables, by the guard that they were made under
_MAX_GUARDS = 16
_lock = threading.Lock()
_NO_KEYWORDS: dict[str, Any] = {}
_BOUNDS = frozenset({int, type(None)})


def dispatch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What ``func`` gives when some of its arguments are DTensors."""
    return intercept(DTensor, func, (), args, kwargs)


def intercept(kind: type, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """:func:`dispatch` as the framework calls it, one Python call less."""
    if skipping.exceptions and is_skipped(func) and _platform.graph_function(func) is None:
        return _platform.call_on_blocks(func, args, kwargs or {})
    short: tuple[Any, ...] | None = None
    if not kwargs:
        if len(args) == 2:
            first, second = args
            if type(first) is DTensor:
                if type(second) is DTensor:
                    short = (func, first._layout, first._global_shape, second._layout, second._global_shape)
                elif type(second) is float:
                    facts = _facts.get(func)
                    if facts is not None and facts.key_ignores_numbers and second not in EXCEPTIONAL_NUMBERS:
                        short = (func, first._layout, first._global_shape, float)
                elif type(second) is tuple:
                    short = _key_of_entries(func, first, second)
        elif len(args) == 1:
            if type(args[0]) is DTensor:
                short = (func, args[0]._layout, args[0]._global_shape)
        elif len(args) == 3:
            first, second, third = args
            if type(first) is DTensor and type(second) is DTensor and type(third) is DTensor:
                shapes = (first._global_shape, second._global_shape, third._global_shape)
                short = (func, first._layout, second._layout, third._layout, shapes)
        run = _direct.get(short)
        if run is not None:
            return run(func, args, _NO_KEYWORDS)
        kwargs = {}
    try:
        facts = _facts[func]
    except KeyError:
        facts = _facts[func] = _find_facts(func)
    place = facts.inplace_at
    if place is not None and len(args) > place:
        args, kwargs = args[:place], {**kwargs, "inplace": bool(args[place])}
    if (replicating.depth or replicating.alike_on is not None) and not facts.is_bookkeeping:
        if replicating.depth and _plans_are_under is not None:
            check_made_inside(_platform.get_op_name(func), args, kwargs)
        if facts.writes_first and replicating.depth and _is_plain(args):
            return write_into_plain(func, args, kwargs)
        args, kwargs = plain_as_replicated(args, kwargs)
    if len(kwargs) > 1:
        kwargs = _in_order(func, kwargs)
    if facts.handler is not None:
        try:
            return facts.handler(func, args, kwargs)
        except MixedMeshesError as error:
            return facts.handler(func, *on_one_mesh(args, kwargs, error))
    try:
        planned = _find_plan(func, facts, args, kwargs)
    except MixedMeshesError as error:
        return intercept(kind, func, types, *on_one_mesh(args, kwargs, error))
    except PlainScalarError:
        return intercept(kind, func, types, *plain_as_replicated(args, kwargs, scalars=True))
    except PartialWriteError:
        if not _finish_own_sum(func, args, kwargs):
            raise
        planned = _find_plan(func, facts, args, kwargs)
        short = None
    if planned is None:
        return _without_rule(func, args, kwargs)
    if short is not None and (not facts.key_has_dtypes or type(args[-1]) is tuple):
        _remember(_direct, short, planned.run)
    return planned.run(func, args, kwargs)


def _is_plain(args: tuple[Any, ...]) -> bool:
    """Whether the first argument is a plain tensor."""
    return bool(args) and not isinstance(args[0], DTensor) and _platform.is_dense_tensor(args[0])


def _key_of_entries(func: Callable[..., Any], tensor: DTensor, entries: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The key of ``tensor[entries]`` and its like, where all entries are numbers, ranges, ``None`` or ``...``."""
    key: list[Any] = [func, tensor._layout, tensor._global_shape, tuple]
    for entry in entries:
        kind = type(entry)
        if kind is slice:
            start, stop, step = entry.start, entry.stop, entry.step
            if type(start) not in _BOUNDS or type(stop) not in _BOUNDS or type(step) not in _BOUNDS:
                return None
            key += (slice, start, stop, step)
        elif kind is int or entry is None or entry is Ellipsis:
            key.append(entry)
        else:
            return None
    facts = _facts.get(func)
    if facts is None:
        return None
    if facts.key_has_dtypes:
        key.append(tensor.dtype)
    return tuple(key)


def _in_order(func: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords in the order of the function's arguments, where several are tensors: rules count tensors."""
    if sum(isinstance(value, DTensor) for value in kwargs.values()) < 2:
        return kwargs
    places = {name: place for place, name in enumerate(_platform.argument_names(func))}
    return {name: kwargs[name] for name in sorted(kwargs, key=lambda name: places.get(name, len(places)))}


def _find_plan(
    func: Callable[..., Any], facts: OperatorFacts, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> PlannedCall | None:
    key: list[Any] = [func]
    numbers = not facts.key_ignores_numbers
    for value in args:
        kind = type(value)
        if kind is DTensor:
            key.append(value._layout)
            key.append(value._global_shape)
        elif kind is int and numbers:
            key.append(value)
        else:
            _add_to_key(key, value, numbers)
    for name, value in kwargs.items():
        key.append(name)
        _add_to_key(key, value, numbers)
    if facts.key_has_dtypes:
        _add_dtypes(key, (args, *kwargs.values()))
    try:
        return _calls[tuple(key)]
    except KeyError:
        planned = plan_call(func, args, kwargs)
        _remember(_calls, tuple(key), planned)
        return planned
    except TypeError:  # an argument that cannot be hashed
        return plan_call(func, args, kwargs)


def _finish_own_sum(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Do the pending sum of the tensor that ``func`` is about to write into, where nobody else can see it.

    ``x.mean(0).clamp_(min=eps)`` is common in the framework's own optimizers, ``F.relu(x, inplace=True)`` in models:
    the tensor was made a moment ago. Where another tensor shares the memory, or a gradient is recorded, the write is
    an error.
    """
    tensor = args[0] if args else None
    if not isinstance(tensor, DTensor):
        return False
    if kwargs.get("inplace") is True:
        return finish_sum_in_place(tensor)
    is_write = _platform.get_op_name(func).endswith("_")
    return is_write and not tensor.requires_grad and finish_sum_in_place(tensor)


def _remember(table: dict[Any, Any], key: Any, value: Any) -> None:
    with _lock:
        if len(table) >= _MAX_CALLS:
            table.clear()
        table[key] = value


def forget_plans() -> None:
    """Plans hold what a rank does at its place in a mesh, which may be another one in the next world."""
    with _lock:
        _calls.clear()
        _direct.clear()
        _set_aside.clear()


def _plan_under(guard: OrderGuard | None) -> None:
    """Plans that were made under another guard are set aside: whether a call may be made depends on it."""
    global _calls, _direct, _plans_are_under
    with _lock:
        if len(_set_aside) >= _MAX_GUARDS:
            _set_aside.clear()
        _set_aside[_plans_are_under] = (_calls, _direct)
        _calls, _direct = _set_aside.pop(guard, None) or ({}, {})
        _plans_are_under = guard


def _add_to_key(key: list[Any], value: Any, numbers: bool) -> None:
    kind = type(value)
    if isinstance(value, DTensor):
        key.append(value._layout)
        key.append(value._global_shape)
    elif kind is list or kind is tuple:
        key.append(kind)
        key.append(len(value))
        for item in value:
            _add_to_key(key, item, numbers)
    elif kind is slice:
        bounds: tuple[Any, ...] = (value.start, value.stop, value.step)
        for bound in bounds:
            if bound is not None and type(bound) is not int:
                bounds = tuple(None if bound is None else operator.index(bound) for bound in bounds)
                break
        key.append(slice)
        key += bounds
    elif not numbers and (kind is float or kind is int):
        key.append(kind)
        if value in EXCEPTIONAL_NUMBERS:
            key.append(value)
    elif kind is int:
        key.append(value)
    elif _platform.is_tensor(value):
        if value.ndim == 0 and _platform.needs_grad(value):
            raise PlainScalarError
        key.append((kind, value.ndim))
    else:
        key.append(kind)
        key.append(value)


def _add_dtypes(key: list[Any], value: Any) -> None:
    if isinstance(value, DTensor):
        key.append(value.dtype)
    elif type(value) is tuple or type(value) is list:
        for item in value:
            _add_dtypes(key, item)


def _find_facts(func: Callable[..., Any]) -> OperatorFacts:
    about_graph = _platform.graph_function(func)
    if about_graph is not None:
        return OperatorFacts(lambda func, args, kwargs: about_graph(*args, **kwargs), is_bookkeeping=True)
    if _platform.is_framework_service(func):
        return OperatorFacts(_run_service, is_bookkeeping=True)
    name = _platform.get_op_name(func)
    body = _platform.body_of(func)
    inplace_at = None
    if body is not None and "inplace" in _platform.argument_names(func):
        inplace_at = _platform.argument_names(func).index("inplace")
    handler: Handler = _without_rule
    writes_first = name == "setitem" or (name.endswith("_") and not name.endswith("__"))
    if name in RANDOM_OPS and (body is None or name in RANDOM_BODIES):
        handler = functools.partial(_draw, RANDOM_OPS[name])
    elif takes_lists(name):
        handler = run_on_lists
    elif name in SPECIAL_OPS:
        handler = SPECIAL_OPS[name]
    elif find_rule(name, func) is not None:
        return OperatorFacts(
            None,
            key_ignores_numbers=ignores_scalars(name),
            key_has_dtypes=depends_on_dtypes(name),
            inplace_at=inplace_at,
            writes_first=writes_first,
        )
    return OperatorFacts(handler, inplace_at=inplace_at, writes_first=writes_first)


def _draw(
    random_op: Callable[..., Any], func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Values by global index; complex ones, which have none, are drawn on the whole."""
    dtype = kwargs.get("dtype") or (args[0].dtype if args else None)
    if dtype is not None and _platform.dtype_name(dtype).startswith("complex"):
        return run_gathered(func, args, kwargs)
    return random_op(*args, **kwargs)


def _run_service(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Bookkeeping of the framework that is the same for a block as for a plain tensor."""
    return _platform.without_interception(func, *args, **kwargs)


def _without_rule(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    body = _platform.body_of(func)
    if body is None or func in _running.bodies:
        return run_gathered(func, args, kwargs)
    _running.bodies.append(func)
    try:
        return body(*args, **kwargs)
    except (MixedTensorsError, PartialWriteError):  # the body makes plain tensors, or writes into a pending sum
        return run_gathered(func, args, kwargs)
    finally:
        _running.bodies.pop()


class _Running(threading.local):
    """The functions whose bodies this thread is running; one that comes up again has led back to itself."""

    def __init__(self) -> None:
        self.bodies: list[Callable[..., Any]] = []


_running = _Running()


rules.load()
on_change_of_guard(_plan_under)
_platform.set_function_handler(autograd_helpers.run_function)
_platform.set_dispatcher(intercept)
_platform.on_leaving(forget_plans)
_platform.exclude_from_compile(DTensor)
