"""``torch.compile`` and distributed tensors: what meets one runs as it is, and is not compiled.

Note [No graph of blocks]
The compiler reads a tensor's own data, which for a distributed tensor is a block, and would trace the dispatcher until
the stack is full. So it is told which types not to trace and that the packages which deal with them are not to be
looked into, when ``torch.compile`` is called first: the compiler is a large import that programs without it should not
pay for. The reference models are plain code and compile as any other. The names are those of its configuration and of
its list of code to leave alone, which has no public name.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import sys
from typing import Any

import torch

_kinds: set[type] = set()
_plain_compile = torch.compile


def exclude_from_compile(kind: type) -> None:
    """Let compiled code run operators on tensors of ``kind`` as if it were not compiled."""
    _kinds.add(kind)
    keep_compiler_out()


def keep_compiler_out() -> None:
    """Let compiled code call this library's functions as they are, instead of tracing them."""
    if torch.compile is _plain_compile:
        torch.compile = _compile  # type: ignore[assignment]
    if "torch._dynamo" in sys.modules:  # something may have been compiled already
        _tell_compiler()


def _tell_compiler() -> None:
    from torch import _dynamo

    _dynamo.config.nontraceable_tensor_subclasses.update(_kinds)  # there may be more than the last time
    for package in _packages():
        if package not in _told:
            _told.add(package)
            _dynamo.trace_rules.add(package)


_told: set[str] = set()


@functools.cache
def _packages() -> list[str]:
    """The core, and modules and packages of the platform but for ``torch.traced``, which compiled code looks into."""
    ours = importlib.import_module("hyper_parallel.platform.torch")
    above = importlib.import_module("hyper_parallel.platform")
    inner = [f"{ours.__name__}.{found.name}" for found in pkgutil.iter_modules(ours.__path__) if found.name != "traced"]
    outer = [f"{above.__name__}.{found.name}" for found in pkgutil.iter_modules(above.__path__)]
    return [
        "hyper_parallel.core",
        *inner,
        *(name for name in outer if name.rpartition(".")[2] not in ("torch", "mindspore")),
    ]


@functools.wraps(_plain_compile)
def _compile(*args: Any, **kwargs: Any) -> Any:
    _tell_compiler()
    return _plain_compile(*args, **kwargs)
