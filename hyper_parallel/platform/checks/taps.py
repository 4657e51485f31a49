"""Functions whose calls somebody may want to see as a whole: the recorder of a program, or what compiles one.

While nobody does, they cost a call one look at a variable of the thread.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


class Tap(Protocol):
    """Who sees the calls."""

    def line(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of a function that is one line."""

    def aside(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that need not be repeated: the lines around it see to it."""

    def outside(self, what: str) -> None:
        """Something happens that is right inside of a line only."""


class _Tapped(threading.local):
    tap: Tap | None = None


tapped = _Tapped()


_traceable: set[Callable[..., Any]] = set()


def is_traceable(function: Callable[..., Any]) -> bool:
    """Whether a function that is one line can be an operator of a compiled graph: it computes and sends only."""
    return function in _traceable


def one_operator(function: Function) -> Function:
    """:func:`one_line` for a function of one tensor that gives another one, and can be an operator of a graph."""
    _traceable.add(function)
    return one_line(function)


def one_line(function: Function) -> Function:
    """A function that is one line of a recorded program, with all that it computes, reads and sends."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        tap = tapped.tap
        return function(*args, **kwargs) if tap is None else tap.line(function, args, kwargs)

    return call  # type: ignore[return-value]


def no_line(function: Function) -> Function:
    """A function that a recorded program does not repeat: what its lines call does the same."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        tap = tapped.tap
        return function(*args, **kwargs) if tap is None else tap.aside(function, args, kwargs)

    return call  # type: ignore[return-value]


def inside_of_lines(what: str) -> None:
    """Tell whoever records that ``what`` happens; outside of a line it cannot be repeated."""
    if tapped.tap is not None:
        tapped.tap.outside(what)


@contextmanager
def tapped_by(tap: Tap | None) -> Iterator[None]:
    """Inside, ``tap`` sees the calls of this thread; None: nobody does."""
    before, tapped.tap = tapped.tap, tap
    try:
        yield
    finally:
        tapped.tap = before
