"""A rank's half of stopping: signals and a limit of time set a flag, which the training loop looks at.

Note [All ranks stop at the same step]
A signal reaches ranks at different moments, perhaps one of them only. A rank that left alone would leave the others
waiting for it. So a rank only says that it was asked (``flag``, a number that rides on a sum the loop has anyway), and
all leave at the step at which the sum is not zero (``heard``).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

__all__ = ["STOPPED_CODES", "StopRequest"]

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_INTERRUPTED, _TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM
STOPPED_CODES = (_INTERRUPTED, _TERMINATED)  # saved and left because it was asked to, not because it was done


class StopRequest:
    """Whether this rank was asked to stop: by SIGTERM, SIGINT, SIGUSR1, or because ``after`` seconds have passed.

    A context: signals are caught inside of it. A second SIGINT ends the process at once.

    >>> with StopRequest(after=3600) as stop:
    ...     stop.flag, stop.reason
    (0.0, None)
    """

    def __init__(self, *, after: float | None = None) -> None:
        self._end = None if after is None else time.monotonic() + after
        self._after = after
        self._signal: int | None = None
        self._heard = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError(
                "StopRequest catches signals, which only the main thread of a process can; enter it there"
            )
        for number in _SIGNALS:
            self._before[number] = signal.signal(number, self._catch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    @property
    def reason(self) -> str | None:
        """Why this rank is to stop; None: it is not."""
        if self._signal is not None:
            return signal.Signals(self._signal).name
        if self._end is not None and time.monotonic() >= self._end:
            return f"the limit of {self._after:g} s"
        return "a request to another rank" if self._heard else None

    @property
    def flag(self) -> float:
        """1 if this rank was asked to stop, 0 if not: to be summed over all ranks."""
        return 0.0 if self.reason is None else 1.0

    def heard(self, total: float) -> bool:
        """Whether all ranks stop now, by the sum of their flags. See Note [All ranks stop at the same step]."""
        self._heard = self._heard or total > 0
        return total > 0

    @property
    def exit_code(self) -> int:
        """With which status a process ends that has stopped: 130 after Ctrl-C, 143 otherwise; 0 if it was not asked."""
        if self.reason is None:
            return 0
        return _INTERRUPTED if self._signal == signal.SIGINT else _TERMINATED

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if number == self._signal == signal.SIGINT:
            os._exit(_INTERRUPTED)
        if self._signal is None:
            self._signal = number
