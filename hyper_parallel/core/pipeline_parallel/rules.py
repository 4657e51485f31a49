"""What must hold in the list of each rank, before any two ranks are looked at together.

Each computation once, on its own rank, F before I before W; each message once at each end, behind its computation and
before its use; weights gathered when they are used; gradients reduced once, behind the last of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from hyper_parallel.core.pipeline_parallel.action import MESSAGES, SENDS, Action, Kind, receiving, sending
from hyper_parallel.core.pipeline_parallel.faults import Fault, at, value_in_words
from hyper_parallel.core.pipeline_parallel.order import Place, partner_of
from hyper_parallel.core.pipeline_parallel.table import Table

_Seen = dict[Action, Place]


def faults_of_lists(table: Table) -> list[Fault]:
    """Everything that is wrong with single lists, or with what they have in common."""
    seen: _Seen = {}
    faults = [fault for rank, line, action in table for fault in _of_place(table, Place(rank, line), action, seen)]
    if faults:
        return faults  # Behind these every other rule would complain too.
    faults += _missing_computations(table, seen)
    faults += _missing_ends(table, seen)
    faults += [fault for rank in range(table.num_ranks) for fault in _of_order(table, rank, seen)]
    return faults + [fault for rank in range(table.num_ranks) for fault in _of_weights(table, rank)]


def _of_place(table: Table, place: Place, action: Action, seen: _Seen) -> Iterator[Fault]:
    """Each action is of a stage of this rank and a microbatch there is, and there once."""
    here, stages = at(table, place), table.stages
    for step in action.steps:
        if step.stage > stages.last:
            yield Fault(place, f"{here}: there is no stage {step.stage}; the stages are 0 to {stages.last}")
            return
        owner = stages.rank_of[step.stage]
        if owner != place.rank:
            yield Fault(place, f"{here}: stage {step.stage} is on rank {owner}; move the action there")
            return
        if step.microbatch is not None and step.microbatch >= table.microbatches:
            yield Fault(
                place,
                f"{here}: there is no microbatch {step.microbatch}; the table has {table.microbatches}, 0 to "
                f"{table.microbatches - 1}",
            )
        if step.kind in MESSAGES:
            yield from _of_message(table, place, step)
        if step.kind in (Kind.UNSHARD, Kind.RESHARD):
            continue
        if step in seen:
            yield Fault(place, f"{here}: {step} is there twice, first at {at(table, seen[step])}; remove one")
        seen.setdefault(step, place)
    partners = {partner_of(table, step, place.rank) for step in action.parts if step.kind in MESSAGES}
    if len(partners) > 1:
        yield Fault(place, f"{here}: one batch of messages to ranks {sorted(partners)}; batch those to one rank only")


def _of_message(table: Table, place: Place, step: Action) -> Iterator[Fault]:
    value = step.value
    if not 0 <= value.boundary < table.stages.last:
        yield Fault(place, f"{at(table, place)}: there is no stage to exchange it with; remove it")
    elif not table.crosses(value):
        yield Fault(
            place,
            f"{at(table, place)}: stages {value.giver} and {value.taker} are both on rank {place.rank}; remove it",
        )


def _missing_computations(table: Table, seen: _Seen) -> Iterator[Fault]:
    for stage, rank in enumerate(table.stages.rank_of):
        for one in range(table.microbatches):
            forward, backward, split, weights = (Action(kind, stage, one) for kind in (Kind.F, Kind.B, Kind.I, Kind.W))
            whole, halves = backward in seen, (split in seen, weights in seen)
            if forward not in seen:
                yield Fault(None, f"rank {rank}: {forward} is missing")
            if not table.has_backward:
                continue
            if whole and any(halves):
                double = split if halves[0] else weights
                yield Fault(
                    seen[double], f"{at(table, seen[double])}: {backward} is there too; write B, or I and W, not both"
                )
            elif not whole and halves == (False, False):
                yield Fault(None, f"rank {rank}: {backward} is missing; write it, or {split} and {weights}")
            elif not whole and not all(halves):
                there, missing = (split, weights) if halves[0] else (weights, split)
                yield Fault(seen[there], f"{at(table, seen[there])}: {missing} is missing; I and W go together")


def _missing_ends(table: Table, seen: _Seen) -> Iterator[Fault]:
    for step, place in seen.items():
        if step.kind in MESSAGES:
            end = receiving(step.value) if step.kind in SENDS else sending(step.value)
            if end not in seen:
                rank = table.stages.rank_of[end.stage]
                yield Fault(place, f"{at(table, place)} waits for {end}, which is missing on rank {rank}; add it there")


def _of_order(table: Table, rank: int, seen: _Seen) -> Iterator[Fault]:
    """Behind what it needs of its own rank, and what it needs from others has been received."""
    for line, action in enumerate(table.actions[rank]):
        place = Place(rank, line)
        for step in action.steps:
            for needed in _needed_here(table, step):
                choices = [seen[one] for one in needed if one in seen]
                if not choices and step.kind in MESSAGES:
                    yield Fault(place, f"{at(table, place)}: {needed[0]} is missing, so there is nothing to send")
                elif not choices and needed[0].kind in MESSAGES:
                    value = needed[0].value
                    yield Fault(
                        place,
                        f"{at(table, place)} uses {value_in_words(value)}, which never comes; add {needed[0]} before",
                    )
                elif choices and choices[0].line == line:
                    yield Fault(
                        place, f"{at(table, place)}: {step} needs what runs at once with it; write one behind the other"
                    )
                elif choices and choices[0].line > line:
                    yield Fault(
                        place, f"{at(table, place)} needs {at(table, choices[0])}, which comes later; swap them"
                    )


def _needed_here(table: Table, step: Action) -> Iterator[tuple[Action, ...]]:
    """What must stand before it in the same list, each as actions of which one is enough."""
    stage, one = step.stage, step.microbatch
    if step.kind is Kind.SEND_F:
        yield (Action(Kind.F, stage, one),)
    elif step.kind is Kind.SEND_B:
        yield Action(Kind.I, stage, one), Action(Kind.B, stage, one)
    elif step.kind is Kind.W:
        yield (Action(Kind.I, stage, one),)
    elif step.kind in (Kind.B, Kind.I):
        yield (Action(Kind.F, stage, one),)
    value = table.needs(step) if step.is_computed else None
    if value is not None and table.crosses(value) and table.has_messages:
        yield (receiving(value),)
    elif value is not None and not table.crosses(value):
        kinds = (Kind.F,) if value.is_forward else (Kind.I, Kind.B)
        yield tuple(Action(kind, value.giver, one) for kind in kinds)


def _of_weights(table: Table, rank: int) -> Iterator[Fault]:
    """UNSHARD before use, RESHARD behind it; REDUCE once, behind the last weight gradient (of its microbatch)."""
    managed = {action.stage for action in table.actions[rank] if action.kind in (Kind.UNSHARD, Kind.RESHARD)}
    whole: set[int] = set()
    let_go: dict[int, Place] = {}
    reduced: dict[tuple[int, int | None], Place] = {}
    for line, action in enumerate(table.actions[rank]):
        place = Place(rank, line)
        here = at(table, place)
        for step in action.steps:
            if step.kind is Kind.UNSHARD:
                if step.stage in whole:
                    yield Fault(place, f"{here}: the weights of stage {step.stage} are gathered already; remove it")
                whole.add(step.stage)
            elif step.kind is Kind.RESHARD:
                if step.stage not in whole:
                    yield Fault(place, f"{here}: the weights of stage {step.stage} are not gathered; remove it")
                whole.discard(step.stage)
                let_go[step.stage] = place
            elif step.kind is Kind.REDUCE:
                reduced[step.stage, step.microbatch] = place
            elif step.is_computed:
                if step.stage in managed and step.stage not in whole:
                    past = f"let go at {at(table, let_go[step.stage])}" if step.stage in let_go else "not gathered yet"
                    yield Fault(
                        place,
                        f"{here} uses the weights of stage {step.stage}, {past}; write {step.stage}UNSHARD before it",
                    )
                if step.kind in (Kind.B, Kind.W):
                    early = reduced.get((step.stage, None)) or reduced.get((step.stage, step.microbatch))
                    if early is not None:
                        yield Fault(early, f"{at(table, early)} comes before {here}; reduce behind it")
    yield from _unreduced(table, rank, reduced)


def _unreduced(table: Table, rank: int, reduced: dict[tuple[int, int | None], Place]) -> Iterator[Fault]:
    for stage in table.stages.stages_of(rank):
        ones = {one for of, one in reduced if of == stage}
        if None in ones and len(ones) > 1:
            place = reduced[stage, None]
            yield Fault(place, f"{at(table, place)} would reduce twice what is reduced by microbatch; keep one form")
        elif ones and None not in ones and len(ones) < table.microbatches:
            missing = min(set(range(table.microbatches)) - {one for one in ones if one is not None})
            yield Fault(
                None, f"rank {rank}: {stage}REDUCE{missing} is missing; reduce all microbatches, or {stage}REDUCE"
            )
        elif not ones and table.has_reductions:
            yield Fault(None, f"rank {rank}: {stage}REDUCE is missing; other stages have theirs")
