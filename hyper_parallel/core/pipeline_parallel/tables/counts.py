"""How many ranks, stages and microbatches a schedule takes; what to write when it does not take them."""

from __future__ import annotations

from collections.abc import Callable

_FARTHEST = 100_000


class TooFewRows(ValueError):
    """A schedule cannot run on the rows of a batch; ``least``: the microbatches that it needs."""

    def __init__(self, schedule: str, ranks: int, least: int, rows: int) -> None:
        super().__init__(
            f"{schedule} on {ranks} ranks needs {least} microbatches or more, and the batch has {rows} "
            f"row{'s' * (rows != 1)} for them"
        )
        self.least = least


def demand_counts(schedule: str, **counts: int) -> None:
    """Refuse numbers below 1, and what is none."""
    for name, count in counts.items():
        if not isinstance(count, int) or isinstance(count, bool):
            raise TypeError(f"{schedule}: {name.replace('_', ' ')} is {count!r}; give a number such as 4")
        if count < 1:
            raise ValueError(f"{schedule}: {name.replace('_', ' ')} is {count}; give at least 1")


def _in_equal_rounds(ranks: int, count: int) -> bool:
    return count % max(1, count // ranks) == 0


def _fills_both_ends(ranks: int, count: int) -> bool:
    return count >= 2 * ranks


_ROUNDS = (_in_equal_rounds, "they go in rounds of equal size of at least {ranks}, the number of ranks")
_RULES: dict[str, tuple[Callable[[int, int], bool], str]] = {  # of schedules that do not take any number
    "interleaved": _ROUNDS,
    "zb1p": _ROUNDS,
    "dual_pipe_v": (_fills_both_ends, "{ranks} ranks must be filled from both ends with {both}"),
}


def takes_microbatches(schedule: str, ranks: int, count: int) -> bool:
    """Whether the schedule of this name, as it is in ``SCHEDULES``, takes so many microbatches on so many ranks."""
    return schedule not in _RULES or _RULES[schedule][0](ranks, count)


def refused_microbatches(schedule: str, ranks: int, count: int) -> str | None:
    """Why a schedule does not take so many microbatches, with the nearest numbers that work; None: it takes them.

    >>> refused_microbatches("interleaved", 4, 9)
    '9 microbatches do not work, they go in rounds of equal size of at least 4, the number of ranks; give 8 or 10'
    """
    if takes_microbatches(schedule, ranks, count):
        return None
    below = next((one for one in range(count - 1, 0, -1) if takes_microbatches(schedule, ranks, one)), None)
    above = next(one for one in range(count + 1, _FARTHEST) if takes_microbatches(schedule, ranks, one))
    nearest = " or ".join(str(one) for one in (below, above) if one is not None)
    why = _RULES[schedule][1].format(ranks=ranks, both=2 * ranks)
    return f"{count} microbatches do not work, {why}; give {nearest}"


def demand_microbatches(schedule: str, ranks: int, microbatches: int) -> None:
    """Refuse a number of microbatches, with the nearest ones that work."""
    refused = refused_microbatches(schedule, ranks, microbatches)
    if refused is not None:
        raise ValueError(f"{schedule}: {refused}")


def default_microbatches(schedule: str, ranks: int, rows: int | None = None) -> int:
    """How many microbatches a step has where nobody says it: twice as many as ranks, and at most its rows.

    A :class:`TooFewRows` where they are too few for the schedule.

    >>> default_microbatches("1f1b", ranks=4), default_microbatches("1f1b", ranks=4, rows=3)
    (8, 3)
    """
    most = 2 * ranks if rows is None else max(1, min(2 * ranks, rows))
    found = next((count for count in range(most, 0, -1) if takes_microbatches(schedule, ranks, count)), None)
    if found is not None:
        return found
    least = next(count for count in range(most, _FARTHEST) if takes_microbatches(schedule, ranks, count))
    raise TooFewRows(schedule, ranks, least, rows or 0)
