"""Strict mode: gathering for want of a rule, and optionally every implicit redistribution, becomes an error."""

from __future__ import annotations

import os
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hyper_parallel.platform.checks.call_site import call_site
from hyper_parallel.platform.shared.membership import belongs_to_rank, followed_by_threads


class _Strict(threading.local):
    def __init__(self) -> None:
        self.levels: list[tuple[bool, bool]] = []  # (no gathering, no implicit redistribution)


_strict = followed_by_threads(_Strict())
gathered_ops: Counter[str] = Counter()  # how often each operator ran by gathering in this process


def _set_gathered_ops(saved: Counter[str]) -> None:
    gathered_ops.clear()
    gathered_ops.update(saved)


belongs_to_rank(gathered_ops.copy, _set_gathered_ops)


@contextmanager
def strict(*, implicit_redistribution: bool = False) -> Iterator[None]:
    """Inside, an operator without a rule is an error; with ``implicit_redistribution`` so is one that moves its inputs.

    ``HYPER_PARALLEL_STRICT=1`` does the first for the whole process.
    """
    _strict.levels.append((True, implicit_redistribution))
    try:
        yield
    finally:
        _strict.levels.pop()


def check_gathering(name: str, layouts: list[Any], reason: str) -> None:
    """Warn once per operator that it runs by gathering, or raise in strict mode."""
    where = call_site()
    inputs = ", ".join(map(str, layouts))
    if _strict.levels or os.environ.get("HYPER_PARALLEL_STRICT", "0") not in ("", "0"):
        raise RuntimeError(
            f"{name} at {where} has no sharding rule for {inputs} ({reason}), and strict mode forbids to gather; "
            f"redistribute its inputs to Replicate(), or register a rule for {name!r}"
        )
    gathered_ops[name] += 1
    if gathered_ops[name] == 1:
        warnings.warn(
            f"{name} at {where} runs by gathering its inputs ({inputs}): {reason}. The result is right, but every rank "
            f"computes all of it; register a rule for {name!r} to keep it sharded",
            RuntimeWarning,
            stacklevel=2,
        )


def check_implicit(name: str, choice: Any) -> None:
    """Raise where strict mode forbids implicit redistributions."""
    if _strict.levels and _strict.levels[-1][1]:
        wanted = ", ".join(map(str, choice.inputs))
        raise RuntimeError(
            f"{name} at {call_site()} would redistribute its inputs to {wanted}, and strict mode forbids it; "
            "redistribute them explicitly"
        )
