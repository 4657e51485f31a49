"""Messages from one rank to another: tensors, and lists of picklable objects; and objects gathered from all ranks."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.platform.checks.collective_checks import check_message, describe_objects
from hyper_parallel.platform.checks.collective_observers import announce, observers, telling, wait_observers
from hyper_parallel.platform.torch.base.tensors import as_bytes
from hyper_parallel.platform.torch.communication import groups
from hyper_parallel.platform.torch.communication.group_facts import (
    GroupFacts,
    check_writable,
    contiguous,
    find_facts,
    find_movable,
    known_facts,
    peer_of,
)
from hyper_parallel.platform.torch.communication.groups import connecting
from hyper_parallel.platform.torch.communication.handles import PendingResult
from hyper_parallel.platform.torch.communication.lost_ranks import Handle, named, naming_lost_ranks
from hyper_parallel.platform.torch.communication.pretend_groups import PretendGroup, unpickled
from hyper_parallel.platform.torch.communication.rank_agreement import COMPARES_RANKS, compare_calls

__all__ = ["all_gather_object", "irecv", "isend", "leave_by_failure", "recv_object_list", "send_object_list"]


def isend(tensor: torch.Tensor, dst: int | None = None, group: Any = None, tag: int = 0) -> Any:
    """Start sending to world rank ``dst``; a handle."""
    facts = known_facts.get(id(group))
    if facts is None:
        group, facts = find_facts(group)
    try:
        dtype = tensor.dtype
        movable = facts.movable[tensor.device, dtype]
    except (KeyError, AttributeError):
        movable = find_movable("isend", tensor, facts)
    place = facts.places.get(dst)
    if place is None or place == facts.rank:
        place = peer_of("isend", dst, "dst", facts)
    if connecting:
        groups.wait_until_connected(group)
    call = announce("isend", group, tensor, True, peer=dst, tag=tag) if observers or wait_observers else None
    if facts.ledger is not None:
        facts.ledger.send(place, tag, tensor.numel(), dtype)
    if tensor.requires_grad or not movable or not tensor.is_contiguous():
        tensor = contiguous(tensor)
        if not movable:
            tensor = as_bytes(tensor)
    try:
        handle = Handle(group.send([tensor], place, tag))
    except RuntimeError as error:
        raise named(error) from error
    return handle if call is None else telling(handle, call)


def irecv(tensor: torch.Tensor, src: int | None = None, group: Any = None, tag: int = 0) -> Any:
    """Start receiving into ``tensor`` from world rank ``src``, or from whoever sends first; a handle."""
    facts = known_facts.get(id(group))
    if facts is None:
        group, facts = find_facts(group)
    try:
        dtype = tensor.dtype
        movable = facts.movable[tensor.device, dtype]
    except (KeyError, AttributeError):
        movable = find_movable("irecv", tensor, facts)
    place = facts.places.get(src)
    if src is not None and (place is None or place == facts.rank):
        place = peer_of("irecv", src, "src", facts)
    if src is None and facts.size == 1:
        raise ValueError(f"irecv {facts.where()}: there is no other rank to receive from")
    plain = tensor
    if tensor.requires_grad or not movable or not tensor.is_contiguous():
        check_writable("irecv", tensor, facts)
        plain = contiguous(tensor)
    if connecting:
        groups.wait_until_connected(group)
    call = announce("irecv", group, tensor, True, peer=src, tag=tag) if observers or wait_observers else None
    if facts.ledger is not None:
        facts.ledger.receive(place, tag, tensor.numel(), dtype)
    buffer = [plain if movable else as_bytes(plain)]
    try:
        work = group.recv_anysource(buffer, tag) if place is None else group.recv(buffer, place, tag)
    except RuntimeError as error:
        raise named(error) from error
    is_in_place = plain is tensor or plain.data_ptr() == tensor.data_ptr()
    handle = Handle(work) if is_in_place else PendingResult(work, lambda: tensor.copy_(plain))
    return handle if call is None else telling(handle, call)


def leave_by_failure(group: Any, why: str) -> None:
    """Close the group's connections and leave the reason for who waits on them; see ``ledgers.py``."""
    _, facts = find_facts(group)
    refuse = getattr(facts.ledger, "refuse", None)
    if refuse is not None:
        with contextlib.suppress(RuntimeError):  # the caller has an error of its own to raise
            refuse(why)


# ---------------------------------------------------------------- objects


