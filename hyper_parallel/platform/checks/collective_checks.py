"""What can be wrong with a collective before anything is sent, in words; the same for every framework.

Splits of an all-to-all that do not fit, and ranks that are about to do different things: with
``HYPER_PARALLEL_CHECK_COLLECTIVES=1`` they tell each other first (each platform gathers the descriptions).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from hyper_parallel.platform.checks.call_site import call_site

COMPARES_RANKS = os.environ.get("HYPER_PARALLEL_CHECK_COLLECTIVES", "0") not in ("", "0")


def short(ranks: Sequence[int]) -> str:
    """The ranks of a group, in a message."""
    return str(list(ranks)) if len(ranks) <= 16 else f"[{ranks[0]}, {ranks[1]}, ... {ranks[-1]}] of {len(ranks)} ranks"


def plain_splits(splits: Sequence[int] | None) -> list[int] | None:
    return None if splits is None else [int(number) for number in splits]


# ---------------------------------------------------------------- splits


def check_splits(
    shape: Sequence[int],
    output_shape: tuple[int, ...],
    output_splits: Sequence[int] | None,
    input_splits: Sequence[int] | None,
    size: int,
    here: int,
    where: str,
) -> tuple[Sequence[int], Sequence[int]]:
    """Both splits as lists; one that is missing cuts its side into equal parts."""
    shape = tuple(shape)
    if not shape or not output_shape:
        problem: str | None = "a scalar has no rows; use .reshape(1)"
    elif shape[1:] != output_shape[1:] and prod(shape[1:]) != prod(output_shape[1:]):
        problem = "the rows of the output must be as large as those of the input"
    else:
        received, problem = _rows_per_rank("output_splits", output_splits, output_shape[0], size)
        if problem is None:
            sent, problem = _rows_per_rank("input_splits", input_splits, shape[0], size)
            if problem is None:
                if received[here] == sent[here]:
                    return received, sent
                problem = f"this rank sends itself {sent[here]} rows but expects {received[here]}"
    raise ValueError(
        f"all_to_all_single {where}: input of shape {shape}, output_shape {output_shape}, "
        f"input_splits {plain_splits(input_splits)}, output_splits {plain_splits(output_splits)}: {problem}"
    )


def _rows_per_rank(name: str, splits: Sequence[int] | None, rows: int, size: int) -> tuple[Sequence[int], str | None]:
    """The number of rows for each rank, and what is wrong with them."""
    if splits is None:
        return [
            rows // size
        ] * size, f"{rows} rows are not {size} equal parts; give {name} too" if rows % size else None
    counts = splits if type(splits) in (list, tuple) else [int(number) for number in splits]
    if len(counts) == size and sum(counts) == rows and min(counts) >= 0:
        return counts, None
    return counts, f"{name} must be {size} numbers of rows, one per rank of the group, with sum {rows}"


# ---------------------------------------------------------------- ranks that disagree


def describe_call(function: str, shape: Sequence[int] | None, dtype: str, device: str | None, **arguments: Any) -> dict:
    """What this rank is about to do, and where, for the others."""
    mine = {"function": function, "shape": shape, "dtype": dtype, "device": device, **arguments, "at": call_site()}
    for name in ("input_splits", "output_splits"):
        if name in mine:
            mine[name] = plain_splits(mine[name])
    return mine


def describe_objects(function: str, **arguments: Any) -> dict:
    """What this rank is about to do, for a function without a tensor."""
    return {"function": function, **arguments, "at": call_site()}


def check_agreement(calls: Sequence[dict], ranks: Sequence[int]) -> None:
    """Raise the same error on every rank of the group unless all are about to do the same."""
    problem = disagreement(dict(enumerate(calls)), len(calls))
    if problem is not None:
        raise RuntimeError(disagreement_text(problem, dict(zip(ranks, calls, strict=True)), ranks))


def check_message(sent: dict | None, received: dict, source: int, target: int, ranks: Sequence[int]) -> None:
    """Raise unless the sender of objects sends as many as the receiver has places for."""
    if sent is None or sent["objects"] != received["objects"]:
        sides = {source: sent or {"function": "another call"}, target: received}
        raise RuntimeError(disagreement_text("not the same number of objects", sides, ranks))


def disagreement_text(problem: str, calls: Mapping[int, dict], ranks: Sequence[int]) -> str:
    """The error, with what each rank is about to do."""
    lines = [f"  rank {rank}: {spell_call(call)}" for rank, call in calls.items()]
    return f"the ranks of the group {short(ranks)} disagree: {problem}\n" + "\n".join(lines)


def disagreement(calls: Mapping[int, dict], size: int) -> str | None:
    """What some ranks of a group of ``size`` ranks, by their places in it, do not do alike; None if they fit."""
    first = next(iter(calls.values()))
    varied = any(call.get(splits) is not None for call in calls.values() for splits, _ in _SIDES)
    own = {"shape", "output_shape", "input_splits", "output_splits"} if varied else set()
    for name in ("function", "dtype", "device", "shape", "op", "src", "output_shape"):
        if name not in own and any(call.get(name) != first.get(name) for call in calls.values()):
            return f"not the same {name}"
    if not varied:
        return None
    if any(call["shape"][1:] != first["shape"][1:] for call in calls.values()):
        return "not the same shape of a row"
    sent, received = ({place: _rows(call, *side, size) for place, call in calls.items()} for side in _SIDES)
    for source in calls:
        for target in calls:
            if sent[source][target] != received[target][source]:
                return (
                    f"group rank {source} sends {sent[source][target]} rows to group rank {target}, "
                    f"which expects {received[target][source]}"
                )
    return None


_SIDES = (("input_splits", "shape"), ("output_splits", "output_shape"))


def _rows(call: dict, splits: str, shape: str, size: int) -> list[int]:
    if call.get(splits) is None:
        return [call.get(shape, call["shape"])[0] // size] * size
    return (call[splits] + [0] * size)[:size]


def spell_call(call: dict) -> str:
    """A call as one would write it, and where it is."""
    hidden = ("function", "at", "first_at")
    named = [
        f"{name}={tuple(value) if name.endswith('shape') and value is not None else value}"
        for name, value in call.items()
        if name not in hidden
    ]
    return f"{call['function']}({', '.join(named)}){first_call(call)}"


def first_call(call: dict) -> str:
    """Where a call is, or where it was made for the first time, as far as that is known."""
    if call.get("at"):
        return f" at {call['at']}"
    return f", first called at {call['first_at']}" if call.get("first_at") else ""
