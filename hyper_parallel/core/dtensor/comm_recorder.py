"""Seeing communication: every collective inside a ``with CommRecorder()`` block, with who asked for it and why."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.membership import belongs_to_rank


@dataclass(frozen=True)
class CommRecord:
    """One collective as this rank saw it."""

    op: str
    ranks: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int  # of this rank's input
    sent_bytes: int  # what this rank puts on the wire, for a ring or pairwise algorithm
    async_op: bool
    asked_by: str  # "explicit", "implicit for <op>", "backward of ..."
    chosen: str = ""  # of an operator that moved its inputs: how, and why so


class _Asking(threading.local):
    def __init__(self) -> None:
        self.reasons: list[tuple[str, str]] = []  # who, and what it chose


_asking = _Asking()
_num_recording = 0


def _set_num_recording(number: int) -> None:
    global _num_recording
    _num_recording = number


belongs_to_rank(lambda: _num_recording, _set_num_recording)


def is_recording() -> bool:
    """Whether any recorder is active in this process."""
    return _num_recording > 0


@contextmanager
def asked_by(reason: str, chosen: str = "") -> Iterator[None]:
    """Collectives inside are recorded as asked for by ``reason``; the outermost reason of a thread counts."""
    _asking.reasons.append((reason, chosen))
    try:
        yield
    finally:
        _asking.reasons.pop()


def note_choice(chosen: str) -> None:
    """Let what is recorded from here on, until the outermost reason ends, say what was chosen."""
    if _num_recording and _asking.reasons:
        _asking.reasons[0] = (_asking.reasons[0][0], chosen)


def attributed(reason: str, function: Callable[..., Any], *args: Any, chosen: Callable[[], str] | None = None) -> Any:
    """Call ``function(*args)``; a :class:`CommRecorder` files its collectives under ``reason``."""
    if not _num_recording:
        return function(*args)
    with asked_by(reason, "" if chosen is None else chosen()):
        return function(*args)


class CommRecorder:
    """Records every collective and message of tensors of this process; barriers and objects are not recorded.

    >>> with CommRecorder() as recorder:
    ...     pass
    >>> recorder.records, recorder.total_bytes
    ([], 0)
    """

    def __init__(self) -> None:
        self.records: list[CommRecord] = []
        self._stop: Callable[[], None] | None = None

    def __enter__(self) -> CommRecorder:
        global _num_recording
        if self._stop is not None:
            raise RuntimeError("this CommRecorder is recording already; use another one for a nested block")
        self._stop = get_platform().observe_collectives(self._record)
        _num_recording += 1
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _num_recording
        assert self._stop is not None
        self._stop()
        self._stop = None
        _num_recording -= 1

    def _record(self, op: str, ranks: list[int], shape: Any, dtype: str, num_bytes: int, async_op: bool) -> None:
        if not dtype:
            return
        reason, chosen = _asking.reasons[0] if _asking.reasons else ("explicit", "")
        sent = sent_bytes(op, num_bytes, len(ranks))
        what = (op, tuple(ranks), tuple(shape), dtype, num_bytes, sent, async_op)
        self.records.append(CommRecord(*what, reason, chosen))

    @property
    def total_bytes(self) -> int:
        """Bytes that this rank put on the wire."""
        return sum(record.sent_bytes for record in self.records)

    @property
    def counts(self) -> dict[str, int]:
        """How often each collective was called."""
        return dict(Counter(record.op for record in self.records))

    def as_data(self) -> list[dict[str, Any]]:
        """The records as plain dicts."""
        return [asdict(record) for record in self.records]

    def table(self) -> str:
        """The records as a text table."""
        rows = [("op", "ranks", "shape", "dtype", "bytes sent", "asked by")]
        rows += [
            (
                r.op,
                ",".join(map(str, r.ranks)),
                "x".join(map(str, r.shape)) or "-",
                r.dtype,
                str(r.sent_bytes),
                f"{r.asked_by}: {r.chosen}" if r.chosen else r.asked_by,
            )
            for r in self.records
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([*lines, f"{len(self.records)} collectives, {self.total_bytes} bytes sent by this rank"])

    def __str__(self) -> str:
        return self.table()


def sent_bytes(op: str, num_bytes: int, group_size: int) -> int:
    """What a rank sends when its input has ``num_bytes``; messages to peers send all of theirs.

    >>> sent_bytes("all_reduce", 400, 4), sent_bytes("all_gather_into_tensor", 100, 4)
    (600, 300)
    """
    others = group_size - 1
    if op == "all_gather_into_tensor":
        return num_bytes * others
    if op == "all_reduce":
        return 2 * num_bytes * others // group_size
    if op == "reduce_scatter_tensor":
        return num_bytes * others // group_size
    return 0 if op == "irecv" else num_bytes
