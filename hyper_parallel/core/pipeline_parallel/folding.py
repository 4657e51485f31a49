"""Passes that join neighbours: I and W of one microbatch to B, a backward and the next forward to run at once, and
messages between the same two ranks to one batch."""

from __future__ import annotations

from dataclasses import replace

from hyper_parallel.core.pipeline_parallel.action import SENDS, Action, Kind, receiving, sending
from hyper_parallel.core.pipeline_parallel.order import partner_of
from hyper_parallel.core.pipeline_parallel.table import Table


def fold_backward(table: Table, everywhere: bool = False) -> Table:
    """I directly before W of the same stage and microbatch becomes B, which is one pass over the graph instead of two.

    The gradient of the input is then ready behind W only, so only stage 0, whose input has none, is folded; with
    ``everywhere`` all are, and the stage before waits longer.
    """
    return _with_rows(table, [_folded(actions, everywhere) for actions in table.actions])


def _folded(actions: tuple[Action, ...], everywhere: bool) -> list[Action]:
    row: list[Action] = []
    for action in actions:
        last = row[-1] if row else None
        same = last is not None and (last.stage, last.microbatch) == (action.stage, action.microbatch)
        if (
            same
            and last is not None
            and (last.kind, action.kind) == (Kind.I, Kind.W)
            and (everywhere or not action.stage)
        ):
            row[-1] = Action(Kind.B, action.stage, action.microbatch)
        else:
            row.append(action)
    return row


def overlap_neighbours(table: Table) -> Table:
    """A backward and the forward behind it run at once where they are of two stages; a W between them comes later."""
    return _with_rows(table, [_overlapped(actions) for actions in table.actions])


def _overlapped(actions: tuple[Action, ...]) -> list[Action]:
    row: list[Action] = []
    for action in actions:
        weights = row.pop() if len(row) > 1 and row[-1].kind is Kind.W and action.kind is Kind.F else None
        last = row[-1] if row else None
        joins = last is not None and last.kind in (Kind.B, Kind.I) and last.stage != action.stage
        if joins and last is not None and action.kind is Kind.F:
            row[-1] = Action.overlap(last, action)
            row += [] if weights is None else [weights]
        else:
            row += [action] if weights is None else [weights, action]
    return row


def batch_messages(table: Table) -> Table:
    """Messages that are neighbours on both of their ranks become one batch, on both ends alike.

    Communication libraries match a batch with a batch only, so which messages share one is the table's to say.
    """
    rows = [list(actions) for actions in table.actions]
    for rank in range(table.num_ranks):
        line = 0
        while line + 1 < len(rows[rank]):
            one, other = rows[rank][line], rows[rank][line + 1]
            if not _may_join(table, one, other, rank):
                line += 1
                continue
            partner = rows[partner_of(table, one, rank)]
            mirrored = [_mirrored(one), _mirrored(other)]
            place = partner.index(mirrored[0]) if mirrored[0] in partner else len(partner)
            if partner[place : place + 2] != mirrored:
                line += 1
                continue
            rows[rank][line : line + 2] = [Action.overlap(*one.steps, *other.steps)]
            partner[place : place + 2] = [Action.overlap(*mirrored[0].steps, *mirrored[1].steps)]
    return _with_rows(table, rows)


def _may_join(table: Table, one: Action, other: Action, rank: int) -> bool:
    return one.is_message and other.is_message and partner_of(table, one, rank) == partner_of(table, other, rank)


def _mirrored(action: Action) -> Action:
    ends = tuple((receiving if step.kind in SENDS else sending)(step.value) for step in action.steps)
    return Action.overlap(*ends) if action.parts else ends[0]


def _with_rows(table: Table, rows: list[list[Action]]) -> Table:
    return replace(table, actions=tuple(map(tuple, rows)))
