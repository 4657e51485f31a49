"""Process groups and ranks on MindSpore: joining and leaving the world, making groups of its ranks, who is where.

Groups are our own small objects, since MindSpore names its groups by strings. Each knows what carries its data: for
groups of processes that is chosen once, when the platform is made (``transports.py``), MindSpore's hccl on Ascend and
TCP connections on a CPU; in a world in which nobody else is (``shared/membership.py``) nothing is carried
(``silent_transport.py``). Making a group tells nobody and waits for nobody; its first use waits for the other members.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from hyper_parallel.platform.checks.collective_observers import announce, observers, telling, wait_observers
from hyper_parallel.platform.checks.group_checks import (
    DONE,
    check_members,
    global_rank_of,
    part_of_split,
    refuse_member,
)
from hyper_parallel.platform.mindspore.communication import transports
from hyper_parallel.platform.mindspore.communication.silent_transport import SilentChannel, SilentTransport
from hyper_parallel.platform.platform import EXISTING_COMM_GROUPS
from hyper_parallel.platform.shared.membership import Member, current_member

__all__ = [
    "ProcessGroup",
    "barrier",
    "destroy_process_group",
    "get_backend",
    "get_global_rank",
    "get_group_local_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "leave_by_failure",
    "make_group",
    "meeting_group_maker",
    "on_leaving",
    "silent_group",
    "split_group",
    "world_generation",
]

# Called with each group that is destroyed, so that caches about it can be dropped.
on_destroy: list[Callable[[ProcessGroup], None]] = []
# Called with a group before a barrier begins in it; raises where its ranks are about to do something else.
before_barrier: list[Callable[[ProcessGroup], None]] = []

DEFAULT_TIMEOUT = timedelta(minutes=30)
_creation_lock = threading.Lock()
_num_times_made: dict[tuple[int, ...], int] = {}
_num_worlds_left = 0
_world: ProcessGroup | None = None
_silent = SilentTransport()


class ProcessGroup:
    """The world ranks of a group in ascending order, and what carries its data."""

    __slots__ = ("__weakref__", "_rank", "channel", "is_destroyed", "name", "ranks", "transport")

    def __init__(self, ranks: Sequence[int], rank: int, name: str, channel: Any, transport: Any) -> None:
        self.ranks = list(ranks)
        self.name = name
        self.channel, self.transport = channel, transport
        self.is_destroyed = False
        self._rank = self.ranks.index(rank)

    def rank(self) -> int:
        """This process's place in the group."""
        return self._rank

    def size(self) -> int:
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"ProcessGroup({self.ranks}, name={self.name!r})"


# ---------------------------------------------------------------- the world


def init_process_group(
    backend: str | None = None,
    *,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: Any = None,
    pg_options: Any = None,
    device_id: Any = None,
) -> None:
    """Join the world; no scheduler process is needed.

    Who is who comes from the arguments, from RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT (torchrun, or set by hand),
    or from what msrun sets. ``backend=None`` is "hccl" on Ascend and "tcp" on a CPU; "mccl" joins MindSpore's own world
    on the CPU too, so that its own functions of communication can be used beside ours.
    """
    global _world
    refuse_member("init_process_group")
    if _world is not None:
        raise RuntimeError(
            f"init_process_group: this process is already rank {_world.rank()} of a world of {_world.size()} "
            f"(backend {get_backend()}); call destroy_process_group() first to leave it"
        )
    if store is not None:
        raise ValueError("init_process_group: store is not used on MindSpore; give init_method='tcp://host:port'")
    _leave_if_scheduler()
    rank, world_size, address, port = _whereabouts(init_method, rank, world_size)
    transport = transports.get_transport()
    limit = timeout or DEFAULT_TIMEOUT
    name = f"world-{_num_worlds_left}-{os.environ.get('TORCHELASTIC_RUN_ID', '')}-{address}-{port}"
    channel = transport.join(backend, rank, world_size, address, port, name, limit, pg_options, device_id)
    _world = ProcessGroup(range(world_size), rank, "world", channel, transport)


