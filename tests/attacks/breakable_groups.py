"""Groups for ranks to disagree in, and what each rank must be told then."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hyper_parallel.platform.torch.communication import collectives, groups, messages

SECONDS = 20  # within which everybody has heard of a disagreement; gloo alone would wait for half an hour


@contextmanager
def fresh_group(timeout: timedelta | None = None) -> Iterator[dist.ProcessGroup]:
    """A group of all ranks that is not the world: it may break."""
    group = groups.split_group(None, [range(dist.get_world_size())], timeout)
    try:
        yield group
    finally:
        dist.barrier()
        groups.destroy_process_group(group)


def last(rank: int) -> bool:
    return rank == dist.get_world_size() - 1


def ones(rank: int, *shapes: Any, dtypes: tuple = (torch.float32, torch.float32)) -> torch.Tensor:
    """On the last rank of the second shape and dtype."""
    return torch.ones(shapes[last(rank)] if len(shapes) > 1 else shapes[0], dtype=dtypes[last(rank)])


def check_told(call: Callable[[int, Any], Any], told: str, group: Any, takes_part: bool) -> None:
    """This rank's part of a disagreement: it is told soon, and the group is broken for it."""
    rank = dist.get_rank()
    start = time.monotonic()
    if not takes_part:
        call(rank, group)
        return
    ranks = re.escape(str(list(range(dist.get_world_size()))))
    with pytest.raises(RuntimeError, match=rf"(?s)the ranks of the group {ranks} disagree: .*{told}"):
        call(rank, group)
    with pytest.raises(RuntimeError, match=rf"(?s)the group {ranks} cannot be used any more: the ranks.*{told}"):
        collectives.all_reduce(torch.ones(1), group)
    with pytest.raises(RuntimeError, match="cannot be used any more"):
        messages.isend(torch.ones(1), 1 - min(rank, 1), group)
    assert time.monotonic() - start < SECONDS
