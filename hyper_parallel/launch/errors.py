"""What a rank died of, in its own words: a file with time, host, step and traceback, written by its excepthook."""

from __future__ import annotations

import json
import os
import runpy
import socket
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType

from hyper_parallel.launch.notes import FOLDER_VARIABLE, own_step

__all__ = ["RankError", "error_path", "read_error", "report_errors"]

# Another rank was there and is gone, or does not answer: what it died of is the cause.
_ECHOES = {"CommunicationError", "PeerLost", "ConnectionError", "DistError"}
_STARTERS = (str(Path(__file__).with_name("rank.py")), "<frozen runpy>", runpy.__file__)


@dataclass(frozen=True)
class RankError:
    """An exception that ended a rank."""

    time: float
    rank: int
    host: str
    step: int | None
    error: str  # the exception in one line
    traceback: str
    is_echo: bool  # it says that another rank is gone


def error_path(folder: Path, rank: int) -> Path:
    """The file in which a rank leaves its error."""
    return folder / f"error-{rank}.json"


def read_error(path: Path) -> RankError | None:
    """The error that a rank left; None if it left none, or half of one."""
    try:
        return RankError(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def report_errors() -> None:
    """Let an exception that nobody catches be written down, where a launcher asks for it."""
    if (
        FOLDER_VARIABLE not in os.environ
        or "RANK" not in os.environ
        or getattr(sys.excepthook, "reports_errors", False)
    ):
        return
    shown_before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        with suppress(Exception):  # The error itself must be shown, whatever happens to the report.
            _write(error)
        shown_before(kind, error, trace)

    hook.reports_errors = True  # type: ignore[attr-defined]
    sys.excepthook = hook


def _write(error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt) or threading.current_thread() is not threading.main_thread():
        return
    rank = int(os.environ["RANK"])
    path = error_path(Path(os.environ[FOLDER_VARIABLE]), rank)
    report = RankError(
        time=time.time(),
        rank=rank,
        host=socket.gethostname(),
        step=own_step(),
        error="".join(traceback.format_exception_only(error)).strip(),
        traceback="".join(traceback.format_exception(type(error), error, _of_the_user(error.__traceback__))),
        is_echo=_is_echo(error),
    )
    aside = path.with_suffix(".partial")
    aside.write_text(json.dumps(asdict(report)), encoding="utf-8")
    aside.replace(path)


def _of_the_user(trace: TracebackType | None) -> TracebackType | None:
    """Without the frames that only start the user's code."""
    inner = trace
    while inner is not None and inner.tb_frame.f_code.co_filename in _STARTERS:
        inner = inner.tb_next
    return inner or trace


def _is_echo(error: BaseException | None) -> bool:
    return error is not None and (
        any(kind.__name__ in _ECHOES for kind in type(error).__mro__) or _is_echo(error.__cause__)
    )