def destroy_process_group(group: Any = None) -> None:
    """Leave ``group``, or the world and every group made in it; ``create_group`` no longer knows them."""
    global _num_worlds_left, _world
    leaving = unwrap_group(group)
    everything = leaving is _world
    if everything or leaving is _current_world():
        refuse_member("destroy_process_group")
    for ranks, known in list(EXISTING_COMM_GROUPS.items()):
        if everything or known is leaving:
            del EXISTING_COMM_GROUPS[ranks]
            known.is_destroyed = True
    leaving.is_destroyed = True
    for forget in on_destroy:
        forget(leaving)
    if everything:
        _num_times_made.clear()
        _num_worlds_left += 1
        _world = None
        leaving.transport.leave()
    else:
        leaving.transport.drop_group(leaving.channel)


def world_generation() -> int:
    """How many worlds this process has left: what is remembered about groups holds for one of them."""
    member = current_member()
    return _num_worlds_left if member is None else member.generation


def on_leaving(forget: Callable[[], None]) -> None:
    """Call ``forget()`` whenever a group or the world is left: in the next one this rank may have another place."""
    on_destroy.append(lambda group: forget())


def _leave_if_scheduler() -> None:
    """msrun starts one process more, with the same program, to be MindSpore's scheduler; nobody needs it here."""
    if os.environ.get("MS_ROLE") == "MS_SCHED":
        sys.exit(0)


# What says it on torchrun, and what says the same under msrun.
_VARIABLES = {
    "RANK": ("RANK", "RANK_ID", "MS_NODE_ID"),
    "WORLD_SIZE": ("WORLD_SIZE", "RANK_SIZE", "MS_WORKER_NUM"),
    "MASTER_ADDR": ("MASTER_ADDR", "MS_SCHED_HOST"),
    "MASTER_PORT": ("MASTER_PORT", "MS_SCHED_PORT"),
}


def _whereabouts(init_method: str | None, rank: int, world_size: int) -> tuple[int, int, str, int]:
    """(rank, world size, address, port) from the arguments or the environment."""
    needed = {"RANK": rank < 0, "WORLD_SIZE": world_size < 0}
    address = port = ""
    if init_method not in (None, "env://"):
        scheme, _, place = str(init_method).partition("://")
        address, _, port = place.rpartition(":")
        address = address.removeprefix("[").removesuffix("]")  # around an address of IPv6
        if scheme != "tcp" or not address or not port.isdigit():
            raise ValueError(
                f"init_process_group: init_method {init_method!r} must be 'tcp://host:port', or 'env://' to take "
                "MASTER_ADDR and MASTER_PORT from the environment"
            )
    needed |= {"MASTER_ADDR": not address, "MASTER_PORT": not port}
    found = {
        name: next((os.environ[one] for one in _VARIABLES[name] if one in os.environ), None)
        for name, is_needed in needed.items()
        if is_needed
    }
    missing = [name for name, value in found.items() if value is None]
    if missing:
        raise ValueError(
            f"init_process_group: the environment does not say {', '.join(missing)}; start the program with torchrun "
            f"or msrun, set {'it' if len(missing) == 1 else 'them'}, or pass rank=, world_size= and "
            "init_method='tcp://host:port'"
        )
    rank, world_size = int(found.get("RANK", rank)), int(found.get("WORLD_SIZE", world_size))
    if not 0 <= rank < world_size:
        raise ValueError(f"init_process_group: rank {rank} is not one of a world of {world_size}")
    if "MASTER_PORT" in found and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        found["MASTER_PORT"] = str(int(found["MASTER_PORT"]) + 1)  # torchrun's own store listens on the first one
    return rank, world_size, found.get("MASTER_ADDR", address), int(found.get("MASTER_PORT", port))


# ---------------------------------------------------------------- who is where


def unwrap_group(group: Any) -> ProcessGroup:
    """The process group that is meant: itself, the world for None, or the ``group`` attribute of ``group``."""
    if isinstance(group, ProcessGroup):
        if group.is_destroyed:
            raise ValueError(f"the group {group.ranks} was destroyed; make one with create_group")
        return group
    if group is None:
        world = _current_world()
        if world is None:
            raise RuntimeError("there is no process group yet; call init_process_group() first")
        return world
    if hasattr(group, "group"):
        return unwrap_group(group.group)
    raise TypeError(
        f"expected a process group, None for the world, or an object with a .group, not a {type(group).__name__}"
    )


