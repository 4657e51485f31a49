"""Seeing all that a cell does while it is recorded.

Note [What is a line on MindSpore]
Where a distributed tensor is given, the dispatcher calls an operator of the rule table on blocks: that call is the line
(``result_wrapper``), and autograd functions and collectives are lines. Where only plain tensors are given, the
outermost call of a function, method or primitive of MindSpore is one (``watched.py``). An operator that arrived at
``__fallback__`` is an object that can be called once: the line calls the primitive of its name.

Note [What is not seen]
A kernel that runs while no line does came by another way. ``MsDispatchMode`` shows most of them, and the call is
refused. What it does not show either made a tensor that has no name on the tape, which is refused where it is used; and
all ways to values on the host are methods of tensors, which are looked at.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import mindspore as ms
from mindspore import Tensor, ops

from hyper_parallel.platform.checks.taps import tapped_by
from hyper_parallel.platform.contract.collectives import Collectives
from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.communication import collectives
from hyper_parallel.platform.mindspore.communication.groups import ProcessGroup
from hyper_parallel.platform.mindspore.dtensor import local_calls
from hyper_parallel.platform.mindspore.dtensor.tensor_type import DTensorBase, has_dtensor, local_alias
from hyper_parallel.platform.mindspore.lowering import watched
from hyper_parallel.platform.mindspore.mends.empty_blocks import results_of_nothing
from hyper_parallel.platform.mindspore.takes_over import autograd_functions
from hyper_parallel.platform.mindspore.takes_over.translation import PassedOn
from hyper_parallel.platform.mindspore.takes_over.whole_functions import WholeFunction

__all__ = ["is_framework_constant", "known_as", "recording_calls"]

_CONSTANTS = (private_api.DtypeClass, ProcessGroup, ops.Primitive, WholeFunction)


def is_framework_constant(value: Any) -> bool:
    """Whether a value of MindSpore's own types stands for itself: a dtype, a group, a primitive, a function of its."""
    return isinstance(value, _CONSTANTS) or watched.is_library_function(value)


def known_as(tensor: Any) -> Any:
    """The object that stands for a tensor while it is recorded: of a distributed one, its block."""
    return local_alias(tensor)


class _Recording(threading.local):
    recorder: Any = None
    memories: frozenset[int] = frozenset()  # of what must not be written to


_recording = _Recording()
_lock = threading.Lock()
_num_recording = 0
_places: list[Any] = []


@contextmanager
def recording_calls(recorder: Any, platform: Any, inputs: list[Any]) -> Iterator[None]:
    """Inside, ``recorder`` is told of what this thread calls; ``inputs`` are what must not be written to."""
    before, _recording.recorder = _recording.recorder, recorder
    _recording.memories = frozenset(one.data_ptr() for one in map(local_alias, inputs))
    _look_at_calls(platform, +1)
    try:
        with tapped_by(recorder), _RunningKernels(recorder):
            yield
    finally:
        _look_at_calls(platform, -1)
        _recording.recorder = before


def _look_at_calls(platform: Any, step: int) -> None:
    """What is called looks for a recorder while any thread has one."""
    global _num_recording
    with _lock:
        before, _num_recording = _num_recording, _num_recording + step
        if not before:
            _places.extend(watched.replace_all(_seen_call, _seen_read))
            autograd_functions.set_applying(_apply)
            local_calls.set_calling(_on_blocks)
            for name in _collectives():
                vars(platform)[name] = _seen_collective(getattr(platform, name))
        elif not _num_recording:
            for name in _collectives():
                del vars(platform)[name]
            local_calls.set_calling(None)
            autograd_functions.set_applying(None)
            watched.put_back(_places)
            _places.clear()


def _writing() -> Any:
    recorder = _recording.recorder
    return recorder if recorder is not None and recorder.writes else None


# ---------------------------------------------------------------- plain tensors


