"""Eras of a world: how ranks stay together when a backward fails on one of them.

Note [A backward that fails on one rank]
    A hook that raises on one rank leaves out the collectives behind it, for which the others wait; and if the error is
    caught, the next collective of that rank would meet an earlier one of theirs. So a rank whose backward fails tells
    the others, and from then on its messages belong to another era, numbered by the backward. Whoever waits for what it
    has not sent before raises with its rank and its error. Ranks that fail in the same backward, by themselves or
    because of another one, are in the same era again and may go on together. A rank that fails because of another one
    outside of a backward cannot know how far the others are: it tells them that it is lost, and stays so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

_SIZE = 1 << 36  # more than the collectives of a group in an era, and than any tag
_LOST = -1  # the era of a rank that cannot go on with the others


class Eras:
    """The eras that this rank has been in; ``tell(era, why)`` tells the other ranks about a new one."""

    def __init__(self, tell: Callable[[int, str], None]) -> None:
        self._tell = tell
        self._own = [0]
        self._is_in_backward = False
        self._num_backwards = 0
        self.why_lost: str | None = None

    def number(self, number: int) -> int:
        """``number``, of a collective or a message, in the present era."""
        return self._own[-1] * _SIZE + number

    def may_come(self, number: int, era: int) -> bool:
        """Whether a rank that is in ``era`` may still send the message: it has not left the era of the number."""
        wanted = (number + _SIZE // 2) // _SIZE
        return era in self._own[: self._own.index(wanted) + 1]

    @contextlib.contextmanager
    def backward(self, communicates: Callable[[], bool]) -> Iterator[None]:
        """Around a backward. It fails for all, unless it does not communicate, which is asked when it has failed."""
        if self._is_in_backward:  # one inside of another one, as in recompute
            yield
            return
        self._num_backwards += 1
        self._is_in_backward = True
        try:
            yield
        except Exception as error:
            if communicates():
                self._begin(self._num_backwards, f"{type(error).__name__}: {error}")
            raise
        finally:
            self._is_in_backward = False

    def another_failed(self, error: str) -> None:
        """This rank raises ``error`` since another one has failed."""
        if not self._is_in_backward:
            self.why_lost = error
            self._begin(_LOST, error)

    def _begin(self, era: int, why: str) -> None:
        self._own.append(era)
        self._tell(era, why)
