"""Choosing how to run an operator: of all cuts its signature allows, the one that is cheapest to reach from here.

The cost is that of the redistributions needed now; ties go to the least memory.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from hyper_parallel.core.dtensor.layout import DimAxes, Layout, Shape
from hyper_parallel.core.dtensor.redistribution_plan import plan_redistribution
from hyper_parallel.core.shard.rule_kit.signature import Labels, LetterAxes, OpCall, Signature

_SUMS = frozenset({"sum", "avg"})


@dataclass(frozen=True)
class Choice:
    """Layouts for the inputs and outputs, how letters are cut, and which axes the whole inputs vary along."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    axes: LetterAxes
    varies: tuple[tuple[int, ...], ...]  # per input: axes on which it is whole while the operator varies
    cost: float
    num_ways: int = field(default=1, compare=False)  # how many there were to choose from


def choose(call: OpCall, signature: Signature, kept: int | None = None) -> Choice | None:
    """The cheapest legal choice; None when there is none. ``kept`` is an input that the operator writes into."""
    best: tuple[tuple[float, int], Choice] | None = None
    num_ways = 0
    completion = _Completion(call, signature, kept)
    for axes in _assignments(call, signature):
        num_ways += 1
        choice = completion.complete(axes, math.inf if best is None else best[0][0])
        if choice is None:
            continue
        rank = (choice.cost, _memory(call, choice))
        if best is None or rank < best[0]:
            best = (rank, choice)
    return None if best is None else replace(best[1], num_ways=num_ways)


def _assignments(call: OpCall, signature: Signature) -> Iterator[dict[str, tuple[int, ...]]]:
    """All ways to cut letters by the axes that cut them now, or that the signature offers; no axis twice."""
    candidates: dict[str, list[tuple[int, ...]]] = {}
    blocked = _blocked_letters(signature)
    mesh_shape = call.tensors[0].layout.mesh.shape
    for labels, spec in zip(signature.inputs, call.tensors, strict=True):
        for letter, axes, size in zip(labels, spec.layout.shard_axes, spec.shape, strict=True):
            if letter is None or letter in blocked:
                continue
            options = candidates.setdefault(letter, [()])
            for length in range(1, len(axes) + 1):
                option = axes[:length]
                parts = math.prod(mesh_shape[axis] for axis in option)
                uneven = (letter in signature.even and size % parts) or signature.divisors.get(letter, 0) % parts
                if option not in options and not uneven:
                    options.append(option)
    for letter, offered in signature.offers.items():
        options = candidates.setdefault(letter, [()])
        options += [axes for axes in offered if axes not in options]
    names = list(candidates)
    for picked in itertools.product(*candidates.values()):
        used = [axis for axes in picked for axis in axes]
        if len(set(used)) == len(used):
            yield dict(zip(names, picked, strict=True))


def _blocked_letters(signature: Signature) -> set[str]:
    """Letters that some output lacks and nothing reduces."""
    everywhere = {letter for labels in signature.inputs for letter in labels if letter is not None}
    for labels in signature.outputs:
        everywhere -= everywhere - set(labels) - set(signature.reduces) - signature.handled
    return {letter for labels in signature.inputs for letter in labels if letter is not None} - everywhere


