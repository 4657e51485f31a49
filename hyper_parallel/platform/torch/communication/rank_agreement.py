"""Do the ranks agree on the next collective? With ``HYPER_PARALLEL_CHECK_COLLECTIVES=1`` they ask each other first."""

from __future__ import annotations

import pickle
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.platform.checks.collective_checks import COMPARES_RANKS, check_agreement, describe_call
from hyper_parallel.platform.torch.communication import groups
from hyper_parallel.platform.torch.communication.group_facts import GroupFacts
from hyper_parallel.platform.torch.communication.lost_ranks import naming_lost_ranks
from hyper_parallel.platform.torch.communication.pretend_groups import PretendGroup, unpickled

__all__ = ["COMPARES_RANKS", "compare_calls", "compare_ranks"]


def compare_ranks(function: str, data: Any, group: dist.ProcessGroup, facts: GroupFacts, **arguments: Any) -> None:
    """Raise the same error on every rank of the group unless all are about to do the same."""
    if isinstance(data, torch.Tensor):
        mine = describe_call(function, tuple(data.shape), str(data.dtype), data.device.type, **arguments)
    else:
        mine = describe_call(function, None, type(data).__name__, None, **arguments)
    compare_calls(mine, group, facts)


def compare_calls(mine: dict, group: dist.ProcessGroup, facts: GroupFacts) -> None:
    """The same for what is described already."""
    if facts.size == 1:
        return
    groups.wait_until_connected(group)
    calls: list[dict] = [{}] * facts.size
    if isinstance(group, PretendGroup):
        calls = unpickled(group.gather_objects(pickle.dumps(mine)))
    else:
        with naming_lost_ranks():
            dist.all_gather_object(calls, mine, group=group)
    check_agreement(calls, facts.ranks)
