"""Do the ranks agree on the next collective? With ``HYPER_PARALLEL_CHECK_COLLECTIVES=1`` they ask each other first."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.platform.torch import groups
from hyper_parallel.platform.torch.group_facts import GroupFacts, short

COMPARES_RANKS = os.environ.get("HYPER_PARALLEL_CHECK_COLLECTIVES", "0") not in ("", "0")


def compare_ranks(function: str, data: Any, group: dist.ProcessGroup, facts: GroupFacts, **arguments: Any) -> None:
    """Raise the same error on every rank of the group unless all are about to do the same."""
    if facts.size == 1:
        return
    groups.wait_until_connected(group)
    is_tensor = isinstance(data, torch.Tensor)
    mine = {
        "function": function,
        "shape": tuple(data.shape) if is_tensor else None,
        "dtype": str(data.dtype) if is_tensor else type(data).__name__,
        "device": data.device.type if is_tensor else None,
        **arguments,
    }
    for name in ("input_splits", "output_splits"):
        if name in mine:
            mine[name] = plain_splits(mine[name])
    calls: list[dict] = [{}] * facts.size
    dist.all_gather_object(calls, mine, group=group)
    problem = _disagreement(calls)
    if problem is not None:
        lines = [f"  rank {rank}: {_spell(call)}" for rank, call in zip(facts.ranks, calls, strict=True)]
        raise RuntimeError(f"the ranks of the group {short(facts.ranks)} disagree: {problem}\n" + "\n".join(lines))


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


def plain_splits(splits: Sequence[int] | None) -> list[int] | None:
    return None if splits is None else [int(number) for number in splits]
