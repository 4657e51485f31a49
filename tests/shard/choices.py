"""Which choices the planner makes for a call under all layouts of its tensors, found without running it.

Running an operator under every combination of layouts on a mesh of 2 x 2 ranks takes hours; planning it takes minutes,
for it is arithmetic, and many combinations lead to one choice: the same layouts of the blocks, the same edges for
gradients, the same labels of the results. So all combinations are planned, shared out over the ranks, and one of each
choice is left to be run. How tensors come into the layouts of a choice is proved by the tests of redistribution.
"""

from __future__ import annotations

import gc
import itertools
import math
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard import dispatch
from hyper_parallel.core.shard.plan_call import choose_for, describe_call
from hyper_parallel.core.shard.rule_table import Rule
from hyper_parallel.core.shard.signature import OpCall
from hyper_parallel.platform import get_platform

# Four tensors have hundreds of thousands of combinations; of these so many are planned, drawn by a fixed seed.
# HYPER_PARALLEL_VALIDATE=all plans every one.
MOST_PLANNED = math.inf if os.environ.get("HYPER_PARALLEL_VALIDATE") == "all" else 6000
_WITHOUT_CHOICE = 2  # how many combinations are run that no rule covers, or that are refused

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


def one_of_each_choice(
    call: tuple[Any, ...], choices: Sequence[Sequence[Layout]], seed: str
) -> list[tuple[Layout, ...]] | None:
    """Combinations of layouts, one for each choice that the planner makes; the same on every rank, which all call it.

    ``call`` is the (function, arguments, keywords) that the sample comes down to, ``choices`` the layouts of its
    tensors. None when the call's tensors are not the sample's, so that nothing can be said.
    """
    described = describe_call(*call)
    if described is None or [spec.layout.ndim for spec in described[1].tensors] != [rows[0].ndim for rows in choices]:
        return None
    rule, op_call, _ = described
    platform = get_platform()
    rank, world = platform.get_rank(), platform.get_world_size()
    found = _plan(rule, op_call, choices, itertools.islice(_combinations(choices, seed), rank, None, world))
    from_all: list[Any] = [None] * world
    platform.all_gather_object(from_all, found)
    together = _plan(rule, op_call, choices, sorted(set(itertools.chain(*from_all))), at_target=True)
    return [tuple(rows[place] for rows, place in zip(choices, combination, strict=True)) for combination in together]


def _combinations(choices: Sequence[Sequence[Layout]], seed: str) -> Iterator[Combination]:
    counts = [len(rows) for rows in choices]
    if math.prod(counts) <= MOST_PLANNED:
        return itertools.product(*map(range, counts))
    pick = random.Random(seed)
    return (tuple(pick.randrange(count) for count in counts) for _ in range(int(MOST_PLANNED)))


def _plan(rule: Rule, call: OpCall, choices: Any, combinations: Any, at_target: bool = False) -> list[Combination]:
    """The first combination of each choice; ``at_target``: where it leads to itself, the choice's own layouts."""
    found: dict[Any, Combination] = {}
    without: list[Combination] = []
    places = [{layout: place for place, layout in enumerate(rows)} for rows in choices]
    gc.disable()  # nothing here makes circles, and looking for them among all of PyTorch's objects takes long
    try:
        for combination in combinations:
            key, targets = _choice(rule, call, [rows[place] for rows, place in zip(choices, combination, strict=True)])
            if key is None:
                without.append(combination)
            elif key not in found:
                found[key] = combination
                if at_target and all(target in place for target, place in zip(targets, places, strict=True)):
                    same_key, _ = _choice(rule, call, targets)
                    if same_key == key:
                        found[key] = tuple(place[target] for target, place in zip(targets, places, strict=True))
    finally:
        gc.enable()
    return [*found.values(), *without[:_WITHOUT_CHOICE]]


def _choice(rule: Rule, call: OpCall, layouts: Sequence[Layout]) -> tuple[Any, Sequence[Layout]]:
    for spec, layout in zip(call.tensors, layouts, strict=True):
        object.__setattr__(spec, "layout", layout)  # they are ours alone
    signature = rule(call)
    choice = None if signature is None else choose_for(call, signature)
    if signature is None or choice is None:
        return None, ()
    axes = tuple(sorted(choice.axes.items()))
    labels = (signature.inputs, signature.outputs, signature.local is None)
    return (choice.inputs, choice.outputs, choice.varies, axes, labels), choice.inputs