def _current_world() -> ProcessGroup | None:
    member = current_member()
    return _world if member is None else member.world_group


def get_rank() -> int:
    """This process's rank in the world; 0 before there is one."""
    world = _current_world()
    return world.rank() if world is not None else 0


def get_world_size() -> int:
    """The number of processes in the world; 1 before there is one."""
    world = _current_world()
    return world.size() if world is not None else 1


def get_global_rank(group: Any, group_rank: int) -> int:
    """The world rank of the ``group_rank``-th member of ``group``."""
    return global_rank_of(get_process_group_ranks(group), group_rank)


def get_group_local_rank(group: Any = None) -> int:
    """This process's rank inside ``group``; 0 before there is a world."""
    if group is None and _current_world() is None:
        return 0
    return unwrap_group(group).rank()


def get_process_group_ranks(group: Any = None) -> list[int]:
    """The world ranks of ``group``, in group order; [0] before there is a world."""
    if group is None and _current_world() is None:
        return [0]
    return list(unwrap_group(group).ranks)


def leave_by_failure(group: Any, why: str) -> None:
    """Let the members that wait for this rank raise; hccl has no way to tell, its members wait for their time limit."""
    group = unwrap_group(group)
    fail = getattr(group.transport, "fail", None)
    if fail is not None:
        fail(group.channel, why)


def get_backend(group: Any = None) -> str:
    """The transport of ``group``: "hccl" on Ascend, "tcp" on a CPU, "mccl" if MindSpore's own world was joined too."""
    return unwrap_group(group).transport.backend


def barrier(group: Any = None, async_op: bool = False, device_ids: Sequence[int] | None = None) -> Any:
    """Wait until every rank of ``group`` is here; with ``async_op`` return a handle instead."""
    group = unwrap_group(group)
    if group.size() == 1:
        return DONE if async_op else None
    call = announce("barrier", group, None, async_op) if observers or wait_observers else None
    for prepare in before_barrier:
        prepare(group)
    handle = group.transport.barrier(group.channel)
    if async_op:
        return telling(handle, call)
    handle.wait()
    return None


# ---------------------------------------------------------------- making groups


def silent_group(member: Member, ranks: tuple[int, ...]) -> ProcessGroup:
    """A group of a world in which nobody else is."""
    channel = SilentChannel(ranks, ranks.index(member.rank))
    return ProcessGroup(ranks, member.rank, f"silent/{member.generation}", channel, _silent)


def meeting_group_maker(meeting: Any) -> Callable[[Member, tuple[int, ...]], Any]:
    raise RuntimeError(
        "ranks cannot be threads on MindSpore: its record of operators for backward is one per process, so two ranks "
        "would write into the same one; run them as processes, with msrun or torchrun"
    )


def make_group(rank_list: Sequence[int]) -> ProcessGroup:
    """A group of exactly these ranks; only they call it, in any order, and it never waits for the others."""
    world = unwrap_group(None)
    ranks = sorted(rank_list)
    check_members(f"make_group({ranks})", ranks, world.size(), world.rank())
    if len(ranks) == world.size():
        return world
    return _new_group(ranks)


def split_group(
    parent_pg: Any = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: Any = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> ProcessGroup | None:
    """A new group for each list of ranks *of the parent group*; this rank gets its own, or None if no list names it."""
    parent = unwrap_group(parent_pg)
    mine = part_of_split(split_ranks, parent.ranks, parent.rank())
    return None if mine is None else _new_group(mine)


def _new_group(ranks: list[int]) -> ProcessGroup:
    member = current_member()
    if member is not None:
        return member.make_group(member, tuple(ranks))
    with _creation_lock:
        # The name is made of the ranks and of how often this very set was made, which all members count alike.
        key = tuple(ranks)
        num_times = _num_times_made[key] = _num_times_made.get(key, 0) + 1
        name = f"hyper_parallel/{_num_worlds_left}/{'-'.join(map(str, ranks))}/{num_times}"
        transport = transports.get_transport()
        return ProcessGroup(ranks, get_rank(), name, transport.make_group(ranks, name), transport)
