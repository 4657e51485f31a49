"""Schedules as pure functions: ranks and microbatches in, a table of computations out; :func:`make_table` by name."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable

from hyper_parallel.core.pipeline_parallel.table import Table
from hyper_parallel.core.pipeline_parallel.tables.dual_pipe import dual_pipe_v
from hyper_parallel.core.pipeline_parallel.tables.looped import interleaved, looped_bfs, zb1p
from hyper_parallel.core.pipeline_parallel.tables.plain import forward_only, gpipe, one_f_one_b
from hyper_parallel.core.pipeline_parallel.tables.v_shaped import v_half, v_min, zbv
from hyper_parallel.core.pipeline_parallel.tables.zero_bubble import zb_h1, zb_h2

SCHEDULES: dict[str, Callable[..., Table]] = {
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved": interleaved,
    "looped_bfs": looped_bfs,
    "zb_h1": zb_h1,
    "zb_h2": zb_h2,
    "zb1p": zb1p,
    "zbv": zbv,
    "v_half": v_half,
    "v_min": v_min,
    "dual_pipe_v": dual_pipe_v,
}

__all__ = ["SCHEDULES", "forward_only", "make_table", "schedule_name"]


def make_table(schedule: str, ranks: int, microbatches: int, stages_per_rank: int | None = None) -> Table:
    """The computations of a schedule by its name; dashes, dots and case do not matter.

    >>> make_table("1F1B", ranks=2, microbatches=2).actions[0]
    (0F0, 0F1, 0B0, 0B1)
    """
    function = SCHEDULES[schedule_name(schedule)]
    if "stages_per_rank" in inspect.signature(function).parameters:
        return function(ranks, microbatches, 2 if stages_per_rank is None else stages_per_rank)
    table = function(ranks, microbatches)
    if stages_per_rank not in (None, table.stages.stages_per_rank):
        raise ValueError(
            f"{table.name} has {table.stages.stages_per_rank} stages per rank, not {stages_per_rank}; interleaved, "
            "looped_bfs and zb1p take any number"
        )
    return table


def schedule_name(given: str) -> str:
    """The name of a schedule as it is in ``SCHEDULES``; an error for one that there is not."""
    if not isinstance(given, str):
        raise TypeError(f"a schedule is a name or a Table, got a {type(given).__name__}: {given!r}")
    plain = {_plain(name): name for name in SCHEDULES}
    if _plain(given) not in plain:
        near = difflib.get_close_matches(_plain(given), plain, 1)
        hint = f"; did you mean {plain[near[0]]}?" if near else ""
        raise ValueError(f"there is no schedule {given!r}; there are {', '.join(SCHEDULES)}{hint}")
    return plain[_plain(given)]


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
