"""Small functions for the tests of the test world, the same on every framework."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from hyper_parallel.platform import get_platform


def my_rank() -> int:
    return get_platform().get_rank()


def meet() -> None:
    """Wait in a collective until every rank has come."""
    get_platform().barrier()


def gather_ranks() -> list[int]:
    """Every rank's number as told by itself in a collective."""
    platform = get_platform()
    ranks = [None] * platform.get_world_size()
    platform.all_gather_object(ranks, my_rank())
    return ranks


def echo(*args: Any, **kwargs: Any) -> tuple:
    """Who is asked, and with what."""
    return my_rank(), get_platform().get_world_size(), args, kwargs


def await_end(pids: list[int]) -> None:
    """Wait until the processes have ended; a zombie, whose parent may have gone before it could reap it, has ended."""
    deadline = time.monotonic() + 60
    while left := [pid for pid in pids if _is_alive(pid)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
