"""Collectives on lists of tensors, in one call of the backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hyper_parallel.platform.checks.collective_observers import CollectiveCall, announce, observers, wait_observers
from hyper_parallel.platform.torch.base.tensors import as_bytes
from hyper_parallel.platform.torch.communication import collectives, groups
from hyper_parallel.platform.torch.communication.group_facts import (
    GATHER_OPTIONS,
    GroupFacts,
    check_out,
    contiguous,
    find_facts,
    find_movable,
    find_reduction,
)
from hyper_parallel.platform.torch.communication.groups import DONE
from hyper_parallel.platform.torch.communication.handles import AllHandles, given
from hyper_parallel.platform.torch.communication.rank_agreement import COMPARES_RANKS, compare_ranks

__all__ = ["all_gather_into_tensors", "reduce_scatter_tensors"]


def all_gather_into_tensors(
    data: Sequence[torch.Tensor], group_info: Any, async_op: bool = False, *, out: Sequence[torch.Tensor] | None = None
) -> Any:
    """:func:`all_gather_into_tensor` of each tensor, of any dtypes, in one call of the backend; the list of results."""
    group, facts = find_facts(group_info)
    for tensor in data:
        find_movable("all_gather_into_tensors", tensor, facts)
    shapes = [(shape[0] * facts.size, *shape[1:]) for shape in (tuple(tensor.shape) or (1,) for tensor in data)]
    results = _results("all_gather_into_tensors", data, shapes, out, facts)
    if facts.size == 1 or not data:
        return _alone(data, results, async_op)
    call = _begin("all_gather_into_tensors", data, group, facts, async_op, None)
    sent = [as_bytes(contiguous(tensor)) for tensor in data]
    work = group.allgather_into_tensor_coalesced([as_bytes(one) for one in results], sent, GATHER_OPTIONS[async_op])
    return given(results, work, async_op, call)


def reduce_scatter_tensors(
    data: Sequence[torch.Tensor],
    group_info: Any,
    async_op: bool = False,
    op: str = "sum",
    *,
    out: Sequence[torch.Tensor] | None = None,
) -> Any:
    """:func:`reduce_scatter_tensor` of each tensor; the list of results.

    In one call of the backend where all have one dtype that it reduces itself, else in one call each.
    """
    group, facts = find_facts(group_info)
    reductions = [find_reduction("reduce_scatter_tensors", tensor, op, facts) for tensor in data]
    for tensor in data:
        if not tensor.ndim or tensor.shape[0] % facts.size:
            raise ValueError(
                f"reduce_scatter_tensors {facts.where()}: shape {tuple(tensor.shape)} cannot be cut into {facts.size} "
                f"equal parts of dim 0; pad dim 0 to a multiple of {facts.size}"
            )
    shapes = [(tensor.shape[0] // facts.size, *tensor.shape[1:]) for tensor in data]
    results = _results("reduce_scatter_tensors", data, shapes, out, facts)
    if facts.size == 1 or not data:
        return _alone(data, results, async_op)
    options = reductions[0].scatter_options
    if options is None or len({tensor.dtype for tensor in data}) > 1:
        pairs = zip(data, results, strict=True)
        handles = [collectives.reduce_scatter_tensor(tensor, group, True, op, out=one)[1] for tensor, one in pairs]
        return given(results, AllHandles(handles), async_op, None)
    call = _begin("reduce_scatter_tensors", data, group, facts, async_op, op)
    work = group.reduce_scatter_tensor_coalesced(results, [contiguous(one) for one in data], options[async_op])
    return given(results, work, async_op, call)


def _results(
    function: str,
    data: Sequence[torch.Tensor],
    shapes: Sequence[Sequence[int]],
    out: Sequence[torch.Tensor] | None,
    facts: GroupFacts,
) -> list[torch.Tensor]:
    if out is None:
        return [tensor.new_empty(tuple(shape)) for tensor, shape in zip(data, shapes, strict=True)]
    if len(out) != len(data):
        raise ValueError(f"{function} {facts.where()}: {len(data)} tensors but {len(out)} in out; give one for each")
    for one, shape, tensor in zip(out, shapes, data, strict=True):
        check_out(function, one, shape, tensor, facts)
    return list(out)


def _alone(data: Sequence[torch.Tensor], results: list[torch.Tensor], async_op: bool) -> Any:
    for tensor, result in zip(data, results, strict=True):
        result.copy_(tensor.detach())
    return (results, DONE) if async_op else results


def _begin(
    function: str, data: Sequence[torch.Tensor], group: Any, facts: GroupFacts, async_op: bool, op: str | None
) -> CollectiveCall | None:
    """Tell observers and the other ranks of one operation on all bytes of the tensors."""
    num_bytes = sum(tensor.numel() * tensor.itemsize for tensor in data)
    joined = torch.empty(num_bytes, dtype=torch.uint8, device="meta")
    if COMPARES_RANKS:
        compare_ranks(function, joined, group, facts, **({} if op is None else {"op": op}))
    groups.wait_until_connected(group)
    call = announce(function, group, joined, async_op) if observers or wait_observers else None
    if facts.ledger is not None:
        facts.ledger.enter(function, joined.shape, joined.dtype, op)
    return call
