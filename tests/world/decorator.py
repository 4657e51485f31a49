"""`run_on_ranks`: makes a function a test whose body runs on every rank of a world."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from tests.world.failures import RanksFailed
from tests.world.world import DEFAULT_TIMEOUT, Worlds

WORLD_SIZE = "_world_size_of_case"


def run_on_ranks(
    *world_sizes: int, sweep: Sequence[int] = (), timeout: float = DEFAULT_TIMEOUT
) -> Callable[[Callable], Callable]:
    """The test has one case per world size; its body runs on every rank, within `timeout` seconds.

    The sizes of `sweep` are tried by `make sweep` only.

    Its arguments (parametrised ones and the values of fixtures) are pickled and are the same on all ranks. The default
    process group is there.
    """
    if not world_sizes or not all(isinstance(size, int) and size > 0 for size in world_sizes):
        raise TypeError(f"run_on_ranks takes one or more world sizes, as in @run_on_ranks(2, 4), not {world_sizes}")

    def decorate(body: Callable) -> Callable:
        @functools.wraps(body)
        def run(*args: Any, worlds: Worlds, **kwargs: Any) -> None:
            world_size = kwargs.pop(WORLD_SIZE)
            failure = ""
            try:
                worlds(world_size, timeout).run(run, *args, **kwargs)
            except RanksFailed as error:
                failure = str(error)
            if failure:  # Outside the except block, so that it is shown once and not as the cause of itself.
                pytest.fail(failure, pytrace=False)

        parameters = list(inspect.signature(body).parameters.values())
        taken = {parameter.name for parameter in parameters}
        if "worlds" in taken:
            raise TypeError(f"{body.__qualname__} runs on the ranks of a world and cannot use the fixture `worlds`")
        for name in (WORLD_SIZE, "worlds"):
            parameters.append(inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY))
        run.__signature__ = inspect.Signature(parameters)
        run._body_on_ranks = body
        return pytest.mark.ranks(*world_sizes, sweep=tuple(sweep))(run)

    return decorate


def small_or_sweep(cases: Iterable[Any], small: Iterable[Any]) -> list[Any]:
    """For `parametrize`: all cases, of which those that are not in `small` are tried by `make sweep` only."""
    small = list(small)
    return [pytest.param(case, marks=() if case in small else pytest.mark.sweep) for case in cases]
