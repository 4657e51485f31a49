"""The rules by operator name, and how to add one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.shard.rule_kit.signature import OpCall, Signature

Rule = Callable[[OpCall], "Signature | None"]

# The numbers that every rule sees: an operator that is linear otherwise may not be with them.
EXCEPTIONAL_NUMBERS = frozenset({0, math.inf, -math.inf})

_rules: dict[str, Rule] = {}
_scalars_ignored: set[str] = set()
_dtypes_matter: set[str] = set()
_function_rules: dict[Callable[..., Any], Rule] = {}


def rule(*names: str, ignores_scalars: bool = False, by_dtype: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule for operators: a function from an :class:`OpCall` to a :class:`Signature`, or None for "gather".

    With ``ignores_scalars`` the answer does not depend on the values of numbers among the arguments, except 0 and
    infinite ones, only on which arguments are numbers: calls with ever new numbers find their way at once. With
    ``by_dtype`` the answer depends on the dtypes of the tensors, not only on their layouts and shapes.
    """

    def register(function: Rule) -> Rule:
        for name in names:
            if name in _rules:
                raise ValueError(f"the operator {name!r} has a rule already")
            _rules[name] = function
            if ignores_scalars:
                _scalars_ignored.add(name)
            if by_dtype:
                _dtypes_matter.add(name)
        return function

    return register


def set_function_rule(function: Callable[..., Any], function_rule: Rule) -> None:
    """Give one particular function a rule, whatever its name."""
    _function_rules[function] = function_rule


def find_rule(name: str, function: Callable[..., Any] | None = None) -> Rule | None:
    """The rule for a function or an operator's name, that of the plain form for an in-place one; None without one."""
    found = _function_rules.get(function) if function is not None else None
    if found is None:
        found = _rules.get(name)
    if found is None and name.endswith("_") and not name.endswith("__"):
        found = _rules.get(name[:-1])
    return found


def ignores_scalars(name: str) -> bool:
    """Whether numbers among the arguments are left out of the look-up."""
    return name in _scalars_ignored or name.rstrip("_") in _scalars_ignored


def counts_scalars(name: str, function: Callable[..., Any]) -> bool:
    """Whether the rule counts tensors without dims among the tensors, so that these must be distributed ones too."""
    is_index = name in ("getitem", "setitem")
    return not is_index and function not in _function_rules and not ignores_scalars(name)


def depends_on_dtypes(name: str) -> bool:
    """Whether the dtypes of the tensors belong to the look-up."""
    return name in _dtypes_matter or name.rstrip("_") in _dtypes_matter


def rule_names() -> list[str]:
    """The names of all operators with a rule."""
    return sorted(_rules)


def parse_equation(equation: str, **properties: Any) -> Rule:
    """The rule that an einsum-like line spells, with the other properties of a signature."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    if not arrow:
        raise ValueError(f"the rule {equation!r} has no '->'; write for instance 'mk,kn->mn'")
    signature = Signature(
        tuple(tuple(labels) for labels in left.split(",")),
        tuple(tuple(labels) for labels in right.split(",")),
        **properties,
    )

    def answer(call: OpCall) -> Signature:
        ranks = tuple(len(labels) for labels in signature.inputs)
        given = tuple(spec.ndim for spec in call.tensors)
        if given != ranks:
            raise ValueError(f"{call.name}: the rule {equation!r} is for tensors of {ranks} dims, got {given}")
        return signature

    return answer


def einsum_rule(equation: str, *names: str, **properties: Any) -> Rule:
    """Register a rule in one line: ``einsum_rule("mk,kn->mn", "mm", reduces={"k": "sum"})``."""
    return rule(*names)(parse_equation(equation, **properties))