def send_object_list(obj_list: list[Any], dst: int | None = None, group: Any = None) -> None:
    """Send picklable objects to world rank ``dst``."""
    group, facts = find_facts(group)
    place = peer_of("send_object_list", dst, "dst", facts)
    groups.wait_until_connected(group)
    if not obj_list:
        return
    pickled = [pickle.dumps(obj) for obj in obj_list]
    if observers:
        announce("send_object_list", group, None, num_bytes=sum(map(len, pickled)), peer=dst)
    if facts.ledger is not None:
        facts.ledger.send(place, 0, len(obj_list))
    if COMPARES_RANKS:
        mine = describe_objects("send_object_list", objects=len(obj_list), peer=dst)
        _send_pickled([pickle.dumps(mine)], place, group, facts)
    _send_pickled(pickled, place, group, facts)


def _send_pickled(pickled: list[bytes], place: int, group: dist.ProcessGroup, facts: GroupFacts) -> None:
    if isinstance(group, PretendGroup):
        group.send_objects(pickled, place)
        return
    device = _object_device(facts)
    sizes = torch.tensor([len(one) for one in pickled], dtype=torch.int64, device=device)
    whole = torch.frombuffer(bytearray().join(pickled), dtype=torch.uint8).to(device)
    with naming_lost_ranks():
        dist.send(sizes, group=group, group_dst=place)
        dist.send(whole, group=group, group_dst=place)


def recv_object_list(obj_list: list[Any], src: int | None = None, group: Any = None) -> int | None:
    """Fill ``obj_list`` with as many objects from world rank ``src``, or from whoever sends first; gives that rank."""
    group, facts = find_facts(group)
    place = None if src is None else peer_of("recv_object_list", src, "src", facts)
    if src is None and facts.size == 1:
        raise ValueError(f"recv_object_list {facts.where()}: there is no other rank to receive from")
    groups.wait_until_connected(group)
    if not obj_list:
        return src
    if observers:
        announce("recv_object_list", group, None, peer=src)
    if facts.ledger is not None:
        facts.ledger.receive(place, 0, len(obj_list))
    if COMPARES_RANKS:
        mine, box = describe_objects("recv_object_list", objects=len(obj_list), peer=src), [None]
        src = _receive_objects(box, src, group, facts)
        try:
            check_message(box[0], mine, src, facts.ranks[facts.rank], facts.ranks)
        except RuntimeError as error:
            if facts.ledger is not None:
                facts.ledger.refuse(str(error))  # which tells the sender too
            raise
    return _receive_objects(obj_list, src, group, facts)


def _receive_objects(obj_list: list[Any], src: int | None, group: dist.ProcessGroup, facts: GroupFacts) -> int:
    if isinstance(group, PretendGroup):
        found, pickled = group.receive_objects(len(obj_list), None if src is None else facts.places[src])
        obj_list[:] = unpickled(pickled)
        return facts.ranks[found]
    device = _object_device(facts)
    sizes = torch.empty(len(obj_list), dtype=torch.int64, device=device)
    with naming_lost_ranks():
        src = dist.recv(sizes, src, group)
        lengths = sizes.tolist()
        pickled = torch.empty(sum(lengths), dtype=torch.uint8, device=device)
        dist.recv(pickled, src, group)
    for index, piece in enumerate(pickled.cpu().split(lengths)):
        obj_list[index] = pickle.loads(piece.numpy().tobytes())
    return src


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """Fill ``object_list`` with every rank's ``obj``, in group order."""
    group, facts = find_facts(group)
    if len(object_list) != facts.size:
        raise ValueError(
            f"all_gather_object {facts.where()}: object_list has {len(object_list)} places for {facts.size} objects; "
            f"pass [None] * {facts.size}"
        )
    if facts.size == 1:
        object_list[0] = obj
        return
    groups.wait_until_connected(group)
    if COMPARES_RANKS:
        compare_calls(describe_objects("all_gather_object"), group, facts)
    pickled = pickle.dumps(obj)
    if observers:
        announce("all_gather_object", group, None, num_bytes=len(pickled))
    parts: list[Any] = [None] * facts.size
    if facts.ledger is not None:
        facts.ledger.enter("all_gather_object")
    if isinstance(group, PretendGroup):
        parts = group.gather_objects(pickled)
    else:
        with naming_lost_ranks():
            dist.all_gather_object(parts, pickled, group=group)
    object_list[:] = unpickled(parts)


def _object_device(facts: GroupFacts) -> torch.device:
    """Where torch.distributed puts pickled objects: host memory if the group communicates it."""
    kind = "cpu" if "cpu" in facts.backends else next(iter(facts.backends))
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
