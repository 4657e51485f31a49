"""What can be wrong with a collective before anything is sent, in words; the same for every framework.

Splits of an all-to-all that do not fit, and ranks that are about to do different things: with
``HYPER_PARALLEL_CHECK_COLLECTIVES=1`` they tell each other first (each platform gathers the descriptions).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from typing import Any

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
    """What this rank is about to do, for the others."""
    mine = {"function": function, "shape": shape, "dtype": dtype, "device": device, **arguments}
    for name in ("input_splits", "output_splits"):
        if name in mine:
            mine[name] = plain_splits(mine[name])
    return mine


def check_agreement(calls: list[dict], ranks: Sequence[int]) -> None:
    """Raise the same error on every rank of the group unless all are about to do the same."""
    problem = _disagreement(calls)
    if problem is not None:
        lines = [f"  rank {rank}: {_spell(call)}" for rank, call in zip(ranks, calls, strict=True)]
        raise RuntimeError(f"the ranks of the group {short(ranks)} disagree: {problem}\n" + "\n".join(lines))


def _disagreement(calls: list[dict]) -> str | None:
    first = calls[0]
    varied = any(call.get("input_splits") is not None or call.get("output_splits") is not None for call in calls)
    own = {"shape", "output_shape", "input_splits", "output_splits"} if varied else set()
    for name in ("function", "dtype", "device", "shape", "op", "src", "output_shape"):
        if name not in own and any(call.get(name) != first.get(name) for call in calls):
            return f"not the same {name}"
    if not varied:
        return None
    if any(call["shape"][1:] != first["shape"][1:] for call in calls):
        return "not the same shape of a row"
    sent, received = ([_rows(call, *side, len(calls)) for call in calls] for side in _SIDES)
    for source in range(len(calls)):
        for target in range(len(calls)):
            if sent[source][target] != received[target][source]:
                return (
                    f"group rank {source} sends {sent[source][target]} rows to group rank {target}, "
                    f"which expects {received[target][source]}"
                )
    return None


_SIDES = (("input_splits", "shape"), ("output_splits", "output_shape"))


def _rows(call: dict, splits: str, shape: str, size: int) -> list[int]:
    if call[splits] is None:
        return [call[shape][0] // size] * size
    return (call[splits] + [0] * size)[:size]


def _spell(call: dict) -> str:
    named = ", ".join(f"{name}={value}" for name, value in call.items() if name != "function")
    return f"{call['function']}({named})"
