"""Which rank's death is the cause, and how it is told: that rank's traceback on top, the others in one line.

Note [The cause among the deaths]
When a rank dies, the others fail a moment later, of the broken connection. So all that die within a moment are looked
at together: a signal is a cause of its own, an exception may be one, an exception that says another rank is gone is an
echo. Among equals the first in time counts.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hyper_parallel.launch.errors import RankError, error_path, read_error
from hyper_parallel.launch.notes import notes_path, read_notes
from hyper_parallel.launch.processes import Rank, log_path
from hyper_parallel.launch.tail import last_lines

__all__ = ["Death", "RankFailure", "deaths_of", "how_ended", "tell"]

_MOST_LINES = 20  # of a log, for a rank that left no traceback


@dataclass(frozen=True)
class Death:
    """How one rank ended."""

    rank: int
    status: int
    time: float
    step: int | None
    error: RankError | None
    log_begin: int = 0  # where what it wrote begins in its log, behind earlier runs

    @property
    def is_echo(self) -> bool:
        """Whether it died because another rank was gone."""
        return self.error is not None and self.error.is_echo

    @property
    def order(self) -> tuple[int, float]:
        """The cause comes first. See Note [The cause among the deaths]."""
        kind = 2 if self.is_echo else 0 if self.status < 0 else 1
        return kind, self.time


class RankFailure(RuntimeError):
    """A rank died. ``deaths`` are in the order of cause; the message begins with the cause."""

    def __init__(self, message: str, deaths: Sequence[Death] = ()) -> None:
        super().__init__(message)
        self.deaths = list(deaths)


def how_ended(status: int) -> str:
    """A status of a process in words."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def deaths_of(ranks: Sequence[Rank], folder: Path) -> list[Death]:
    """The ranks that have ended badly, the cause first."""
    found = []
    for rank in ranks:
        status = rank.poll()
        if not status:
            continue
        error = read_error(error_path(folder, rank.rank))
        when = error.time if error is not None else rank.ended or 0.0
        step = read_notes(notes_path(folder, rank.rank)).step
        found.append(Death(rank.rank, status, when, step, error, rank.log_begin))
    return sorted(found, key=lambda death: death.order)


def tell(deaths: Sequence[Death], world_size: int, folder: Path, stubborn: Sequence[int] = ()) -> str:
    """The report of a failure."""
    cause, *echoes = deaths
    at_step = "" if cause.step is None else f" at step {cause.step}"
    host = cause.error.host if cause.error is not None else socket.gethostname()
    text = [f"rank {cause.rank} {how_ended(cause.status)}{at_step} on host {host}; the other ranks were stopped"]
    if cause.error is not None:
        text += cause.error.traceback.rstrip().splitlines()
    else:
        lines = last_lines(log_path(folder, cause.rank), _MOST_LINES, cause.log_begin)
        text += [f"  rank {cause.rank}: {line}" for line in lines]
    if world_size > 1:
        text.append(_the_rest(echoes, world_size, stubborn))
    text.append(f"logs: {folder}/rank-*.txt, of this one {log_path(folder, cause.rank)}")
    return "\n".join(text)


def _the_rest(echoes: Sequence[Death], world_size: int, stubborn: Sequence[int]) -> str:
    groups: dict[str, list[int]] = {}
    for death in echoes:
        words = "lost the connection" if death.is_echo else how_ended(death.status)
        groups.setdefault(words, []).append(death.rank)
    parts = [f"{_ranks(ranks)} {words}" for words, ranks in groups.items()]
    if stubborn:
        parts.append(f"{_ranks(stubborn)} did not end when asked and had to be killed")
    rest = world_size - 1 - len(echoes) - len(stubborn)
    if rest:
        parts.append(f"{rest} ended when asked" if parts else f"the other {rest} ended when asked")
    return "others: " + ", ".join(parts)


def _ranks(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, sorted(ranks)))
    return f"rank{'s' * (len(ranks) > 1)} {numbers}"
