"""Collectives and messages on plain tensors, for every dtype, stride and size; the checks, and what observers are told.

A group is a :class:`ProcessGroup`, None for the world, or an object with a ``group`` attribute. A collective gives its
result, or ``(result, handle)`` with ``async_op=True``; the result is complete once ``handle.wait()`` has returned. In a
group of one rank nothing is communicated. Mistakes that one rank can see are raised there before anything is sent.

Ranks that disagree are told so when what came does not fit: another operation, or another number of bytes. With
``HYPER_PARALLEL_CHECK_COLLECTIVES=1`` they first gather what each is about to do and where in the program, and all of
them raise the same error. A message of objects is compared by its receiver.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from math import prod
from typing import Any

from mindspore import Tensor

from hyper_parallel.platform.checks.collective_checks import (
    COMPARES_RANKS,
    check_agreement,
    check_message,
    check_splits,
    describe_call,
    describe_objects,
    short,
)
from hyper_parallel.platform.checks.collective_observers import (
    CollectiveCall,
    announce,
    observers,
    tell_end,
    telling,
    wait_observers,
)
from hyper_parallel.platform.host.host_collectives import why_not
from hyper_parallel.platform.mindspore.base.devices import get_device_type
from hyper_parallel.platform.mindspore.base.memory import numpy_type
from hyper_parallel.platform.mindspore.base.tensors import detached, dtype_name, is_meta, overwrite, own_copy
from hyper_parallel.platform.mindspore.communication import groups, transports
from hyper_parallel.platform.mindspore.communication.groups import DONE, ProcessGroup, unwrap_group
from hyper_parallel.platform.shared.framework_of import kind_of

__all__ = [
    "CollectiveCall",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all_single",
    "broadcast",
    "irecv",
    "isend",
    "observers",
    "recv_object_list",
    "reduce_scatter_tensor",
    "send_object_list",
]


def where(group: ProcessGroup) -> str:
    return f"on rank {group.ranks[group.rank()]} of the group {short(group.ranks)}"


# ---------------------------------------------------------------- checks


def _checked(function: str, data: Any, group_info: Any, **arguments: Any) -> ProcessGroup:
    """The group that is meant, once the tensor is found to be one and, if asked for, the ranks to agree."""
    group = unwrap_group(group_info)
    if COMPARES_RANKS and group.size() > 1:
        if isinstance(data, Tensor):
            mine = describe_call(function, tuple(data.shape), dtype_name(data.dtype), data.device, **arguments)
        else:
            mine = describe_call(function, None, type(data).__name__, None, **arguments)
        _compare(mine, group)
    if not isinstance(data, Tensor):
        raise TypeError(f"{function} takes a tensor, not a {kind_of(data)}")
    _check_has_memory(function, data, group)
    return group


def _compare(mine: dict, group: ProcessGroup) -> None:
    """Raise the same error on every rank of the group unless all are about to do the same."""
    check_agreement(_gathered(pickle.dumps(mine), group), group.ranks)


def _announce_barrier(group: ProcessGroup) -> None:
    if COMPARES_RANKS:
        _compare(describe_objects("barrier"), group)


groups.before_barrier.append(_announce_barrier)


def _check_has_memory(function: str, data: Tensor, group: ProcessGroup) -> None:
    if is_meta(data) and not group.transport.carries_meta:
        device = get_device_type()
        raise ValueError(
            f"{function} {where(group)}: the tensor of shape {tuple(data.shape)} is on meta, but the group "
            f"communicates tensors on {device}; move it with .to({device!r})"
        )


def _check_op(function: str, data: Tensor, op: str, group: ProcessGroup) -> None:
    problem = why_not(op, numpy_type(data.dtype), dtype_name(data.dtype))
    if problem is not None:
        raise ValueError(f"{function} {where(group)}, shape {tuple(data.shape)}: {problem}")


def _check_writable(function: str, data: Tensor, group: ProcessGroup) -> None:
    if data.numel() and any(stride == 0 and size > 1 for size, stride in zip(data.shape, data.stride(), strict=True)):
        raise ValueError(
            f"{function} {where(group)} writes into its tensor, but this one of shape {tuple(data.shape)} is "
            "expanded: several elements share memory; pass a copy of it, tensor * 1"
        )


def group_rank_of(function: str, rank: int | None, role: str, group: ProcessGroup) -> int:
    """The group rank of world rank ``rank``."""
    if rank not in group.ranks:
        raise ValueError(
            f"{function} {where(group)}: {role}={rank} is not in the group; "
            f"{role} is a rank of the world, here one of {short(group.ranks)}"
        )
    return group.ranks.index(rank)


def _peer_of(function: str, rank: int | None, role: str, group: ProcessGroup) -> int:
    place = group_rank_of(function, rank, role, group)
    if place == group.rank():
        raise ValueError(f"{function} {where(group)}: {role}={rank} is this rank itself; copy the tensor instead")
    return place


def _given(result: Tensor, handle: Any, async_op: bool, call: CollectiveCall | None = None) -> Any:
    if async_op:
        return result, telling(handle, call)
    handle.wait()
    tell_end(call)
    return result


def _written(
    result: Tensor, handle: Any, async_op: bool, out: Tensor | None, call: CollectiveCall | None = None
) -> Any:
    """The result, put into ``out`` when it is complete, if that was given."""
    if out is None:
        return _given(result, handle, async_op, call)
    return _given(out, transports.Pending(lambda: (handle.wait(), overwrite(out, result))), async_op, call)


def check_out(function: str, out: Tensor, shape: Sequence[int], data: Tensor, group: ProcessGroup) -> None:
    """Raise unless ``out`` is memory for a result of this shape."""
    if not isinstance(out, Tensor):
        raise TypeError(f"{function} {where(group)}: out must be a tensor, got a {kind_of(out)}")
    if tuple(out.shape) != tuple(shape) or out.dtype != data.dtype or not out.is_contiguous():
        raise ValueError(
            f"{function} {where(group)}: out must be contiguous, of shape {tuple(shape)} and {data.dtype}; got shape "
            f"{tuple(out.shape)}, {out.dtype}, strides {tuple(out.stride())}"
        )


# ---------------------------------------------------------------- collectives


def all_reduce(data: Tensor, group_info: Any, async_op: bool = False, op: str = "sum") -> Any:
    """Reduce ``data`` over the group, in place; the same bits on every rank.

    ``op``: sum, avg, max, min, prod; band, bor, bxor for integers and bools; all, any for bools.
    """
    group = _checked("all_reduce", data, group_info, op=op)
    _check_op("all_reduce", data, op, group)
    if group.size() == 1:
        return (data, DONE) if async_op else data
    _check_writable("all_reduce", data, group)
    call = announce("all_reduce", group, data, async_op) if observers or wait_observers else None
    return _given(*group.transport.all_reduce(group.channel, data, op, async_op), async_op, call)


def all_gather_into_tensor(data: Tensor, group_info: Any, async_op: bool = False, *, out: Tensor | None = None) -> Any:
    """The ranks' equally shaped ``data``, concatenated on dim 0 in group order; of scalars, a vector.

    With ``out``, contiguous memory of the result's shape and dtype, ``out`` is the result.
    """
    group = _checked("all_gather_into_tensor", data, group_info)
    shape = tuple(data.shape) or (1,)
    whole = (shape[0] * group.size(), *shape[1:])
    if out is not None:
        check_out("all_gather_into_tensor", out, whole, data, group)
    if group.size() == 1:
        return _written(own_copy(data).reshape(shape), DONE, async_op, out)
    call = announce("all_gather_into_tensor", group, data, async_op) if observers or wait_observers else None
    return _written(*group.transport.all_gather(group.channel, data, whole), async_op, out, call)


def reduce_scatter_tensor(
    data: Tensor, group_info: Any, async_op: bool = False, op: str = "sum", *, out: Tensor | None = None
) -> Any:
    """Reduce ``data`` over the group and keep this rank's equal part of dim 0.

    ``op`` as for :func:`all_reduce`, ``out`` as for :func:`all_gather_into_tensor`.
    """
    group = _checked("reduce_scatter_tensor", data, group_info, op=op)
    _check_op("reduce_scatter_tensor", data, op, group)
    shape, size = tuple(data.shape), group.size()
    if not shape or shape[0] % size:
        raise ValueError(
            f"reduce_scatter_tensor {where(group)}: shape {shape} cannot be cut into {size} equal parts of "
            f"dim 0; pad dim 0 to a multiple of {size}"
        )
    part = (shape[0] // size, *shape[1:])
    if out is not None:
        check_out("reduce_scatter_tensor", out, part, data, group)
    if size == 1:
        return _written(own_copy(data), DONE, async_op, out)
    call = announce("reduce_scatter_tensor", group, data, async_op) if observers or wait_observers else None
    return _written(*group.transport.reduce_scatter(group.channel, data, op, part, async_op), async_op, out, call)


def broadcast(data: Tensor, src: int, group: Any, async_op: bool = False) -> Any:
    """Overwrite ``data`` with that of world rank ``src``, in place."""
    group = _checked("broadcast", data, group, src=src)
    place = group_rank_of("broadcast", src, "src", group)
    if group.size() == 1:
        return (data, DONE) if async_op else data
    _check_writable("broadcast", data, group)
    call = announce("broadcast", group, data, async_op, peer=src) if observers or wait_observers else None
    return _given(*group.transport.broadcast(group.channel, data, place), async_op, call)


def all_to_all_single(
    input_tensor: Tensor,
    output_shape: Sequence[int],
    group: Any,
    async_op: bool = False,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
) -> tuple[Tensor, Any]:
    """Part r of dim 0 goes to group rank r: equal parts, or ``input_splits[r]`` rows; ``output_splits[r]`` come back.

    Always ``(output, handle)``; the handle is None when the output is complete already.
    """
    output_shape = tuple(output_shape)
    splits = {"output_shape": output_shape, "output_splits": output_splits, "input_splits": input_splits}
    group = _checked("all_to_all_single", input_tensor, group, **splits)
    shape, size = tuple(input_tensor.shape), group.size()
    if output_splits is None and input_splits is None:
        if not shape or shape[0] % size or prod(shape) != prod(output_shape):
            raise ValueError(
                f"all_to_all_single {where(group)}: input of shape {shape}, output_shape {output_shape}: "
                f"without splits dim 0 of the input is cut into {size} equal parts and both have as many elements; "
                "pad the input, or give input_splits and output_splits"
            )
        sent = received = [prod(shape) // size] * size
        rows = None
    else:
        received_rows, sent_rows = check_splits(
            shape, output_shape, output_splits, input_splits, size, group.rank(), where(group)
        )
        row = prod(shape[1:])
        rows = tuple(map(int, sent_rows)), tuple(map(int, received_rows))
        sent, received = ([count * row for count in counts] for counts in rows)
    if size == 1:
        return own_copy(input_tensor).reshape(output_shape), DONE if async_op else None
    call = None
    if observers or wait_observers:
        call = announce("all_to_all_single", group, input_tensor, async_op, splits=rows)
    output, handle = group.transport.all_to_all(group.channel, input_tensor, output_shape, sent, received)
    result = _given(output, handle, async_op, call)
    return result if async_op else (result, None)


# ---------------------------------------------------------------- messages


def isend(tensor: Tensor, dst: int | None = None, group: Any = None, tag: int = 0) -> Any:
    """Start sending to world rank ``dst``; a handle."""
    group = _checked_for_message("isend", tensor, group)
    place = _peer_of("isend", dst, "dst", group)
    call = announce("isend", group, tensor, True, peer=dst, tag=tag) if observers or wait_observers else None
    return telling(group.transport.send(group.channel, tensor, place, tag), call)


def irecv(tensor: Tensor, src: int | None = None, group: Any = None, tag: int = 0) -> Any:
    """Start receiving into ``tensor`` from world rank ``src``, or from whoever sends first; a handle."""
    group = _checked_for_message("irecv", tensor, group)
    place = None if src is None else _peer_of("irecv", src, "src", group)
    if src is None and group.size() == 1:
        raise ValueError(f"irecv {where(group)}: there is no other rank to receive from")
    _check_writable("irecv", tensor, group)
    call = announce("irecv", group, tensor, True, peer=src, tag=tag) if observers or wait_observers else None
    return telling(group.transport.receive(group.channel, tensor, place, tag), call)


def exchange(tensor: Tensor, peer_rank: int, group: ProcessGroup) -> Tensor:
    """Send to and receive from the same world rank."""
    call = announce("p2p_exchange", group, tensor, peer=peer_rank) if observers else None
    received = group.transport.exchange(group.channel, detached(tensor), group.ranks.index(peer_rank))
    tell_end(call)
    return received


def _checked_for_message(function: str, data: Any, group_info: Any) -> ProcessGroup:
    group = unwrap_group(group_info)
    if not isinstance(data, Tensor):
        raise TypeError(f"{function} takes a tensor, not a {kind_of(data)}")
    _check_has_memory(function, data, group)
    return group


def send_object_list(obj_list: list[Any], dst: int | None = None, group: Any = None) -> None:
    """Send picklable objects to world rank ``dst``."""
    group = unwrap_group(group)
    place = _peer_of("send_object_list", dst, "dst", group)
    if not obj_list:
        return
    mine = describe_objects("send_object_list", objects=len(obj_list), peer=dst) if COMPARES_RANKS else None
    pickled = pickle.dumps((mine, list(obj_list)))
    if observers:
        announce("send_object_list", group, None, num_bytes=len(pickled), peer=dst)
    group.transport.send_bytes(group.channel, pickled, place)


def recv_object_list(obj_list: list[Any], src: int | None = None, group: Any = None) -> int | None:
    """Fill ``obj_list`` with as many objects from world rank ``src``, or from whoever sends first; gives that rank."""
    group = unwrap_group(group)
    place = None if src is None else _peer_of("recv_object_list", src, "src", group)
    if src is None and group.size() == 1:
        raise ValueError(f"recv_object_list {where(group)}: there is no other rank to receive from")
    if not obj_list:
        return src
    if observers:
        announce("recv_object_list", group, None, peer=src)
    place, data = group.transport.receive_bytes(group.channel, place)
    theirs, objects = pickle.loads(data)
    if COMPARES_RANKS:
        mine = describe_objects("recv_object_list", objects=len(obj_list), peer=src)
        check_message(theirs, mine, group.ranks[place], group.ranks[group.rank()], group.ranks)
    if len(objects) != len(obj_list):
        raise RuntimeError(
            f"recv_object_list {where(group)}: rank {group.ranks[place]} sent {len(objects)} objects for a list of "
            f"{len(obj_list)}"
        )
    obj_list[:] = objects
    return group.ranks[place]


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """Fill ``object_list`` with every rank's ``obj``, in group order."""
    group = unwrap_group(group)
    if len(object_list) != group.size():
        raise ValueError(
            f"all_gather_object {where(group)}: object_list has {len(object_list)} places for {group.size()} objects; "
            f"pass [None] * {group.size()}"
        )
    if group.size() == 1:
        object_list[0] = obj
        return
    if COMPARES_RANKS:
        _compare(describe_objects("all_gather_object"), group)
    pickled = pickle.dumps(obj)
    if observers:
        announce("all_gather_object", group, None, num_bytes=len(pickled))
    object_list[:] = _gathered(pickled, group)


def _gathered(pickled: bytes, group: ProcessGroup) -> list[Any]:
    return [pickle.loads(part) for part in group.transport.gather_bytes(group.channel, pickled)]
