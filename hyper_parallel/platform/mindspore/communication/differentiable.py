"""Collectives with gradients on MindSpore; what they do and check is in ``platform/shared/differentiable.py``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, ops

from hyper_parallel.platform.mindspore import private_api
from hyper_parallel.platform.mindspore.base.tensors import cat, narrow, own_copy, tensor_type_cast, zeros
from hyper_parallel.platform.mindspore.communication import collectives, groups
from hyper_parallel.platform.shared.collective_gradients import Framework, make_functions
from hyper_parallel.platform.shared.differentiable import DifferentiableCollectives

__all__ = [
    "differentiable_all_gather_concat",
    "differentiable_all_reduce",
    "differentiable_all_to_all",
    "differentiable_all_to_all_single",
    "differentiable_all_to_all_single_async",
    "differentiable_reduce_scatter",
    "p2p_exchange",
    "vary",
]


def _alias(data: Tensor) -> Tensor:
    return data.view(data.shape)


def _zeros(shape: Sequence[int], like: Tensor) -> Tensor:
    return zeros(shape, like.dtype, like.device)


def _equal(one: Tensor, other: Tensor) -> Tensor:
    if one.dtype == ms.bfloat16:  # which a CPU cannot compare
        one, other = (tensor_type_cast(tensor, "float32") for tensor in (one, other))
    return one == other


functions = make_functions(
    Framework(
        Function=private_api.Function,
        collectives=collectives,
        exchange=collectives.exchange,
        cat=cat,
        narrow=narrow,
        zeros=_zeros,
        own_copy=own_copy,
        alias=_alias,
        handed_out=lambda result: result,
        equal=_equal,
        as_integers=lambda data: tensor_type_cast(data, "int32"),
        conjugate=lambda data: ops.conj(data) if data.is_complex() else data,
        no_grad=private_api.no_grad,
    )
)


def _check_peer(function: str, tensor: Tensor, peer_rank: int, group: Any) -> bool:
    collectives.group_rank_of(function, peer_rank, "peer_rank", group)
    return peer_rank == groups.get_rank()


_collectives = DifferentiableCollectives(functions, Tensor, "mindspore.Tensor", groups.unwrap_group, _check_peer)

differentiable_all_gather_concat = _collectives.differentiable_all_gather_concat
differentiable_all_reduce = _collectives.differentiable_all_reduce
differentiable_reduce_scatter = _collectives.differentiable_reduce_scatter
differentiable_all_to_all = _collectives.differentiable_all_to_all
differentiable_all_to_all_single = _collectives.differentiable_all_to_all_single
differentiable_all_to_all_single_async = _collectives.differentiable_all_to_all_single_async
p2p_exchange = _collectives.p2p_exchange
vary = _collectives.vary
