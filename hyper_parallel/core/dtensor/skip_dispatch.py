"""Running operators on local blocks as if they were plain tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Any

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.membership import followed_by_threads


class _Skipping(threading.local):
    def __init__(self) -> None:
        self.exceptions: list[frozenset[str]] = []  # innermost last: the operators that are dispatched all the same


skipping = followed_by_threads(_Skipping())


class SkipDTensorDispatch:
    """Inside, operators see the local blocks of DTensors, except those named in ``no_skip`` (functions or their names).

    Holds for its own thread only, and nests: the innermost decides.
    """

    def __init__(self, no_skip: Iterable[str | Callable[..., Any]] | None = None) -> None:
        if isinstance(no_skip, str) or callable(no_skip):
            no_skip = [no_skip]
        name_of = get_platform().get_op_name
        self._no_skip = frozenset(op if isinstance(op, str) else name_of(op) for op in no_skip or ())

    def __enter__(self) -> SkipDTensorDispatch:
        skipping.exceptions.append(self._no_skip)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc_val: BaseException | None, exc_tb: TracebackType | None
    ) -> None:
        skipping.exceptions.pop()


def is_skipped(func: Callable[..., Any] | str) -> bool:
    """Whether ``func`` (or the operator of that name) runs on the local blocks right now."""
    if not skipping.exceptions:
        return False
    exceptions = skipping.exceptions[-1]
    return not exceptions or (func if isinstance(func, str) else get_platform().get_op_name(func)) not in exceptions
