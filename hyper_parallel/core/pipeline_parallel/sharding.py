"""A pass: when the weights of fully sharded stages are gathered and let go, and when their gradients are reduced."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from hyper_parallel.core.pipeline_parallel.action import Action, Kind
from hyper_parallel.core.pipeline_parallel.table import Table

_LAST = (Kind.B, Kind.W)


def add_sharding(table: Table, keep: int | None = None, reduce_each: bool = False) -> Table:
    """UNSHARD one action ahead of use, REDUCE behind the last weight gradient of a stage, RESHARD behind that.

    With ``keep`` at most so many stages of a rank are gathered at a time: the one that is used last again is let go.
    With ``reduce_each`` every microbatch is reduced by itself: less memory for gradients, more bytes sent.
    """
    if keep is not None and keep < 1:
        raise ValueError(f"keep is {keep}; at least the stage that computes must be gathered: give 1 or more, or None")
    if any(action.kind in (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE) for _, _, action in table):
        raise ValueError(f"table {table.name} has UNSHARD, RESHARD or REDUCE already; add them once")
    rows = tuple(tuple(_row(actions, keep, reduce_each)) for actions in table.actions)
    return replace(table, actions=rows)


def _row(actions: tuple[Action, ...], keep: int | None, reduce_each: bool) -> list[Action]:
    uses: dict[int, deque[int]] = {}
    last: dict[int, int] = {}
    for line, action in enumerate(actions):
        for step in action.steps if action.is_computed else ():
            uses.setdefault(step.stage, deque()).append(line)
            last[step.stage] = line
    whole: list[int] = []
    row: list[Action] = []
    behind: list[Action] = []
    for line, action in enumerate(actions):
        steps = action.steps if action.is_computed else ()
        wanted = list(dict.fromkeys(step.stage for step in steps))
        for stage in wanted:
            while uses[stage] and uses[stage][0] <= line:
                uses[stage].popleft()
        if action.is_computed:  # Behind the messages of the computation before: others wait for them.
            row += behind
            behind = []
        if keep is not None and len(wanted) > keep:
            raise ValueError(f"keep is {keep}, but {action} computes {len(wanted)} stages at once; give {len(wanted)}")
        for stage in [one for one in wanted if one not in whole]:
            idle = [one for one in whole if one not in wanted]
            if keep is not None and len(whole) >= keep and idle:
                gone = max(idle, key=lambda one: uses[one][0])
                whole.remove(gone)
                row.append(Action(Kind.RESHARD, gone))
            whole.append(stage)
            _one_ahead(row, Action(Kind.UNSHARD, stage), keep)
        row.append(action)
        for step in steps:
            if reduce_each and step.kind in _LAST:
                behind.append(Action(Kind.REDUCE, step.stage, step.microbatch))
        for stage in wanted:
            if last[stage] == line:
                if not reduce_each and any(step.kind in _LAST for step in steps if step.stage == stage):
                    behind.append(Action(Kind.REDUCE, stage))
                whole.remove(stage)
                behind.append(Action(Kind.RESHARD, stage))
    return row + behind


def _one_ahead(row: list[Action], unshard: Action, keep: int | None) -> None:
    """Before the last computation in the row, so that the gather runs beside it; behind it where room is short."""
    place = len(row)
    while place and not row[place - 1].is_computed and row[place - 1].kind is not Kind.RESHARD:
        place -= 1
    if place and row[place - 1].is_computed and keep is None:
        place -= 1
    row.insert(place, unshard)