def _seen_call(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    is_primitive, may_write, draws = name == "primitive", watched.writes(name), watched.draws(name)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = _writing()
        if recorder is None or has_dtensor(args) or (kwargs and has_dtensor(kwargs.values())):
            return function(*args, **kwargs)
        if name in ("__eq__", "__ne__") and not isinstance(args[1], (Tensor, int, float, complex)):
            return function(*args, **kwargs)
        called, given, title = function, args, name
        if is_primitive:
            called, given, title = args[0], args[1:], args[0].name
            if watched.asks(title):
                return function(*args, **kwargs)
        stays = draws or (is_primitive and watched.draws(title))
        if may_write or (is_primitive and watched.writes(title)):
            stays = True
            _check_write(recorder, title, given)
        if title in ("requires_grad_", "register_hook"):
            recorder.refuse(f"{title} is called on a tensor inside: do it where the tensor is made")
        if not _tensors_among((given, kwargs)):
            result = recorder.aside(called, given, kwargs)
            if not _tensors_among(result):
                return result  # as of what asks for a setting
            return recorder.record(called, given, kwargs, stays=stays, run=lambda *a, **k: result)
        return recorder.record(called, given, kwargs, stays=stays)

    return call


def _check_write(recorder: Any, name: str, given: tuple[Any, ...]) -> None:
    if given and isinstance(given[0], Tensor) and given[0].data_ptr() in _recording.memories:
        recorder.refuse(f"{name} writes into an input, a parameter or a buffer of the module")


def _seen_read(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = _writing()
        if recorder is not None:
            recorder.refuse(
                f"{name} gives values, which are no tensor: the program reads them, and may do otherwise on others"
            )
        return function(*args, **kwargs)

    return call


def _tensors_among(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        return False
    return any(map(_tensors_among, value))


class _RunningKernels(ms.MsDispatchMode):
    """Kernels that run; see Note [What is not seen]."""

    def __init__(self, recorder: Any) -> None:
        super().__init__()
        self._recorder = recorder

    def __ms_dispatch__(self, func: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._recorder.writes:
            self._recorder.refuse(
                f"{func.name} runs where no function of MindSpore was called that a recording sees: call it by its "
                "name in mint or ops"
            )
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------- blocks, autograd functions, collectives


def _on_blocks(func: Any, instead: Any, blocks: list[Any], named: dict[str, Any], shapes: Any) -> Any:
    """The innermost step of the dispatcher; ``shapes``: of the results, where they are without elements."""
    recorder = _writing()
    if recorder is None or not (blocks or named):  # a rule's own program: its calls are the lines
        return local_calls.call_operator(func, instead, blocks, named, shapes)
    again = _called_again(instead or func)
    if again is None:
        recorder.refuse(
            f"{func.__name__} arrives in a form that can be called once only: call it by its name in mint or ops"
        )
        return local_calls.call_operator(func, instead, blocks, named, shapes)
    name = getattr(func, "__name__", "")
    if watched.writes(name):
        _check_write(recorder, name, tuple(blocks))
    if shapes is not None:
        return recorder.record(results_of_nothing, (again, blocks, named, shapes), {})
    return recorder.record(again, tuple(blocks), named, stays=watched.writes(name))


def _called_again(func: Any) -> Any:
    """A function that does what ``func`` does, each time it is called; None where there is none."""
    if not isinstance(func, PassedOn):
        return func
    call = func.call
    primitive = getattr(call, "primitive", None)
    if primitive is not None:
        return primitive
    return call if hasattr(call, "__code__") else private_api.primitive(call)


def _apply(function: type, *args: Any, **kwargs: Any) -> Any:
    own = _own_apply(function)
    recorder = _writing()
    if recorder is None:
        return own(*args, **kwargs)
    if any(isinstance(value, DTensorBase) for value in args):
        recorder.refuse(f"the autograd function {function.__name__} is given distributed tensors, as whole ones")
        return own(*args, **kwargs)
    return recorder.record(own, args, kwargs, stays=True)


def apply(function: type, *args: Any, **kwargs: Any) -> Any:
    return autograd_functions.own_apply(function, *args, **kwargs)


@functools.cache
def _own_apply(function: type) -> Callable[..., Any]:
    """``function.apply`` as MindSpore has it, the same object each time."""
    return MethodType(apply, function)


@functools.cache
def _collectives() -> tuple[str, ...]:
    return tuple(name for name in Collectives.__abstractmethods__ if callable(getattr(collectives, name, None)))


def _seen_collective(collective: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(collective)
    def call(*args: Any, **kwargs: Any) -> Any:
        recorder = _writing()
        if recorder is None or not _tensors_among((args, kwargs)):
            return collective(*args, **kwargs)
        return recorder.record(collective, args, kwargs, stays=True)

    return call
