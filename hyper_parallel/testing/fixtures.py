"""Fixtures for pytest; ``pytest_plugins = ["hyper_parallel.testing.fixtures"]`` in ``conftest.py`` brings them in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hyper_parallel.testing.threads import threads


@pytest.fixture
def on_threads() -> Callable[..., list[Any]]:
    """``on_threads(4, function, *args)``: the results of a function by rank, on 4 ranks in this process."""

    def run(num_ranks: int, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        return threads(num_ranks).run(function, *args, **kwargs)

    return run
