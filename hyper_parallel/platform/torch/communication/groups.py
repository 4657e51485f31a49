"""Process groups and ranks on PyTorch: joining and leaving the world, making groups of its ranks, asking who is where.

Note [Creating groups never deadlocks]
--------------------------------------
Only the members of a group create it, each whenever it gets there, also in cyclic order: rank 0 makes [0, 1] then
[0, 2], rank 1 makes [1, 2] then [0, 1], rank 2 makes [0, 2] then [1, 2]. ``torch.distributed.new_group`` cannot do it:

1. It wants every rank of the world to call. With ``use_local_synchronization=True`` only the members call, but the
   group's name then counts the groups that *this* rank has made before, so ranks with different histories give one
   group two names and never meet. Our name is made of the ranks and of how often this very set was made before.
2. Gloo connects all members inside the constructor, each waiting for the others: a cycle waits for ever. We make the
   group with Gloo's lazy connections, so the constructor only writes this rank's address into the store.
3. A lazily connected group would look up its peers' addresses at its first operation with a blocking read that keeps
   the process's one connection to the store busy; a second group could not even write its address meanwhile, and the
   cycle is back. And the first ``isend`` to a peer would wait until that peer turns to this rank too. So each new group
   has a short-lived thread that polls the store until all members have created the group, then exchanges one byte with
   each of them. Each group has its own thread, so no group waits for another.
4. With a device bound to the world (``device_id``) NCCL would split the world's communicator, which all ranks of the
   world must join. The binding is hidden while the group is made; NCCL then connects at the first collective.

Hence: creating never waits, and the *first use* of a group waits until every member has created it (or says which
ranks did not, when the timeout is over).
"""

from __future__ import annotations

import hashlib
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from hyper_parallel.platform.checks.collective_observers import announce, observers, telling, wait_observers
from hyper_parallel.platform.checks.group_checks import (
    DONE,
    check_members,
    global_rank_of,
    part_of_split,
    refuse_member,
)
from hyper_parallel.platform.platform import EXISTING_COMM_GROUPS
from hyper_parallel.platform.shared.membership import current_member
from hyper_parallel.platform.torch.base import devices
from hyper_parallel.platform.torch.communication.group_connections import (
    Connection,
    connecting,
    creation_lock,
    stop_connecting,
    wait_until_connected,
)
from hyper_parallel.platform.torch.communication.lost_ranks import Handle, naming_lost_ranks, world_store
from hyper_parallel.platform.torch.communication.pretend_groups import PretendGroup
from hyper_parallel.platform.torch.private_api import new_named_group

__all__ = [
    "barrier",
    "destroy_process_group",
    "get_backend",
    "get_global_rank",
    "get_group_local_rank",
    "get_process_group_ranks",
    "get_rank",
    "get_world_size",
    "init_process_group",
    "make_group",
    "on_leaving",
    "split_group",
    "world_generation",
]

# Called with each group that is destroyed, None for the world, so that caches about it can be dropped.
on_destroy: list[Callable[[dist.ProcessGroup | None], None]] = []
# Called with a group before a barrier begins in it; raises where its ranks are known to do something else.
before_barrier: list[Callable[[dist.ProcessGroup], None]] = []

_GLOO_LAZY = "TORCH_GLOO_LAZY_INIT"
_num_times_made: dict[tuple[int, ...], int] = {}
_num_worlds_left = 0  # with our own function, which every rank calls
_generation = 0  # worlds that were left in any way
_known_world: weakref.ref[dist.ProcessGroup] | None = None  # the one that the tables here are about
_world_timeout: timedelta | None = None

# ---------------------------------------------------------------- the world


def init_process_group(
    backend: str | None = None,
    *,
    init_method: str | None = None,
    timeout: timedelta | None = None,
    world_size: int = -1,
    rank: int = -1,
    store: dist.Store | None = None,
    pg_options: Any = None,
    device_id: torch.device | int | None = None,
) -> None:
    """Join the world. ``backend=None``: Gloo for CPU tensors and the accelerator's own backend, if there is one."""
    global _world_timeout
    refuse_member("init_process_group")
    if dist.is_initialized():
        raise RuntimeError(
            f"init_process_group: this process is already rank {dist.get_rank()} of a world of {dist.get_world_size()} "
            f"(backend {dist.get_backend()}); call destroy_process_group() first to leave it"
        )
    _notice_world()
    if store is None and init_method in (None, "env://"):
        _check_environment(rank, world_size)
    if backend is None:
        backend = _default_backend()
    if _num_worlds_left:
        # The store may outlive the world (that of torchrun does) and still hold the addresses of the last one.
        if store is None:
            limit = timeout or c10d.default_pg_timeout
            store, rank, world_size = next(dist.rendezvous(init_method or "env://", rank, world_size, timeout=limit))
            store.set_timeout(limit)
            init_method = None
        store = dist.PrefixStore(f"hyper_parallel_world_{_num_worlds_left}", store)
    dist.init_process_group(
        backend,
        init_method=init_method,
        timeout=timeout,
        world_size=world_size,
        rank=rank,
        store=store,
        pg_options=pg_options,
        device_id=device_id,
    )
    _world_timeout = timeout


