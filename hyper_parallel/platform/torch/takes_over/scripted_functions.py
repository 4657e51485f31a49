"""Functions that TorchScript has compiled and that are given DTensors.

Note [Compiled code sees blocks]
The interpreter of TorchScript asks nobody: sizes and values inside of a compiled function would be those of this rank's
block, and its result a plain tensor, without any error. So its call is wrapped: given DTensors, ``torch.jit.script``'s
function runs as the Python that it was compiled from, operator by operator; one of ``torch.jit.trace``, whose
steps are fixed, and one that was loaded go to the dispatcher, which runs them on whole tensors.
"""

from __future__ import annotations

from typing import Any

import torch

from hyper_parallel.platform.torch.base.dtensor_base import DTensorBase
from hyper_parallel.platform.torch.private_api import is_intercepting

_plain_call: Any = torch.jit.ScriptFunction.__call__


def set_scripted_calls() -> None:
    """Let compiled functions take DTensors; twice is once."""
    torch.jit.ScriptFunction.__call__ = _call


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    for value in (*args, *kwargs.values()):
        members = value if isinstance(value, (list, tuple)) else (value,)
        found = next((one for one in members if isinstance(one, DTensorBase)), None)
        if found is not None and is_intercepting():
            source = _source_of(self)
            if source is not None:
                return source(*args, **kwargs)
            return torch.overrides.handle_torch_function(self, (found,), *args, **kwargs)
    return _plain_call(self, *args, **kwargs)


def _source_of(function: Any) -> Any:
    """What ``torch.jit.script`` compiled; None for a function that it did not."""
    source = getattr(function, "_torchdynamo_inline", None)
    compiled = None if source is None else torch.jit._state._try_get_jit_cached_function(source)
    return source if compiled is not None and compiled.qualified_name == function.qualified_name else None
