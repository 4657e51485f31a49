"""Hooks inside of a module that a tape would leave out: those of users, which may do more than compute."""

from __future__ import annotations

from typing import Any

from hyper_parallel.platform import get_platform

_platform = get_platform()


def find_foreign_hook(module: Any) -> str | None:
    """Why a hook of the module, or of one inside, is in the way; None where all hooks are this library's own.

    The library's compute with distributed tensors, which is recorded. A user's hook may keep values, print or count: it
    would run once, while the module is recorded, and never again.
    """
    for path, inner in _platform.get_cells_and_names(module):
        obstacle = _platform.obstacle_in(inner)
        if obstacle is not None:
            return f"{path or 'the module itself'} {obstacle}"
        for hook in _platform.hooks_of(inner):
            home = getattr(getattr(hook, "func", hook), "__module__", None) or type(hook).__module__
            if not str(home).startswith("hyper_parallel."):
                name = getattr(hook, "__qualname__", type(hook).__name__)
                return f"the hook {name} of {path or 'the module itself'} would not run: remove it, or lower less"
    return None
