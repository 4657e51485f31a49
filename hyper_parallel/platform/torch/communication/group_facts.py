"""What is known about a group: its backends, how they carry each dtype and op; and the checks before communicating."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions

from hyper_parallel.platform.checks.collective_checks import short
from hyper_parallel.platform.shared.framework_of import kind_of
from hyper_parallel.platform.torch.communication import groups
from hyper_parallel.platform.torch.communication.carried_reductions import (
    BACKENDS,
    OTHER_BACKEND,
    Carrier,
    find_carrier,
    why_not,
)
from hyper_parallel.platform.torch.communication.ledgers import Ledger, open_ledger
from hyper_parallel.platform.torch.communication.lost_ranks import introduce
from hyper_parallel.platform.torch.communication.pretend_groups import PretendGroup

# ---------------------------------------------------------------- what is known about a group


class GroupFacts:
    """What the collectives have found out about one group; holds no reference to it, so it can be destroyed."""

    __slots__ = ("backends", "broadcasts", "ledger", "movable", "places", "rank", "ranks", "reductions", "size")

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.size: int = group.size()
        self.rank: int = group.rank()
        try:
            self.ranks = groups.get_process_group_ranks(group)
        except KeyError:
            raise ValueError(
                f"torch.distributed does not know this group of {self.size} ranks: it was destroyed, or made without "
                "torch.distributed; make one with create_group"
            ) from None
        self.places = {rank: place for place, rank in enumerate(self.ranks)}
        self.backends = groups.backend_by_device_type(group)
        # (device, dtype): whether the backend moves it as it is, or as bytes.
        self.movable: dict[tuple, bool] = {}
        # (device, dtype, op): how it is reduced.
        self.reductions: dict[tuple, Reduction] = {}
        # (group rank of the source, async_op)
        self.broadcasts: dict[tuple[int, bool], dist.BroadcastOptions] = {}
        # Told of each call before it begins; None where there is nobody to compare with.
        self.ledger: Ledger | None = None

    def where(self) -> str:
        return f"on rank {self.ranks[self.rank]} of the group {short(self.ranks)}"


class Reduction:
    """How one (device, dtype, op) is reduced over one group; the options are for sync and async."""

    __slots__ = ("carrier", "is_native", "options", "scatter_options")

    def __init__(self, carrier: Carrier | None, scatters: bool) -> None:
        self.carrier = carrier
        self.is_native = carrier is not None and carrier.load is None
        self.options = tuple(make_options(dist.AllreduceOptions, a, carrier.op) for a in (0, 1)) if carrier else None
        self.scatter_options = None
        if self.is_native and scatters:
            self.scatter_options = tuple(make_options(dist.ReduceScatterOptions, a, carrier.op) for a in (0, 1))


def make_options(kind: type, async_op: bool, reduce_op: Any = None) -> Any:
    options = kind()
    options.asyncOp = bool(async_op)
    if reduce_op is not None:
        options.reduceOp = reduce_op
    return options


GATHER_OPTIONS = (make_options(AllgatherOptions, False), make_options(AllgatherOptions, True))
known_facts: dict[int, GroupFacts] = {}  # By the group's id: an entry goes when its group does.


def find_facts(group_info: Any) -> tuple[dist.ProcessGroup, GroupFacts]:
    group = groups.unwrap_group(group_info)
    key = id(group)
    facts = known_facts.get(key)
    if facts is None:
        facts = known_facts[key] = GroupFacts(group)
        if isinstance(group, PretendGroup):
            facts.ledger = group.ledger
        else:
            introduce()
            if facts.size > 1 and "gloo" in facts.backends.values():
                facts.ledger = open_ledger(group, facts.ranks)
        weakref.finalize(group, known_facts.pop, key, None).atexit = False
    return group, facts


def _forget(group: dist.ProcessGroup | None) -> None:
    for key in list(known_facts) if group is None else [id(group)]:
        facts = known_facts.pop(key, None)
        if facts is not None and facts.ledger is not None:
            facts.ledger.close()


groups.on_destroy.append(_forget)


def find_movable(function: str, data: Any, facts: GroupFacts) -> bool:
    """Whether the backend moves such tensors as they are; remembered. Raises when it has none for their device."""
    if not isinstance(data, torch.Tensor):
        raise TypeError(f"{function} takes a tensor, not a {kind_of(data)}")
    name = facts.backends.get(data.device.type)
    if name is None:
        raise ValueError(
            f"{function} {facts.where()}: the tensor of shape {tuple(data.shape)} is on {data.device}, but the group "
            f"communicates tensors on {' or '.join(facts.backends)}; move it with .to({next(iter(facts.backends))!r})"
        )
    movable = data.dtype in BACKENDS.get(name, OTHER_BACKEND).moves
    facts.movable[data.device, data.dtype] = movable
    return movable


def find_reduction(function: str, data: Any, op: str, facts: GroupFacts) -> Reduction:
    find_movable(function, data, facts)
    problem = why_not(op, data.dtype)
    if problem is not None:
        raise ValueError(f"{function} {facts.where()}, shape {tuple(data.shape)}: {problem}")
    backend = BACKENDS.get(facts.backends[data.device.type], OTHER_BACKEND)
    found = Reduction(find_carrier(op, data.dtype, backend), backend.scatters_reductions)
    facts.reductions[data.device, data.dtype, op] = found
    return found


def group_rank_of(function: str, rank: int | None, role: str, facts: GroupFacts) -> int:
    """The group rank of world rank ``rank``."""
    place = facts.places.get(rank)
    if place is None:
        raise ValueError(
            f"{function} {facts.where()}: {role}={rank} is not in the group; "
            f"{role} is a rank of the world, here one of {short(facts.ranks)}"
        )
    return place


def peer_of(function: str, rank: int | None, role: str, facts: GroupFacts) -> int:
    place = group_rank_of(function, rank, role, facts)
    if place == facts.rank:
        raise ValueError(f"{function} {facts.where()}: {role}={rank} is this rank itself; copy the tensor instead")
    return place


# ---------------------------------------------------------------- memory


def contiguous(data: torch.Tensor) -> torch.Tensor:
    """``data``, or a copy of it, with plain memory in row-major order."""
    if data.is_contiguous() and not data.is_conj() and not data.is_neg():
        return data.detach()
    return data.new_empty(data.shape).copy_(data.detach())


def check_writable(function: str, data: torch.Tensor, facts: GroupFacts) -> None:
    if any(stride == 0 and size > 1 for size, stride in zip(data.shape, data.stride(), strict=True)):
        raise ValueError(
            f"{function} {facts.where()} writes into its tensor, but this one of shape {tuple(data.shape)} is "
            "expanded: several elements share memory; pass a .clone() of it"
        )


def check_out(function: str, out: torch.Tensor, shape: Sequence[int], data: torch.Tensor, facts: GroupFacts) -> None:
    """Raise unless ``out`` is memory for a result of this shape."""
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"{function} {facts.where()}: out must be a tensor, got a {type(out).__name__}")
    is_like = out.dtype == data.dtype and out.device == data.device
    if tuple(out.shape) != tuple(shape) or not is_like or not out.is_contiguous() or out.requires_grad:
        raise ValueError(
            f"{function} {facts.where()}: out must be contiguous, without a gradient, of shape {tuple(shape)} and "
            f"{data.dtype} on {data.device}; got shape {tuple(out.shape)}, {out.dtype} on {out.device}, strides "
            f"{out.stride()}, requires_grad={out.requires_grad}"
        )
