"""The table of neutral operators: what the rules call an operator, and the function that computes it on blocks.

A neutral operator takes its arguments by the names and in the order that the rules read (``dim``, ``keepdim``), and is
computed by functions of MindSpore that have a kernel on a CPU as well as on Ascend. The files beside this one have one
family each; ``all_operators.py`` is the table with all of them.

Some look for blocks without elements. The most frequent of them name what can be called where there are none
(``on_elements``; ``not_for`` finds other blocks for which it cannot), so that a plan looks once and not at every call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

NEUTRAL: dict[str, Callable[..., Any]] = {}


def neutral(function: Callable[..., Any]) -> Callable[..., Any]:
    """Put a function into the table under its own name."""
    NEUTRAL[function.__name__] = function
    return function
