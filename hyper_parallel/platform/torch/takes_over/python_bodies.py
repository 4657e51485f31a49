"""Running the body of a PyTorch function that is written in Python, as if nobody had asked whether to intercept it.

Note [Bodies without the question]
``F.normalize`` and its like begin with ``if has_torch_function(...): return handle_torch_function(...)``, which led to
the dispatcher. Called again they would lead there again; with interception switched off the operators inside would not
be seen either. So the dispatcher runs a twin: the same code object with globals in which the question is answered no.
What the body calls is looked up as ever, and asks its own question.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import torch

from hyper_parallel.platform.torch.takes_over.multi_head_attention import with_heads_apart


def _no(*args: Any) -> bool:
    return False


class _NoOverrides:
    """Stands in for the module ``torch.overrides`` where a body reaches the question through it."""

    def __init__(self, overrides: Any) -> None:
        self._overrides = overrides

    def __getattr__(self, name: str) -> Any:
        return _no if name.startswith("has_torch_function") else getattr(self._overrides, name)


class _Torch:
    """Stands in for the module ``torch`` where a body asks through ``torch.overrides``."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.overrides = _NoOverrides(torch.overrides)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


@functools.cache
def body_of(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """The twin of a Python-written function that does not ask to be intercepted; None for a C function.

    What the function delegates to (functions in its closure, private functions of its module) gets twins too: there the
    question is often asked in the name of the public function, which would lead back here for ever.
    """
    func = getattr(func, "__wrapped__", func)
    if not isinstance(func, FunctionType):
        return None
    twin = _twin(func, {})
    return with_heads_apart(twin) if func is torch.nn.functional.multi_head_attention_forward else twin


def _twin(func: FunctionType, made: dict[FunctionType, FunctionType]) -> FunctionType:
    names = dict(func.__globals__)
    for name in names:
        if name.startswith("has_torch_function"):
            names[name] = _no
    if "overrides" in func.__code__.co_names and "torch" in names:
        names["torch"] = _Torch(names["torch"])
    cells = tuple(CellType(cell.cell_contents) for cell in func.__closure__ or ())
    twin = made[func] = FunctionType(func.__code__, names, func.__name__, func.__defaults__, cells)
    twin.__kwdefaults__ = func.__kwdefaults__
    for name in func.__code__.co_names:
        helper = names.get(name)
        if name.startswith("_") and isinstance(helper, FunctionType) and helper.__module__ == func.__module__:
            names[name] = made.get(helper) or _twin(helper, made)
    for cell in cells:
        helper = cell.cell_contents
        if isinstance(helper, FunctionType):
            cell.cell_contents = made.get(helper) or _twin(helper, made)
    return twin