def destroy_process_group(group: Any = None) -> None:
    """Leave ``group``, or the world and every group made in it; ``create_group`` no longer knows them."""
    global _num_worlds_left
    leaving = unwrap_group(group)
    if leaving is dist.group.WORLD or leaving is getattr(current_member(), "world_group", None):
        refuse_member("destroy_process_group")
    if isinstance(leaving, PretendGroup):
        for ranks in [ranks for ranks, known in EXISTING_COMM_GROUPS.items() if known is leaving]:
            del EXISTING_COMM_GROUPS[ranks]
        return
    if leaving is dist.group.WORLD:
        _forget_world()
        _num_worlds_left += 1
        del leaving  # torch drops its own references to the world
        dist.destroy_process_group()
        return
    for ranks, known in list(EXISTING_COMM_GROUPS.items()):
        if known is leaving:
            del EXISTING_COMM_GROUPS[ranks]
    stop_connecting([leaving])
    for forget in on_destroy:
        forget(leaving)
    dist.destroy_process_group(leaving)


def _forget_world() -> None:
    global _generation, _known_world
    EXISTING_COMM_GROUPS.clear()
    stop_connecting(list(connecting))
    for forget in on_destroy:
        forget(None)
    _num_times_made.clear()
    _generation += 1
    _known_world = None


def _notice_world() -> None:
    """Forget a world that was left with ``torch.distributed.destroy_process_group``."""
    global _known_world
    world = dist.group.WORLD
    if _known_world is not None:
        if world is not None and world is _known_world():
            return
        _forget_world()
    if world is not None:
        _known_world = weakref.ref(world)


def world_generation() -> int:
    """How many worlds this process has left: what is remembered about groups holds for one of them."""
    member = current_member()
    if member is not None:
        return member.generation
    _notice_world()
    return _generation


def on_leaving(forget: Callable[[], None]) -> None:
    """Call ``forget()`` whenever a group or the world is left: in the next one this rank may have another place."""
    on_destroy.append(lambda group: forget())


def _default_backend() -> str:
    device_type = devices.get_device_type()
    if device_type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"


def _check_environment(rank: int, world_size: int) -> None:
    needed = ["MASTER_ADDR", "MASTER_PORT"]
    needed += ["RANK"] if rank < 0 else []
    needed += ["WORLD_SIZE"] if world_size < 0 else []
    missing = [name for name in needed if name not in os.environ]
    if missing:
        raise ValueError(
            f"init_process_group: the environment does not say {', '.join(missing)}; start the program with torchrun, "
            f"set {'it' if len(missing) == 1 else 'them'}, or pass rank=, world_size= and init_method='tcp://host:port'"
        )


# ---------------------------------------------------------------- who is where


def unwrap_group(group: Any) -> dist.ProcessGroup:
    """The process group that is meant: itself, the world for None, or the ``group`` attribute of ``group``."""
    if isinstance(group, (dist.ProcessGroup, PretendGroup)):
        return group
    if group is None:
        member = current_member()
        if member is not None:
            return member.world_group
        if not dist.is_initialized():
            raise RuntimeError("there is no process group yet; call init_process_group() first")
        return dist.group.WORLD
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"rank {get_rank()} is not a member of this group; only members use it")
    if hasattr(group, "group"):
        return unwrap_group(group.group)
    raise TypeError(
        f"expected a process group, None for the world, or an object with a .group, not a {type(group).__name__}"
    )


def get_rank() -> int:
    """This process's rank in the world; 0 before there is one."""
    member = current_member()
    if member is not None:
        return member.asked_rank()
    return dist.get_rank() if dist.is_initialized() else 0


def get_world_size() -> int:
    """The number of processes in the world; 1 before there is one."""
    member = current_member()
    if member is not None:
        return member.world_size
    return dist.get_world_size() if dist.is_initialized() else 1


def get_global_rank(group: Any, group_rank: int) -> int:
    """The world rank of the ``group_rank``-th member of ``group``."""
    return global_rank_of(get_process_group_ranks(group), group_rank)


def get_group_local_rank(group: Any = None) -> int:
    """This process's rank inside ``group``; 0 before there is a world."""
    if (member := current_member()) is not None:
        member.asked_rank()
    return unwrap_group(group).rank() if group is not None or _has_world() else 0


