"""What can be wrong about the ranks of a group, in words, and the handle of what needs no communication."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from hyper_parallel.platform.shared.membership import current_member

__all__ = [
    "DONE",
    "DoneHandle",
    "check_members",
    "global_rank_of",
    "nobody_sends_first",
    "nobody_sends_objects",
    "part_of_split",
    "refuse_member",
]


class DoneHandle:
    """The handle of an operation that needed no communication."""

    __slots__ = ()

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


DONE = DoneHandle()


def refuse_member(function: str) -> None:
    """Raise inside of a pretend world, which is neither joined nor left."""
    member = current_member()
    if member is not None:
        raise RuntimeError(
            f"{function}: this thread is rank {member.rank} of a pretend world of {member.world_size}, which is there "
            "as long as the thread is; call it outside, on a process"
        )


def nobody_sends_first() -> RuntimeError:
    return RuntimeError("a silent world cannot say who sends first; name the source of the message")


def nobody_sends_objects(source: int | None) -> RuntimeError:
    """The error of who wants objects of world rank ``source``, or of anybody, in a silent world."""
    sender = "another rank" if source is None else f"rank {source}"
    return RuntimeError(f"only {sender} knows the objects that it would send here, and a silent world has no others")


def check_members(what: str, ranks: list[int], world_size: int, rank: int) -> None:
    """Raise unless these ranks, in ascending order, are a group that ``rank`` may make."""
    if not ranks or len(set(ranks)) != len(ranks):
        raise ValueError(f"{what}: a group needs one rank or more, each named once")
    if ranks[0] < 0 or ranks[-1] >= world_size:
        raise ValueError(f"{what}: the ranks of this world are 0 to {world_size - 1}")
    if rank not in ranks:
        raise ValueError(f"{what}: rank {rank} is not one of them; only the members of a group create it")


def part_of_split(split_ranks: Sequence[Sequence[int]] | None, parent: Sequence[int], place: int) -> list[int] | None:
    """The world ranks of the part that the ``place``-th rank of the parent group is in; None if it is in none."""
    if not split_ranks:
        raise ValueError("split_group: split_ranks is missing; give one list of the parent's ranks per new group")
    flat = [rank for part in split_ranks for rank in part]
    if not all(split_ranks) or len(set(flat)) != len(flat) or not all(0 <= rank < len(parent) for rank in flat):
        raise ValueError(
            f"split_group: split_ranks {[list(part) for part in split_ranks]} must be lists that are not empty, do not "
            f"overlap, and name ranks of the parent group, 0 to {len(parent) - 1}"
        )
    mine = next((part for part in split_ranks if place in part), None)
    return None if mine is None else sorted(parent[rank] for rank in mine)


def global_rank_of(ranks: Sequence[int], group_rank: int) -> int:
    """The world rank of the ``group_rank``-th member of the group of these ranks."""
    if not 0 <= group_rank < len(ranks):
        raise ValueError(f"get_global_rank: the group {ranks} has no rank {group_rank}; it has 0 to {len(ranks) - 1}")
    return ranks[group_rank]
