"""Which choices the planner can make for a call, found from its rule without running it.

Running an operator under every combination of layouts on a mesh of 2 x 2 ranks takes hours, and most combinations come
down to one of few choices. A choice gives every mesh axis a role: it cuts one of the rule's letters, or it leaves sums
pending on inputs in which the operator is linear together, or neither. The layouts that come only decide which choice
is taken. So every choice is run, from inputs that lie as it wants them; how other layouts come there is proved by the
tests of redistribution, and by some combinations that are drawn.

A rule may answer otherwise under other layouts. It is asked under all combinations up to ``MOST_ASKED``; of more, under
every layout of each tensor while the others are whole, and under combinations that are drawn by a fixed seed.
"""

from __future__ import annotations

import itertools
import math
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard import dispatch
from hyper_parallel.core.shard.plan_call import describe_call
from hyper_parallel.core.shard.rule_table import Rule
from hyper_parallel.core.shard.signature import OpCall, Signature
from hyper_parallel.core.shard.strategy import _blocked_letters
from hyper_parallel.platform import get_platform

# HYPER_PARALLEL_VALIDATE=all asks under every combination.
MOST_ASKED = math.inf if os.environ.get("HYPER_PARALLEL_VALIDATE") == "all" else 1000
_WITHOUT_RULE = 2  # how many combinations are run that no rule covers

Combination = tuple[int, ...]  # for each tensor the place of its layout in the list of its layouts


class _Forgetful(dict):
    """A cache that keeps nothing."""

    def get(self, key: Any, default: Any = None) -> Any:
        return default

    def __getitem__(self, key: Any) -> Any:
        raise KeyError(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


@contextmanager
def planned_calls() -> Iterator[list[tuple[Any, ...]]]:
    """The (function, arguments, keywords) of all calls inside that a rule covers."""
    seen: list[tuple[Any, ...]] = []
    before = dispatch.plan_call, dispatch._calls, dispatch._direct

    def plan_call(func: Any, args: Any, kwargs: Any) -> Any:
        planned = before[0](func, args, kwargs)
        if planned is not None:
            seen.append((func, args, kwargs))
        return planned

    dispatch.plan_call, dispatch._calls, dispatch._direct = plan_call, _Forgetful(), _Forgetful()
    try:
        yield seen
    finally:
        dispatch.plan_call, dispatch._calls, dispatch._direct = before


def every_choice(
    call: tuple[Any, ...], choices: Sequence[Sequence[Layout]], seed: str
) -> list[tuple[Layout, ...]] | None:
    """Layouts for the tensors of a call, one combination for each choice that the planner can make; the same on every
    rank, which all call it.

    ``call`` is the (function, arguments, keywords) that the sample comes down to, ``choices`` the layouts of its
    tensors. None when the call's tensors are not the sample's, so that nothing can be said.
    """
    described = describe_call(*call)
    if described is None or [spec.layout.ndim for spec in described[1].tensors] != [rows[0].ndim for rows in choices]:
        return None
    rule, op_call, _ = described
    platform = get_platform()
    rank, world = platform.get_rank(), platform.get_world_size()
    mine = itertools.islice(_combinations(choices, seed), rank, None, world)
    from_all: list[Any] = [None] * world
    platform.all_gather_object(from_all, _answers(rule, op_call, choices, mine))
    answers: dict[Any, list[Combination]] = {}
    for answered in from_all:
        for key, combinations in answered.items():
            answers.setdefault(key, []).extend(combinations)
    runs: dict[tuple[Layout, ...], None] = {}
    for key, combinations in answers.items():
        for combination in combinations[: _WITHOUT_RULE if key is None else 1]:
            layouts = tuple(rows[place] for rows, place in zip(choices, combination, strict=True))
            signature = _ask(rule, op_call, layouts)
            runs.update(dict.fromkeys([layouts] if signature is None else _wanted_layouts(op_call, signature)))
    return list(runs)


def _combinations(choices: Sequence[Sequence[Layout]], seed: str) -> Iterator[Combination]:
    counts = [len(rows) for rows in choices]
    if math.prod(counts) <= MOST_ASKED:
        yield from itertools.product(*map(range, counts))
        return
    whole = [next(place for place, layout in enumerate(rows) if layout.is_replicated) for rows in choices]
    for number, count in enumerate(counts):
        for place in range(count):
            yield (*whole[:number], place, *whole[number + 1 :])
    pick = random.Random(seed)
    for _ in range(int(MOST_ASKED)):
        yield tuple(pick.randrange(count) for count in counts)


def _answers(rule: Rule, call: OpCall, choices: Any, combinations: Any) -> dict[Any, list[Combination]]:
    """The first combinations for each answer of the rule; None is the key of those that it does not cover."""
    found: dict[Any, list[Combination]] = {}
    for combination in combinations:
        signature = _ask(rule, call, [rows[place] for rows, place in zip(choices, combination, strict=True)])
        key = None if signature is None else _comparable(signature)
        kept = found.setdefault(key, [])
        if len(kept) < _WITHOUT_RULE:
            kept.append(combination)
    return found


def _ask(rule: Rule, call: OpCall, layouts: Sequence[Layout]) -> Signature | None:
    for spec, layout in zip(call.tensors, layouts, strict=True):
        object.__setattr__(spec, "layout", layout)  # they are ours alone
    return rule(call)


def _comparable(signature: Signature) -> tuple[Any, ...]:
    return (
        *(signature.inputs, signature.outputs, frozenset(signature.reduces.items()), signature.handled),
        *(signature.even, signature.linear, frozenset(signature.divisors.items()), signature.local is None),
    )


def _wanted_layouts(call: OpCall, signature: Signature) -> Iterator[tuple[Layout, ...]]:
    """The layouts that the choices under a signature want for the inputs."""
    mesh = call.tensors[0].layout.mesh
    blocked = _blocked_letters(signature)
    letters = sorted({letter for labels in signature.inputs for letter in labels if letter is not None} - blocked)
    can_be_sums = {number for number, spec in enumerate(call.tensors) if spec.dtype != torch.bool}
    sums = [together for together in signature.linear if together <= can_be_sums]
    for roles in itertools.product([None, *letters, *sums], repeat=mesh.ndim):
        for order in (range(mesh.ndim), reversed(range(mesh.ndim))):
            cuts: dict[str, tuple[int, ...]] = {}
            for axis in order:
                role = roles[axis]
                if isinstance(role, str):
                    cuts[role] = (*cuts.get(role, ()), axis)
            yield tuple(
                Layout.of(
                    mesh,
                    [() if letter is None else cuts.get(letter, ()) for letter in labels],
                    ["sum" if isinstance(role, frozenset) and number in role else None for role in roles],
                )
                for number, labels in enumerate(signature.inputs)
            )