class _Completion:
    """The layouts that follow from how the letters are cut; what several assignments share is worked out once."""

    def __init__(self, call: OpCall, signature: Signature, kept: int | None) -> None:
        self._call = call
        self._signature = signature
        self._kept = kept
        self._mesh = call.tensors[0].layout.mesh
        self._no_partials = None
        if not any(spec.layout.has_partial for spec in call.tensors):
            self._no_partials = [[None] * self._mesh.ndim for _ in call.tensors]
        self._layouts: dict[tuple[DimAxes, tuple[str | None, ...]], Layout] = {}

    def complete(self, axes: LetterAxes, limit: float) -> Choice | None:
        """The choice that ``axes`` gives; None when it is not legal, or dearer than ``limit``."""
        call, signature, kept = self._call, self._signature, self._kept
        partials: Any = self._no_partials
        if partials is None:
            partials = _partial_inputs(call, signature, {axis for sharding in axes.values() for axis in sharding}, kept)
        inputs = []
        cost = 0.0
        for spec, labels, sums in zip(call.tensors, signature.inputs, partials, strict=True):
            target = self._layout(_shard_axes(labels, axes), sums)
            if spec.layout is not target:
                cost += plan_redistribution(spec.layout, target, spec.shape).cost
                if cost > limit:
                    return None
            inputs.append(target)
        outputs = tuple(
            self._layout(_shard_axes(labels, axes), _partial_output(signature, labels, axes, partials))
            for labels in signature.outputs
        )
        if kept is not None and any(layout is not call.tensors[kept].layout for layout in (inputs[kept], *outputs[:1])):
            return None
        not_replicated = [axes_not_replicated(layout) for layout in inputs]
        varying = set().union(*not_replicated)
        varies = tuple(tuple(sorted(varying - own)) for own in not_replicated)
        return Choice(tuple(inputs), outputs, axes, varies, cost)

    def _layout(self, shard_axes: DimAxes, partials: list[str | None]) -> Layout:
        key = (shard_axes, tuple(partials))
        layout = self._layouts.get(key)
        if layout is None:
            layout = self._layouts[key] = Layout.of(self._mesh, *key)
        return layout


def _shard_axes(labels: Labels, axes: LetterAxes) -> tuple[tuple[int, ...], ...]:
    return tuple(() if letter is None else axes.get(letter, ()) for letter in labels)


def _partial_inputs(
    call: OpCall, signature: Signature, shard_axes: set[int], kept: int | None
) -> list[list[str | None]]:
    """Which inputs may stay pending sums on which axes; where one is written into, only together with that one."""
    num_axes = call.tensors[0].layout.mesh.ndim
    partials: list[list[str | None]] = [[None] * num_axes for _ in call.tensors]
    for axis in range(num_axes):
        have = {index: spec.layout.partials[axis] for index, spec in enumerate(call.tensors)}
        have = {index: op for index, op in have.items() if op is not None}
        if axis in shard_axes or not have or len(set(have.values())) > 1 or not set(have.values()) <= _SUMS:
            continue
        if frozenset(have) in signature.linear and (kept is None or kept in have):
            for index, op in have.items():
                partials[index][axis] = op
        elif kept is not None and have.get(kept) == "sum":
            # What is written into stays pending; the inputs it is linear with become pending too, for nothing.
            for index in next((together for together in signature.linear if kept in together), ()):
                partials[index][axis] = "sum"
    return partials


def _partial_output(
    signature: Signature, labels: Labels, axes: LetterAxes, partials: list[list[str | None]]
) -> list[str | None]:
    result: list[str | None] = [None] * len(partials[0]) if partials else []
    for per_input in partials:
        for axis, op in enumerate(per_input):
            result[axis] = op or result[axis]
    for letter, sharding in axes.items():
        if letter not in labels and letter not in signature.handled:
            for axis in sharding:
                result[axis] = signature.reduces[letter]
    return result


def axes_not_replicated(layout: Layout) -> set[int]:
    """The axes on which the ranks hold different values."""
    sharding = {axis for axes in layout.shard_axes for axis in axes}
    return sharding | {axis for axis, op in enumerate(layout.partials) if op is not None}


def _memory(call: OpCall, choice: Choice) -> int:
    """Elements that the largest rank holds."""

    def numel(layout: Layout, shape: Shape) -> int:
        return math.prod(layout.local_shape(shape, (0,) * layout.mesh.ndim))

    held = sum(numel(layout, spec.shape) for layout, spec in zip(choice.inputs, call.tensors, strict=True))
    return held + sum(numel(layout, shape) for layout, shape in zip(choice.outputs, call.outputs, strict=True))
