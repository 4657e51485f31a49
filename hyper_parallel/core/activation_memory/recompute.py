"""Modules whose activations are computed again in backward instead of kept.

Note [Around the call]
The class of the module is replaced by a subclass that wraps ``__call__``, so that what runs again is a call of the
module as it was, with its hooks. Names and state dicts do not change. ``fully_shard`` comes behind it: what gathers the
parameters is then around what runs again, and not a part of it, which a selective policy would find changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.framework_of import require_module

_platform = get_platform()

_OPTIONS = "_hyper_parallel_recompute"
_kinds: dict[type, type] = {}
_kinds_lock = threading.Lock()


class Recomputed:
    """A module under :func:`recompute`. See Note [Around the call]."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        call = super().__call__  # type: ignore[misc]
        if not _platform.is_recording():
            return call(*args, **kwargs)
        return _platform.checkpoint(call, *args, **vars(self)[_OPTIONS], **kwargs)


def recompute(module: Any, context_fn: Callable[[], Any] | None = None) -> Any:
    """Compute the activations of ``module`` again in backward, in place; the module.

    Call it after styles were applied and before ``fully_shard``. ``context_fn`` makes it selective, see
    ``platform.create_selective_checkpoint_contexts``.

    forward: the module's, of which only inputs are kept; backward: its forward once more, then its backward.
    """
    require_module("recompute", module)
    if isinstance(module, Recomputed):
        raise ValueError(f"recompute: this {type(module).__name__} is computed again already; call it once on a module")
    kind = type(module)
    with _kinds_lock:
        if kind not in _kinds:
            _kinds[kind] = type(kind.__name__, (Recomputed, kind), {"__module__": kind.__module__})
    module.__class__ = _kinds[kind]
    object.__setattr__(module, _OPTIONS, {} if context_fn is None else {"context_fn": context_fn})
    return module
