"""Collectives and point-to-point messages on plain tensors, for every dtype, stride and size.

A group is a process group, None for the world, or an object with a ``group`` attribute. A collective gives its result,
or ``(result, handle)`` with ``async_op=True``; the result is complete once ``handle.wait()`` has returned, which also
makes the last local copy where there is one. In a group of one rank nothing is communicated.

Mistakes that one rank can see are raised there before anything is sent. Over gloo, ranks of one host that disagree with
each other (in the collective, shape, dtype, op or source) are told so by the later of them, before it sends anything,
and the group cannot be used any more (``ledgers.py``). With ``HYPER_PARALLEL_CHECK_COLLECTIVES=1`` ranks on any hosts
and over any backend are compared: each collective then first gathers what the ranks are about to do and where in the
program, all of them raise the same error, and the group can still be used.

Note [The fast path]
--------------------
What depends only on (group, device, dtype, op) is looked up in one dictionary per group; a missing entry is where all
the checks are. Then the process group's own method is called: ``torch.distributed.all_reduce`` and the like end there
too, after several microseconds of Python. Profiling and the flight recorder sit below and see no difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from hyper_parallel.platform.checks.collective_checks import check_splits, describe_objects
from hyper_parallel.platform.checks.collective_observers import CollectiveCall, announce, observers, wait_observers
from hyper_parallel.platform.torch.base.tensors import as_bytes
from hyper_parallel.platform.torch.communication import groups
from hyper_parallel.platform.torch.communication.carried_reductions import reduce_stacked
from hyper_parallel.platform.torch.communication.group_facts import (
    GATHER_OPTIONS,
    GroupFacts,
    Reduction,
    check_out,
    check_writable,
    contiguous,
    find_facts,
    find_movable,
    find_reduction,
    group_rank_of,
    known_facts,
    make_options,
)
from hyper_parallel.platform.torch.communication.groups import DONE, connecting
from hyper_parallel.platform.torch.communication.handles import finished, given
from hyper_parallel.platform.torch.communication.messages import (
    all_gather_object,
    irecv,
    isend,
    leave_by_failure,
    recv_object_list,
    send_object_list,
)
from hyper_parallel.platform.torch.communication.rank_agreement import COMPARES_RANKS, compare_calls, compare_ranks

__all__ = [
    "CollectiveCall",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all_single",
    "broadcast",
    "irecv",
    "isend",
    "leave_by_failure",
    "observers",
    "recv_object_list",
    "reduce_scatter_tensor",
    "send_object_list",
]

_EXCHANGE_OPTIONS = (make_options(dist.AllToAllOptions, False), make_options(dist.AllToAllOptions, True))


def _announce_barrier(group: dist.ProcessGroup) -> None:
    _, facts = find_facts(group)
    if COMPARES_RANKS:
        compare_calls(describe_objects("barrier"), group, facts)
    if facts.ledger is not None:
        facts.ledger.enter("barrier")


groups.before_barrier.append(_announce_barrier)


def _copied(data: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    return data.detach().clone(memory_format=torch.contiguous_format) if out is None else out.copy_(data.detach())


# ---------------------------------------------------------------- collectives


def all_reduce(data: torch.Tensor, group_info: Any, async_op: bool = False, op: str = "sum") -> Any:
    """Reduce ``data`` over the group, in place; the same bits on every rank.

    ``op``: sum, avg, max, min, prod; band, bor, bxor for integers and bools; all, any for bools.
    """
    facts = known_facts.get(id(group_info))
    if facts is None:
        group_info, facts = find_facts(group_info)
    if COMPARES_RANKS:
        compare_ranks("all_reduce", data, group_info, facts, op=op)
    try:
        dtype = data.dtype
        reduction = facts.reductions[data.device, dtype, op]
    except (KeyError, AttributeError, TypeError):
        reduction = find_reduction("all_reduce", data, op, facts)
    if facts.size == 1:
        return (data, DONE) if async_op else data
    if connecting:
        groups.wait_until_connected(group_info)
    call = announce("all_reduce", group_info, data, async_op) if observers or (async_op and wait_observers) else None
    if reduction.is_native and data.is_contiguous():
        if facts.ledger is not None:
            facts.ledger.enter("all_reduce", data.shape, dtype, op)
        work = group_info.allreduce([data.detach() if data.requires_grad else data], reduction.options[async_op])
        return given(data, work, async_op, call)
    return _all_reduce_carried(data, group_info, facts, reduction, async_op, op, call)


@torch.no_grad()
def _all_reduce_carried(
    data: torch.Tensor,
    group: dist.ProcessGroup,
    facts: GroupFacts,
    reduction: Reduction,
    async_op: bool,
    op: str,
    call: CollectiveCall | None,
) -> Any:
    check_writable("all_reduce", data, facts)
    plain = contiguous(data)
    carrier = reduction.carrier
    if carrier is None:
        stacked = data.new_empty((facts.size, *data.shape))
        if facts.ledger is not None:
            facts.ledger.enter("all_reduce", data.shape, data.dtype, op)
        work = group.all_gather_single(as_bytes(stacked), as_bytes(plain), GATHER_OPTIONS[async_op])
        return finished(data, work, async_op, call, lambda: reduce_stacked(stacked, op, data))
    carried = plain if carrier.load is None else carrier.load(plain)
    if facts.ledger is not None:
        facts.ledger.enter("all_reduce", data.shape, data.dtype, op)
    work = group.allreduce([carried], reduction.options[async_op])

    def finish() -> None:
        result = plain if carrier.store is None else carrier.store(carried, facts.size)
        if result.data_ptr() != data.data_ptr():
            data.copy_(result)

    return finished(data, work, async_op, call, finish)


def all_gather_into_tensor(
    data: torch.Tensor, group_info: Any, async_op: bool = False, *, out: torch.Tensor | None = None
) -> Any:
    """The ranks' equally shaped ``data``, concatenated on dim 0 in group order; of scalars, a vector.

    With ``out``, contiguous memory of the result's shape and dtype, nothing is allocated and ``out`` is the result.
    """
    facts = known_facts.get(id(group_info))
    if facts is None:
        group_info, facts = find_facts(group_info)
    if COMPARES_RANKS:
        compare_ranks("all_gather_into_tensor", data, group_info, facts)
    try:
        dtype = data.dtype
        movable = facts.movable[data.device, dtype]
    except (KeyError, AttributeError):
        movable = find_movable("all_gather_into_tensor", data, facts)
    shape = data.shape
    size = facts.size
    if out is not None:
        rows = shape or (1,)
        check_out("all_gather_into_tensor", out, (rows[0] * size, *rows[1:]), data, facts)
    if size == 1:
        result = _copied(data, out)
        result = result if shape or out is not None else result.reshape(1)
        return (result, DONE) if async_op else result
    if connecting:
        groups.wait_until_connected(group_info)
    call = (
        announce("all_gather_into_tensor", group_info, data, async_op)
        if observers or (async_op and wait_observers)
        else None
    )
    if movable and shape and data.is_contiguous():
        sent = data.detach() if data.requires_grad else data
        result = received = data.new_empty((shape[0] * size, *shape[1:])) if out is None else out
    else:
        sent = contiguous(data).reshape(-1)
        shape = shape or (1,)
        result = data.new_empty((shape[0] * size, *shape[1:])) if out is None else out
        received = result.view(-1)
        if not movable:
            sent, received = as_bytes(sent), as_bytes(received)
    if facts.ledger is not None:
        facts.ledger.enter("all_gather_into_tensor", shape, dtype)
    work = group_info.all_gather_single(received, sent, GATHER_OPTIONS[async_op])
    return given(result, work, async_op, call)


def reduce_scatter_tensor(
    data: torch.Tensor, group_info: Any, async_op: bool = False, op: str = "sum", *, out: torch.Tensor | None = None
) -> Any:
    """Reduce ``data`` over the group and keep this rank's equal part of dim 0.

    ``op`` as for :func:`all_reduce`, ``out`` as for :func:`all_gather_into_tensor`.
    """
    facts = known_facts.get(id(group_info))
    if facts is None:
        group_info, facts = find_facts(group_info)
    if COMPARES_RANKS:
        compare_ranks("reduce_scatter_tensor", data, group_info, facts, op=op)
    try:
        dtype = data.dtype
        reduction = facts.reductions[data.device, dtype, op]
    except (KeyError, AttributeError, TypeError):
        reduction = find_reduction("reduce_scatter_tensor", data, op, facts)
    shape = data.shape
    size = facts.size
    if not shape or shape[0] % size:
        raise ValueError(
            f"reduce_scatter_tensor {facts.where()}: shape {tuple(shape)} cannot be cut into {size} equal parts of "
            f"dim 0; pad dim 0 to a multiple of {size}"
        )
    if out is not None:
        check_out("reduce_scatter_tensor", out, (shape[0] // size, *shape[1:]), data, facts)
    if size == 1:
        result = _copied(data, out)
        return (result, DONE) if async_op else result
    if connecting:
        groups.wait_until_connected(group_info)
    call = (
        announce("reduce_scatter_tensor", group_info, data, async_op)
        if observers or (async_op and wait_observers)
        else None
    )
    if data.requires_grad or not data.is_contiguous():
        data = contiguous(data)
    result = data.new_empty((shape[0] // size, *shape[1:])) if out is None else out
    if reduction.scatter_options is not None:
        if facts.ledger is not None:
            facts.ledger.enter("reduce_scatter_tensor", shape, dtype, op)
        work = group_info.reduce_scatter_single(result, data, reduction.scatter_options[async_op])
        return given(result, work, async_op, call)
    # Each rank receives all addends of its own part and adds them up in rank order.
    stacked = data.new_empty((size, *result.shape))
    sent, received = data, stacked
    if not facts.movable[data.device, data.dtype]:
        sent, received = as_bytes(contiguous(data)), as_bytes(stacked)
    if facts.ledger is not None:
        facts.ledger.enter("reduce_scatter_tensor", shape, dtype, op)
    work = group_info.all_to_all_single(received, sent, (), (), _EXCHANGE_OPTIONS[async_op])
    return finished(result, work, async_op, call, lambda: reduce_stacked(stacked, op, result))


def broadcast(data: torch.Tensor, src: int, group: Any, async_op: bool = False) -> Any:
    """Overwrite ``data`` with that of world rank ``src``, in place."""
    facts = known_facts.get(id(group))
    if facts is None:
        group, facts = find_facts(group)
    if COMPARES_RANKS:
        compare_ranks("broadcast", data, group, facts, src=src)
    try:
        dtype = data.dtype
        movable = facts.movable[data.device, dtype]
    except (KeyError, AttributeError):
        movable = find_movable("broadcast", data, facts)
    place = facts.places.get(src)
    if place is None:
        place = group_rank_of("broadcast", src, "src", facts)
    if facts.size == 1:
        return (data, DONE) if async_op else data
    options = facts.broadcasts.get((place, async_op))
    if options is None:
        options = make_options(dist.BroadcastOptions, async_op)
        options.rootRank, options.rootTensor = place, 0
        facts.broadcasts[place, async_op] = options
    if connecting:
        groups.wait_until_connected(group)
    call = (
        announce("broadcast", group, data, async_op, peer=src) if observers or (async_op and wait_observers) else None
    )
    if movable and data.is_contiguous():
        if facts.ledger is not None:
            facts.ledger.enter("broadcast", data.shape, dtype, src)
        work = group.broadcast([data.detach() if data.requires_grad else data], options)
        return given(data, work, async_op, call)
    with torch.no_grad():
        check_writable("broadcast", data, facts)
        plain = contiguous(data)
        if facts.ledger is not None:
            facts.ledger.enter("broadcast", data.shape, dtype, src)
        work = group.broadcast([plain if movable else as_bytes(plain)], options)

        def finish() -> None:
            if plain.data_ptr() != data.data_ptr():
                data.copy_(plain)

        return finished(data, work, async_op, call, finish)


def all_to_all_single(
    input_tensor: torch.Tensor,
    output_shape: Sequence[int],
    group: Any,
    async_op: bool = False,
    output_splits: Sequence[int] | None = None,
    input_splits: Sequence[int] | None = None,
) -> tuple[torch.Tensor, Any]:
    """Part r of dim 0 goes to group rank r: equal parts, or ``input_splits[r]`` rows; ``output_splits[r]`` come back.

    Always ``(output, handle)``; the handle is None when the output is complete already.
    """
    facts = known_facts.get(id(group))
    if facts is None:
        group, facts = find_facts(group)
    output_shape = tuple(output_shape)
    if COMPARES_RANKS:
        arguments = {"output_shape": output_shape, "output_splits": output_splits, "input_splits": input_splits}
        compare_ranks("all_to_all_single", input_tensor, group, facts, **arguments)
    try:
        dtype = input_tensor.dtype
        movable = facts.movable[input_tensor.device, dtype]
    except (KeyError, AttributeError):
        movable = find_movable("all_to_all_single", input_tensor, facts)
    if output_splits is None and input_splits is None:
        shape = input_tensor.shape
        size = facts.size
        is_flat = shape != output_shape
        if not shape or shape[0] % size or (is_flat and shape.numel() != prod(output_shape)):
            raise ValueError(
                f"all_to_all_single {facts.where()}: input of shape {tuple(shape)}, output_shape {output_shape}: "
                f"without splits dim 0 of the input is cut into {size} equal parts and both have as many elements; "
                "pad the input, or give input_splits and output_splits"
            )
        received_rows = sent_rows = splits = ()
    else:
        received_rows, sent_rows = check_splits(
            input_tensor.shape, output_shape, output_splits, input_splits, facts.size, facts.rank, facts.where()
        )
        is_flat = False
        splits = received_rows, sent_rows
    if facts.size == 1:
        output = input_tensor.detach().clone(memory_format=torch.contiguous_format).view(output_shape)
        return output, DONE if async_op else None
    if connecting:
        groups.wait_until_connected(group)
    call = None
    if observers or (async_op and wait_observers):
        rows = (tuple(sent_rows), tuple(received_rows)) if splits else None
        call = announce("all_to_all_single", group, input_tensor, async_op, splits=rows)
    output = input_tensor.new_empty(output_shape)
    sent, received = input_tensor, output
    if input_tensor.requires_grad or not input_tensor.is_contiguous():
        sent = contiguous(input_tensor)
    if not movable or is_flat:
        sent, received, received_rows, sent_rows = _flattened(sent, output, received_rows, sent_rows, movable)
    if facts.ledger is not None:
        if splits:
            facts.ledger.exchange(input_tensor.shape, dtype, *splits)
        else:
            facts.ledger.enter("all_to_all_single", input_tensor.shape, dtype)
    work = group.all_to_all_single(received, sent, received_rows, sent_rows, _EXCHANGE_OPTIONS[async_op])
    result = given(output, work, async_op, call)
    return result if async_op else (result, None)


def _flattened(
    sent: torch.Tensor, output: torch.Tensor, received_rows: Sequence[int], sent_rows: Sequence[int], movable: bool
) -> tuple[torch.Tensor, torch.Tensor, Sequence[int], Sequence[int]]:
    """The same all-to-all on vectors of elements, or of bytes for what the backend does not move as it is."""
    row = prod(output.shape[1:])
    if not movable:
        row *= output.element_size()
        sent, received = as_bytes(contiguous(sent)), as_bytes(output)
    else:
        sent, received = sent.view(-1), output.view(-1)
    return sent, received, [rows * row for rows in received_rows], [rows * row for rows in sent_rows]
