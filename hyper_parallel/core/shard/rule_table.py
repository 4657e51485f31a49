"""The rules by operator name, and how to add one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hyper_parallel.core.shard.signature import OpCall, Signature

Rule = Callable[[OpCall], "Signature | None"]

_rules: dict[str, Rule] = {}
_scalars_ignored: set[str] = set()


def rule(*names: str, ignores_scalars: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule for operators: a function from an :class:`OpCall` to a :class:`Signature`, or None for "gather".

    With ``ignores_scalars`` the answer does not depend on the values of numbers among the arguments, only on which
    arguments are numbers, so that calls with ever new numbers find their way at once.
    """

    def register(function: Rule) -> Rule:
        for name in names:
            if name in _rules:
                raise ValueError(f"the operator {name!r} has a rule already")
            _rules[name] = function
            if ignores_scalars:
                _scalars_ignored.add(name)
        return function

    return register


def find_rule(name: str) -> Rule | None:
    """The rule for an operator, that of the plain form for an in-place one; None when there is none."""
    found = _rules.get(name)
    if found is None and name.endswith("_") and not name.endswith("__"):
        found = _rules.get(name[:-1])
    return found


def ignores_scalars(name: str) -> bool:
    """Whether numbers among the arguments are left out of the look-up."""
    return name in _scalars_ignored or name.rstrip("_") in _scalars_ignored


def rule_names() -> list[str]:
    """The names of all operators with a rule."""
    return sorted(_rules)


def einsum_rule(equation: str, *names: str, **properties: Any) -> Rule:
    """Register a rule in one line: ``einsum_rule("mk,kn->mn", "mm", reduces={"k": "sum"})``."""
    left, right = equation.replace(" ", "").split("->")
    signature = Signature(
        tuple(tuple(labels) for labels in left.split(",")),
        tuple(tuple(labels) for labels in right.split(",")),
        **properties,
    )
    return rule(*names)(lambda call: signature)