def get_process_group_ranks(group: Any = None) -> list[int]:
    """The world ranks of ``group``, in group order; [0] before there is a world."""
    if group is None and not _has_world():
        return [0]
    group = unwrap_group(group)
    return list(group.ranks) if isinstance(group, PretendGroup) else dist.get_process_group_ranks(group)


def _has_world() -> bool:
    return current_member() is not None or dist.is_initialized()


def get_backend(group: Any = None) -> str:
    """The transport of ``group``, as given to ``init_process_group``: "gloo", "cpu:gloo,cuda:nccl"."""
    group = unwrap_group(group)
    return "pretend" if isinstance(group, PretendGroup) else str(dist.get_backend(group))


def barrier(group: Any = None, async_op: bool = False, device_ids: Sequence[int] | None = None) -> Any:
    """Wait until every rank of ``group`` is here; with ``async_op`` return a handle instead."""
    group = unwrap_group(group)
    if group.size() == 1:
        return DONE if async_op else None
    wait_until_connected(group)
    call = announce("barrier", group, None, async_op) if observers or wait_observers else None
    for prepare in before_barrier:
        prepare(group)
    if isinstance(group, PretendGroup):
        work = group.barrier()
        if not async_op:
            work.wait()
        return telling(work, call) if async_op else None
    with naming_lost_ranks():
        work = dist.barrier(group, async_op=async_op, device_ids=None if device_ids is None else list(device_ids))
    return None if work is None else telling(Handle(work), call)


# ---------------------------------------------------------------- making groups


def make_group(rank_list: Sequence[int]) -> dist.ProcessGroup:
    """A group of exactly these ranks; only they call it, in any order, and it never waits for the others."""
    world = unwrap_group(None)
    ranks = sorted(rank_list)
    check_members(f"make_group({ranks})", ranks, world.size(), world.rank())
    if len(ranks) == world.size():
        return world
    return _new_group(ranks, _world_timeout, None, None)


def split_group(
    parent_pg: Any = None,
    split_ranks: Sequence[Sequence[int]] | None = None,
    timeout: timedelta | None = None,
    pg_options: Any = None,
    group_desc: str | None = None,
) -> dist.ProcessGroup | None:
    """A new group for each list of ranks *of the parent group*; this rank gets its own, or None if no list names it."""
    parent = unwrap_group(parent_pg)
    mine = part_of_split(split_ranks, get_process_group_ranks(parent), parent.rank())
    if mine is None:
        return None
    return _new_group(mine, timeout or _world_timeout, pg_options, group_desc)


def _new_group(
    ranks: list[int], timeout: timedelta | None, pg_options: Any, group_desc: str | None
) -> dist.ProcessGroup:
    member = current_member()
    if member is not None:
        return member.make_group(member, tuple(ranks))
    _notice_world()
    world = dist.group.WORLD
    with creation_lock:
        name = _group_name(ranks)
        limit = timeout or c10d.default_pg_timeout
        with _connected_lazily(world):
            group, store = new_named_group(
                name,
                ranks,
                ranks.index(world.rank()),
                world_store(),
                backend=dist.get_backend(world),
                backend_options=pg_options,
                timeout=limit,
                group_desc=group_desc,
            )
        if world.bound_device_id is not None:
            group.bound_device_id = world.bound_device_id
        if len(ranks) > 1 and _uses_gloo(group):
            connecting[group] = Connection(group, store, ranks, limit)
    return group


def _group_name(ranks: list[int]) -> str:
    key = tuple(ranks)
    num_times = _num_times_made[key] = _num_times_made.get(key, 0) + 1
    text = "-".join(map(str, ranks))
    if len(text) > 60:
        text = f"{len(ranks)}-ranks-{hashlib.sha256(text.encode()).hexdigest()[:32]}"
    return f"hyper_parallel/{text}/{num_times}"


@contextmanager
def _connected_lazily(world: dist.ProcessGroup) -> Iterator[None]:
    """Inside, a new group is made without waiting for its other members."""
    bound_device, lazy = world.bound_device_id, os.environ.get(_GLOO_LAZY)
    os.environ[_GLOO_LAZY] = "1"
    if bound_device is not None:
        world.bound_device_id = None
    try:
        yield
    finally:
        if bound_device is not None:
            world.bound_device_id = bound_device
        if lazy is None:
            del os.environ[_GLOO_LAZY]
        else:
            os.environ[_GLOO_LAZY] = lazy


def backend_by_device_type(group: dist.ProcessGroup) -> dict[str, str]:
    """Which backend carries the tensors of which device type."""
    if isinstance(group, PretendGroup):  # which carries what gloo does, also without memory
        return {"cpu": "gloo", "meta": "gloo"}
    return dict(part.split(":") for part in dist.get_backend_config(group).split(","))


def _uses_gloo(group: dist.ProcessGroup) -> bool:
    return backend_by_device_type(group).get("cpu") == "gloo"
