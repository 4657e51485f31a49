"""Which choices the planner can make for a call under all layouts, found from its rule without running it.

Note [All layouts without running them all]
The tensors of one call may lie in millions of ways on a mesh of 2 x 2 ranks. What runs is made of two parts. Each
tensor enters: it is brought from where it lies to where the choice wants it, and its gradient back (``vary.enter``).
Then the operator runs on tensors that lie as the choice wants them. A choice gives every mesh axis a role: it cuts one
of the rule's letters, or leaves sums pending on inputs in which the operator is linear together, or neither. So

- the rule is asked for its answers under all layouts. It is asked without any, and where it looks at a tensor's layout,
  it is asked again with each: an answer holds for all layouts of the tensors at which it did not look;
- under each answer every choice is run, on the sample's own tensors, which lie as it wants them. Where an answer is
  given only under other layouts, those at which the rule looked lie so, if the planner then makes this choice. If it
  does not, it does under no layouts of the others: they are nearest to the choice where it wants them;
- every way to enter is run in ``test_entering``, whatever the operator.

Two answers are one if all they say is equal, what their local functions have captured included. These do not look at
the layouts in the call when they run (``looking_only_when_planned``), so nothing else of the layouts gets through.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.dispatching import dispatch, plan_call
from hyper_parallel.core.shard.dispatching.strategy import _blocked_letters
from hyper_parallel.core.shard.rule_kit.rule_table import Rule
from hyper_parallel.core.shard.rule_kit.signature import OpCall, Signature, TensorSpec

Layouts = tuple[Layout, ...]  # one for each tensor of a call
Fixed = dict[int, Layout]  # the layouts of the tensors at which a rule has looked


class _Forgetful(dict):
    """A cache that keeps nothing."""

    def get(self, key: Any, default: Any = None) -> Any:
        return default

    def __getitem__(self, key: Any) -> Any:
        raise KeyError(key)

    def __setitem__(self, key: Any, value: Any) -> None:
        pass


@contextmanager
def planned_calls(gathered: bool = False) -> Iterator[list[tuple[Any, ...]]]:
    """The (function, arguments, keywords) of calls inside that a rule covers; with ``gathered`` of the others too."""
    seen: list[tuple[Any, ...]] = []
    before = dispatch.plan_call, dispatch._calls, dispatch._direct, dispatch.run_gathered

    def plan_call(func: Any, args: Any, kwargs: Any) -> Any:
        planned = before[0](func, args, kwargs)
        if planned is not None:
            seen.append((func, args, kwargs))
        return planned

    def run_gathered(func: Any, args: Any, kwargs: Any) -> Any:
        if gathered:
            seen.append((func, args, kwargs))
        return before[3](func, args, kwargs)

    dispatch.plan_call, dispatch._calls, dispatch._direct = plan_call, _Forgetful(), _Forgetful()
    dispatch.run_gathered = run_gathered
    try:
        yield seen
    finally:
        dispatch.plan_call, dispatch._calls, dispatch._direct, dispatch.run_gathered = before


@contextmanager
def looking_only_when_planned() -> Iterator[None]:
    """Inside, it is an error to look at a layout of the call that was planned after it was planned."""
    planning = 0
    before = dispatch.plan_call, plan_call.TensorSpec

    class Fleeting(TensorSpec):
        def __getattribute__(self, name: str) -> Any:
            if name == "layout" and not planning:
                raise AssertionError("a local function looks at the layouts that its rule was asked with")
            return super().__getattribute__(name)

    def counted(func: Any, args: Any, kwargs: Any) -> Any:
        nonlocal planning
        planning += 1
        try:
            return before[0](func, args, kwargs)
        finally:
            planning -= 1

    dispatch.plan_call, plan_call.TensorSpec = counted, Fleeting  # type: ignore[misc]
    try:
        yield
    finally:
        dispatch.plan_call, plan_call.TensorSpec = before  # type: ignore[misc]


def every_choice(call: tuple[Any, ...], choices: Sequence[Sequence[Layout]]) -> list[Layouts] | None:
    """Layouts for the tensors of a call that lead to every choice that the planner can make under all ``choices``.

    ``call`` is the (function, arguments, keywords) that the sample comes down to. None when its tensors are not the
    sample's, so that nothing can be said.
    """
    described = plan_call.describe_call(*call)
    if described is None:  # gathered under all layouts
        return _one_at_a_time(choices, {})
    rule, op_call, _ = described
    if [spec.ndim for spec in op_call.tensors] != [rows[0].ndim for rows in choices]:
        return None
    answers: dict[Any, tuple[Signature | None, list[Fixed]]] = {}
    for fixed, signature in _answers(rule, op_call, choices):
        answers.setdefault(_spelled(signature), (signature, []))[1].append(fixed)
    runs: dict[Layouts, None] = {}
    if any(signature and plan_call.written_input(op_call, signature) == 0 for signature, _ in answers.values()):
        # where no choice keeps its layout it is gathered, written and cut again, or refused
        runs.update(dict.fromkeys(_one_at_a_time(choices[:1], {}, choices)))
    for signature, fixeds in answers.values():
        if signature is None:
            for fixed in fixeds:
                runs.update(dict.fromkeys(_one_at_a_time(choices, fixed)))
            continue
        for wanted in _wanted_layouts(op_call, signature, choices[0][0].mesh):
            if len(answers) == 1:
                runs[wanted] = None
                continue
            starts = (tuple(fixed.get(i, layout) for i, layout in enumerate(wanted)) for fixed in fixeds)
            # nothing moves where that is possible
            for start in sorted(starts, key=lambda start: sum(map(operator.is_not, start, wanted))):
                _fix(op_call, dict(enumerate(start)))
                choice = plan_call.choose_for(op_call, signature)
                if choice is not None and choice.inputs == wanted:
                    runs[start] = None
                    break
    return list(runs)


def choices_under(call: tuple[Any, ...], combinations: Iterable[Layouts]) -> set[Any]:
    """What the planner chooses for a call under layouts."""
    described = plan_call.describe_call(*call)
    if described is None:
        return set()
    rule, op_call, _ = described
    found = set()
    for layouts in combinations:
        _fix(op_call, dict(enumerate(layouts)))
        signature = rule(op_call)
        choice = None if signature is None else plan_call.choose_for(op_call, signature)
        found.add((_spelled(signature), choice and (choice.inputs, choice.outputs, choice.varies)))
    return found


def _one_at_a_time(
    varied: Sequence[Sequence[Layout]], fixed: Fixed, choices: Sequence[Sequence[Layout]] | None = None
) -> list[Layouts]:
    """Each layout of each tensor of ``varied`` that is not ``fixed``, while the others are whole."""
    whole = [next(layout for layout in rows if layout.is_replicated) for rows in choices or varied]
    start = [fixed.get(number, layout) for number, layout in enumerate(whole)]
    rest = [number for number in range(len(varied)) if number not in fixed]
    found = [(*start[:number], layout, *start[number + 1 :]) for number in rest for layout in varied[number]]
    return found or [tuple(start)]


class _Looked(BaseException):
    """A rule looks at a layout that is not fixed; no exception that it may catch."""


class _Asked(TensorSpec):
    """A tensor whose layout is asked for."""

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        fixed, number = self.__dict__["asked"]
        if number not in fixed:
            raise _Looked(number)
        return fixed[number]


def _fix(call: OpCall, fixed: Fixed) -> None:
    for number, spec in enumerate(call.tensors):
        object.__setattr__(spec, "__class__", _Asked)  # they are ours alone
        object.__setattr__(spec, "asked", (fixed, number))


def _answers(rule: Rule, call: OpCall, choices: Sequence[Sequence[Layout]]) -> Iterator[tuple[Fixed, Signature | None]]:
    """What the rule says under all layouts: each answer with the layouts at which it has looked."""
    open_questions: list[Fixed] = [{}]
    while open_questions:
        fixed = open_questions.pop()
        _fix(call, fixed)
        try:
            yield fixed, rule(call)
        except _Looked as looked:
            (number,) = looked.args
            open_questions += [{**fixed, number: layout} for layout in choices[number]]


def _spelled(value: Any) -> Any:
    """A value as what can be compared: functions by their code and what they have captured."""
    if isinstance(value, types.FunctionType):
        captured = [cell.cell_contents for cell in value.__closure__ or ()]
        return (
            value.__code__,
            *(_spelled(one) for one in (*captured, *(value.__defaults__ or ())) if one is not value),
        )
    if isinstance(value, functools.partial):
        return (_spelled(value.func), _spelled(value.args), _spelled(value.keywords))
    if isinstance(value, (OpCall, TensorSpec)):
        return type(value)  # those of the one call that is asked about
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return (type(value), *map(_spelled, vars(value).values()))
    if isinstance(value, dict):
        return frozenset((key, _spelled(one)) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return (type(value), *map(_spelled, value))
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return value


def _wanted_layouts(call: OpCall, signature: Signature, mesh: Any) -> Iterator[Layouts]:
    """The layouts that the choices under a signature want for the inputs."""
    blocked = _blocked_letters(signature)
    letters = sorted({letter for labels in signature.inputs for letter in labels if letter is not None} - blocked)
    can_be_sums = {number for number, spec in enumerate(call.tensors) if spec.dtype != torch.bool}
    sums = [together for together in signature.linear if together <= can_be_sums]
    for roles in itertools.product([None, *letters, *sums], repeat=mesh.ndim):
        orders = [range(mesh.ndim)]
        if len({role for role in roles if isinstance(role, str)}) < sum(isinstance(role, str) for role in roles):
            orders.append(range(mesh.ndim - 1, -1, -1))  # one letter is cut by two axes
        for order in orders:
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
