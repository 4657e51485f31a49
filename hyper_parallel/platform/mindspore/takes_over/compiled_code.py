"""Compiled code (``mindspore.jit``, GRAPH_MODE) that meets distributed tensors: an error, or an optimizer.

MindSpore's compiler takes a DTensor for its local tensor, without asking anybody, so that a program would be run on
each rank's part with no communication and give plain tensors: silently wrong. What is compiled is a call of a jitted
function or, in GRAPH_MODE, of a cell. Before they run, their arguments and parameters are looked at here, and what they
use from enclosing scopes. MindSpore's optimizers are jitted too: on local tensors they are right, being computed
element by element, except for those that use norms or means of a full parameter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mindspore import nn
from mindspore.experimental import optim

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.dtensor.tensor_type import is_distributed

_OPTIMIZERS = ("mindspore.nn.optim.", "mindspore.experimental.optim.")
_OF_FULL_PARAMETERS = ("adafactor", "adasum", "lamb", "lars", "thor")  # the files of those optimizers


def refuse_distributed_tensors() -> None:
    """Look at every call of compiled code from now on."""
    compiler = private_api.Compiler
    _before(compiler.executor, "_predict", lambda self, *args, **named: _check(self.fn, (self.obj, args, named)))
    _before(nn.Cell, "_predict", lambda self, *args, **named: _check(type(self), (self, args, named)))
    _before(compiler.tracing, "_jit_trace_begin", lambda name, *args, **_: _check(name, args))
    _before(compiler.capturing, "PreJit", lambda args, named: _check("a function", (args, named)))
    _before(compiler.capturing.PIJitCaptureContext, "__enter__", lambda self: _check(self.fn, _scope(self.fn)))
    compiler.parsing.resolve_symbol = _checking_scope(compiler.parsing.resolve_symbol)
    for owner, name in ((compiler.executor, "__call__"), (nn.Cell, "compile_and_run")):
        setattr(owner, name, _recording_after_errors(getattr(owner, name)))


def _recording_after_errors(plain: Callable[..., Any]) -> Callable[..., Any]:
    """MindSpore stops recording when code cannot be compiled."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return plain(*args, **kwargs)
        except Exception:
            private_api.start_recording()
            raise

    return call


def _before(owner: Any, name: str, look: Callable[..., None]) -> None:
    """Let ``look`` be called with the arguments of ``owner.name`` before that is."""
    plain = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        look(*args, **kwargs)
        return plain(*args, **kwargs)

    setattr(owner, name, call)


def _checking_scope(plain: Callable[..., Any]) -> Callable[..., Any]:
    """The compiler's way to find what code uses by name."""

    def resolve_symbol(namespace: Any, symbol: str) -> Any:
        found = plain(namespace, symbol)
        is_tensor = is_distributed(found)
        if is_tensor or isinstance(found, (list, tuple, dict)):
            owner = namespace.dicts[0]
            if not isinstance(owner, (nn.Optimizer, optim.Optimizer)):
                _check(f"code that uses {symbol!r}", found)
        return found

    return resolve_symbol


def _scope(function: Any) -> list[Any]:
    """What a function finds in enclosing scopes."""
    names = function.__code__.co_names
    found = [function.__globals__[name] for name in names if name in function.__globals__]
    return [*found, *(cell.cell_contents for cell in function.__closure__ or ())]


def _check(code: Any, used: Any) -> None:
    if _has_distributed(used):
        _refuse(code)


def _has_distributed(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_distributed, value))
    if isinstance(value, dict):
        return any(map(_has_distributed, value.values()))
    if isinstance(value, nn.Cell):
        return any(map(is_distributed, value.get_parameters()))
    return is_distributed(value)


def _refuse(code: Any) -> None:
    home = getattr(code, "__module__", "")
    if home.startswith(_OPTIMIZERS):
        if home.rpartition(".")[2] in _OF_FULL_PARAMETERS:
            raise RuntimeError(
                f"{home}: this optimizer needs norms or means of full parameters and is compiled by MindSpore, which "
                "sees this rank's local tensors only; use AdamW, Adam, SGD or another that computes element by element"
            )
        return
    raise RuntimeError(
        f"{getattr(code, '__qualname__', code)} is compiled (mindspore.jit or GRAPH_MODE) and meets distributed "
        "tensors: compiled code would take this rank's local tensor for the full one. Run it in PyNative mode: leave "
        "out jit, and mindspore.set_context(mode=mindspore.PYNATIVE_MODE); or compile functions of local tensors, "
        "which hyper_parallel.local_map calls"
    )
