"""What a framework must provide: ranks, worlds and groups of processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import UserDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hyper_parallel.platform.shared.membership import Member, current_member


class _GroupTable(UserDict[tuple[int, ...], Any]):
    """The table of the process, or of the member that the current thread is."""

    def __init__(self) -> None:
        self._of_process: dict[tuple[int, ...], Any] = {}

    @property
    def data(self) -> dict[tuple[int, ...], Any]:  # type: ignore[override]
        member = current_member()
        return self._of_process if member is None else member.groups


# Groups by their ranks in ascending order. One table for the process, so that every mesh, plan and test that asks for
# the same ranks shares one communicator.
EXISTING_COMM_GROUPS = _GroupTable()


class Groups(ABC):
    """Ranks, the world, and groups of its ranks."""

    @staticmethod
    @abstractmethod
    def init_process_group(
        backend: str | None = None,
        *,
        init_method: str | None = None,
        timeout: Any = None,
        world_size: int = -1,
        rank: int = -1,
        store: Any = None,
        pg_options: Any = None,
        device_id: Any = None,
    ) -> None:
        """Join the world; ``backend=None`` takes the one that fits the accelerator. A second call is an error."""

    @staticmethod
    @abstractmethod
    def destroy_process_group(group: Any = None) -> None:
        """Leave ``group``, or the world and every group made in it."""

    @staticmethod
    @abstractmethod
    def world_generation() -> int:
        """How many worlds this process has left: what is remembered about groups holds for one of them.

        Asking forgets what is known of a world that was left with a function of the framework's own.
        """

    @staticmethod
    @abstractmethod
    def on_leaving(forget: Callable[[], None]) -> None:
        """Call ``forget()`` whenever a group or the world is left: in the next one this rank may have another place."""

    @staticmethod
    @abstractmethod
    def leave_by_failure(group: Any, why: str) -> None:
        """Let the ranks that wait for this one in ``group`` raise, with the reason, as far as they can be told.

        The group cannot be used again.
        """

    @staticmethod
    @abstractmethod
    def get_rank() -> int:
        """This process's rank in the world; 0 before there is one."""

    @staticmethod
    @abstractmethod
    def get_world_size() -> int:
        """The number of processes in the world; 1 before there is one."""

    @staticmethod
    @abstractmethod
    def get_global_rank(group: Any, group_rank: int) -> int:
        """The world rank of the ``group_rank``-th member of ``group``."""

    @staticmethod
    @abstractmethod
    def get_group_local_rank(group: Any = None) -> int:
        """This process's rank inside ``group``."""

    @staticmethod
    @abstractmethod
    def get_process_group_ranks(group: Any = None) -> list[int]:
        """The world ranks of ``group``, in group order."""

    @staticmethod
    @abstractmethod
    def get_backend(group: Any = None) -> str:
        """The name of the transport behind ``group``."""

    @staticmethod
    @abstractmethod
    def barrier(group: Any = None, async_op: bool = False, device_ids: Sequence[int] | None = None) -> Any:
        """Wait until every rank of ``group`` is here; with ``async_op`` return a handle instead."""

    @staticmethod
    @abstractmethod
    def split_group(
        parent_pg: Any = None,
        split_ranks: Sequence[Sequence[int]] | None = None,
        timeout: Any = None,
        pg_options: Any = None,
        group_desc: str | None = None,
    ) -> Any:
        """One list of ranks per new group, called by every rank of the parent; each rank gets its own group or None."""

    @staticmethod
    @abstractmethod
    def silent_group(member: Member, ranks: tuple[int, ...]) -> Any:
        """A group of a world in which nobody else is: communication costs nothing and gives shapes only."""

    @staticmethod
    @abstractmethod
    def meeting_group_maker(meeting: Any) -> Callable[[Member, tuple[int, ...]], Any]:
        """What makes the groups of one member of a world of threads, whose ranks meet at ``meeting``."""

    @staticmethod
    @abstractmethod
    def _create_group(rank_list: list[int]) -> Any:
        """Make the group of exactly these ascending ranks; only its members call this, in any order of groups."""

    def create_group(self, rank_list: Iterable[int]) -> Any:
        """The group of exactly these ranks; the same set asked again, in any order, is the same group.

        Only members call it, and no order among different groups is required.
        """
        key = _group_key(rank_list)
        group = self.get_created_group(key)
        if group is not None:
            return group
        rank, world_size = self.get_rank(), self.get_world_size()
        if key[0] < 0 or key[-1] >= world_size:
            raise ValueError(f"create_group({list(key)}): the ranks of this world are 0 to {world_size - 1}")
        if rank not in key:
            raise ValueError(
                f"create_group({list(key)}): rank {rank} is not one of them; only the members of a group create it"
            )
        group = EXISTING_COMM_GROUPS[key] = self._create_group(list(key))
        return group

    @classmethod
    def get_created_group(cls, rank_list: Iterable[int]) -> Any:
        """The group that was made for these ranks, in any order, or None."""
        cls.world_generation()  # forgets the groups of a world that was left without our knowledge
        return EXISTING_COMM_GROUPS.get(_group_key(rank_list))

    @classmethod
    def mark_created_groups(cls, process_group: Any) -> None:
        """Put a group made elsewhere, or a list of them, into the table that :meth:`create_group` looks in.

        It replaces a group of the same ranks, so that all members that mark it use the same one from then on.
        """
        groups = process_group if isinstance(process_group, (list, tuple)) else [process_group]
        cls.world_generation()  # forgets the groups of a world that was left without our knowledge
        for group in groups:
            EXISTING_COMM_GROUPS[_group_key(cls.get_process_group_ranks(group))] = group


def _group_key(rank_list: Iterable[int]) -> tuple[int, ...]:
    ranks = sorted(int(rank) for rank in rank_list)
    if not ranks:
        raise ValueError("a group needs at least one rank, got an empty rank list")
    if len(set(ranks)) != len(ranks):
        raise ValueError(f"a group's ranks must differ, got {ranks}")
    return tuple(ranks)
