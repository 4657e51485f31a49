"""Attention that draws only where it drops: compiled code sees through to PyTorch's function where it does not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


def dropping(theirs: Callable[..., Any], addressed: Callable[..., Any]) -> Callable[..., Any]:
    """``addressed`` where the call has a probability of dropping, else ``theirs``."""

    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not (args[4] if len(args) > 4 else kwargs.get("dropout_p")):
            return theirs(*args, **kwargs)
        return addressed(*args, **kwargs)

    return call
