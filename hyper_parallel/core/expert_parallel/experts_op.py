"""Experts as one operator: tokens and their choices in, the weighted sum of what the chosen experts give out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hyper_parallel.core.dtensor.autograd_edges import redistribute_with_grad
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.later_reduction import reduced_later
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.skip_dispatch import is_skipped
from hyper_parallel.core.expert_parallel.capacity import limited
from hyper_parallel.core.expert_parallel.dispatch import Exchange, on_their_ranks
from hyper_parallel.core.expert_parallel.dispatch_options import dispatch_options
from hyper_parallel.core.expert_parallel.expert_places import ExpertPlaces
from hyper_parallel.core.expert_parallel.expert_weights import ExpertWeights
from hyper_parallel.core.expert_parallel.once_per_rank import once_per_rank
from hyper_parallel.core.expert_parallel.routing_memory import remembered
from hyper_parallel.core.expert_parallel.token_order import TokenOrder
from hyper_parallel.core.expert_parallel.ways import Way, choose_way, weight_layouts
from hyper_parallel.core.shard.dispatching.input_edges import bring_input
from hyper_parallel.core.shard.dispatching.reduce_later import by_the_law
from hyper_parallel.platform import get_platform

__all__ = ["experts"]

_platform = get_platform()


def experts(
    hidden: Any,
    top_k_index: Any,
    top_k_weights: Any,
    up: Any,
    down: Any,
    *,
    activation: Callable[..., Any],
    up_bias: Any = None,
    down_bias: Any = None,
    is_transposed: bool = False,
    weigh_inputs: bool = False,
    way: str = "auto",
    capacity_factor: float | None = None,
    beside: Callable[[], Any] | None = None,
) -> Any:
    """The sum over each token's choices of weight times what the chosen expert gives: (tokens, features).

    ``hidden`` is (tokens, features), ``top_k_index`` (tokens, choices) whole numbers that name experts, and
    ``top_k_weights`` (tokens, choices). Expert e gives ``activation(x @ up[0][e].T, ...) @ down[e].T``: ``up`` is a
    tensor (experts, inner, features) or a sequence of them, whose products with the rows ``activation`` gets, one
    argument each; it gives (rows, inner). ``down`` is (experts, features, inner). With ``is_transposed`` the last two
    dims of all weights are swapped. ``up_bias`` is (experts, inner), or a sequence like ``up``, and ``down_bias``
    (experts, features). ``weigh_inputs`` multiplies a token by its weights before the experts and not behind them.

    SwiGLU out of one tensor: ``up=gate_up, activation=lambda both: silu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1]``;
    out of two, which can be sharded on ``inner`` too: ``up=(gate, up), activation=lambda gate, up: silu(gate) * up``.

    Distributed tensors: experts under ``Shard(0)`` over an axis get tokens from all ranks along it, and gradients are
    those of one device, without a factor. The way is chosen by Note [Five ways]; ``way`` is ``"auto"``, or for tokens
    that are replicated ``"dispatch"`` or ``"partial"``. On axes over which ``hidden`` is not distributed, or if it is a
    plain tensor, every rank has tokens of its own.

    No token is dropped, unless there is a ``capacity_factor``: then an expert takes at most that many times its mean
    share of the choices of a rank's tokens, the first ones, and gives nothing to the others. The same routing gives the
    same bits. Every weight gets a gradient, zeros where no token came. Weights are multiplied in the wider dtype of
    ``top_k_weights`` and ``hidden``; the result has ``hidden``'s.

    With ``beside`` it gives (that sum, ``beside()``): what is computed there, such as an expert that every token has,
    is computed while results travel back, and its backward while their gradients do.

    >>> import torch
    >>> from hyper_parallel.core.expert_parallel.experts_op import experts
    >>> tokens, both = torch.eye(2), torch.stack([torch.eye(2), 10 * torch.eye(2)])
    >>> chosen, weights = torch.tensor([[0, 1], [1, 0]]), torch.tensor([[0.5, 0.5], [1.0, 0.0]])
    >>> experts(tokens, chosen, weights, both, both, activation=lambda x: x)
    tensor([[ 50.5000,   0.0000],
            [  0.0000, 100.0000]])
    """
    of = ExpertWeights(
        _several(up), down, activation, None if up_bias is None else _several(up_bias), down_bias, is_transposed
    )
    _check(hidden, top_k_index, top_k_weights, of)
    if capacity_factor is not None and capacity_factor <= 0:
        raise ValueError(f"experts: capacity_factor={capacity_factor} must be above 0; None for no limit")
    found: list[Any] = []
    call = _Call(weigh_inputs, capacity_factor, None if beside is None else lambda: found.append(beside()))
    distributed = [isinstance(tensor, DTensor) for tensor in of.tensors]
    if _is_on_whole_tensors(of) or not any((*distributed, isinstance(hidden, DTensor))):
        result = _run(hidden, top_k_index, top_k_weights, of, call)
    elif all(distributed):
        result = _on_layouts(hidden, top_k_index, top_k_weights, of, call, way)
    else:
        raise ValueError(
            "experts: tokens or some of the weights are distributed, and other weights are plain tensors; distribute "
            "them too, distribute_tensor(weight, mesh, [Shard(0)]) for a block of the experts on each rank"
        )
    if beside is None:
        return result
    return result, found[0] if found else beside()


def _is_on_whole_tensors(of: ExpertWeights) -> bool:
    """Whether the caller's code runs on the blocks of distributed tensors as if they were plain, and they are whole."""
    return is_skipped("experts") and all(
        not isinstance(tensor, DTensor) or tensor._layout.is_replicated for tensor in of.tensors
    )


def _several(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, Sequence) else (given,)


def _check(hidden: Any, index: Any, weights: Any, of: ExpertWeights) -> None:
    if hidden.ndim != 2 or index.ndim != 2 or tuple(index.shape) != tuple(weights.shape):
        raise ValueError(
            f"experts: hidden {tuple(hidden.shape)} must be (tokens, features), top_k_index {tuple(index.shape)} and "
            f"top_k_weights {tuple(weights.shape)} (tokens, choices); flatten samples and sequence first"
        )
    if int(index.shape[0]) != int(hidden.shape[0]):
        raise ValueError(f"experts: {int(hidden.shape[0])} tokens, but choices of {int(index.shape[0])}")
    sizes = {int(tensor.shape[0]) for tensor in of.tensors}
    if len(sizes) > 1:
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in of.tensors)
        raise ValueError(f"experts: the first dim of every weight and bias is the expert, got {shapes}")
    if not int(index.shape[1]) or "int" not in str(_platform.dtype_name(index.dtype)):
        raise ValueError(
            f"experts: top_k_index names at least one expert for each token, by whole numbers; got {index.dtype} of "
            f"shape {tuple(index.shape)}"
        )
    wrong = [name for name, one in (("top_k_index", index), ("top_k_weights", weights)) if isinstance(one, DTensor)]
    if wrong and not isinstance(hidden, DTensor):
        raise ValueError(
            f"experts: hidden is a plain tensor and {' and '.join(wrong)} distributed; make them of the same tokens: "
            "to_local, or distribute hidden too"
        )
    features = int(hidden.shape[1])
    if not of.fits(features):
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in of.tensors)
        up, down = (
            ("features, inner", "inner, features") if of.is_transposed else ("inner, features", "features, inner")
        )
        raise ValueError(
            f"experts: hidden has {features} features, so each of up must be (experts, {up}), down (experts, {down}), "
            f"and biases (experts, inner) and (experts, features); got {shapes}"
        )


@dataclass(frozen=True)
class _Call:
    """What a call asks for besides tensors."""

    weigh_inputs: bool
    capacity_factor: float | None
    beside: Callable[[], Any] | None = None  # what runs while results travel back
    places: ExpertPlaces | None = None  # None: all experts are here
    travels: bool = False  # to the experts of other ranks, or only to those of this one

    @property
    def overlapped(self) -> Callable[[], Any] | None:
        return self.beside if dispatch_options.overlaps else None


def _run(hidden: Any, index: Any, weights: Any, of: ExpertWeights, call: _Call) -> Any:
    """On plain blocks: all experts, those of ``places`` on their ranks, or only this rank's."""
    places, num_choices = call.places, int(index.shape[1])
    num_experts = of.num_experts if places is None else places.num_experts
    keys = _platform.detached(index).reshape(-1)
    keys = keys if places is None else places.keys(keys)
    drops = call.capacity_factor is not None
    if call.capacity_factor is not None:
        keys = limited(keys, num_experts, math.ceil(call.capacity_factor * int(keys.shape[0]) / num_experts))
    if places is not None and call.travels and dispatch_options.once_per_rank and num_choices > 1:

        def local(tokens: Any, keys: Any, weights: Any, counts: list[int]) -> Any:
            return _on_some(tokens, keys.reshape(-1), weights, of, places.mine, call, counts)

        sums = once_per_rank(hidden, keys, weights, places, local, call.overlapped)
        return _platform.tensor_type_cast(sums, hidden.dtype)
    if places is not None and not call.travels:
        return _on_some(hidden, keys, weights, of, places.mine, call, None)
    if places is None:
        order = TokenOrder(keys, num_choices, num_experts, drops)
        return _combined(hidden, weights, order, call, lambda rows: of(rows, order.counts))
    exchange = remembered(lambda: Exchange(places, TokenOrder(keys, num_choices, num_experts, drops)))
    order = exchange.order
    return _combined(hidden, weights, order, call, lambda rows: on_their_ranks(rows, exchange, of, call.overlapped))


def _on_some(
    hidden: Any, keys: Any, weights: Any, of: ExpertWeights, mine: range, call: _Call, counts: list[int] | None
) -> Any:
    """Only rows for experts of this rank; how many there are is one look at values, unless ``counts`` tells."""
    within = _platform.keys_within(keys, mine.start, mine.stop)
    order = TokenOrder(within, int(weights.shape[1]), len(mine), drops=True)
    if counts is not None:
        order.counts.know(counts)
    return _combined(hidden, weights, order, call, lambda rows: of(rows, order.counts))


def _combined(hidden: Any, weights: Any, order: TokenOrder, call: _Call, run: Callable[[Any], Any]) -> Any:
    """A row for each choice through ``run``, and the weighted sum over each token's."""
    rows = order.ordered(hidden)
    if call.weigh_inputs:
        rows = _platform.tensor_type_cast(rows * order.moved(weights.reshape(-1, 1)), hidden.dtype)
    results = order.restored(run(rows))
    if not call.weigh_inputs:
        results = results * weights.reshape(*weights.shape, 1)
    return _platform.tensor_type_cast(results.sum(1), hidden.dtype)


def _on_layouts(hidden: Any, index: Any, weights: Any, of: ExpertWeights, call: _Call, wanted: str) -> Any:
    tokens = hidden._layout.reduced() if isinstance(hidden, DTensor) else None
    way = choose_way(tokens, int(index.shape[1]), of, wanted)
    blocks = [_entered(one, layout, way) for one, layout in zip(of.tensors, weight_layouts(way, of), strict=True)]
    local = of.with_tensors(blocks)
    if way.features and local.down_bias is not None and any(map(of.down.device_mesh.get_local_rank, way.features)):
        local = replace(local, down_bias=_platform.zeros_kept_in_graph(local.down_bias))  # one rank adds it
    places = ExpertPlaces(way.experts, of.num_experts) if way.experts.shard_axes[0] else None
    call = replace(call, places=places, travels=bool(way.dispatch))
    if way.tokens is None:
        return _run(hidden, index, weights, local, call)
    blocks = [_tokens(one, way, name) for one, name in ((hidden, "hidden"), (weights, "top_k_weights"))]
    if isinstance(index, DTensor):
        index = _platform.local_alias(index.redistribute(way.tokens.mesh, way.tokens))
    else:
        raise _plain("top_k_index", way)
    result = _run(blocks[0], index, blocks[1], local, call)
    return DTensor.from_local(result, way.tokens.mesh, way.result, shape=tuple(hidden.shape))


def _tokens(value: Any, way: Way, name: str) -> Any:
    if not isinstance(value, DTensor):
        raise _plain(name, way)
    assert way.tokens is not None
    value = by_the_law(value)
    return _platform.local_alias(bring_input(value, way.tokens, way.entering))


def _plain(name: str, way: Way) -> ValueError:
    return ValueError(
        f"experts: hidden is distributed over {way.tokens.mesh if way.tokens else None} and {name} is a plain tensor; "
        "make it of the same tokens: distribute_tensor, or from_local"
    )


def _entered(weight: Any, target: Layout, way: Way) -> Any:
    """The block of a weight: its gradient is summed where tokens differ, but for axes on which others sum it later."""
    source = weight._layout
    kept = [axis for axis in source.reduced_later if axis in way.varying]
    if len(kept) < len(source.reduced_later):
        layout = reduced_later(source.reduced(pending=False), kept)
        block = redistribute_with_grad(weight._completed(), source, layout, tuple(weight._global_shape))
        weight = _platform.as_dtensor(DTensor, block, layout, weight._global_shape)
    sharding = {axis for axes in target.shard_axes for axis in axes}
    axes = tuple(sorted(way.varying - sharding - set(kept)))
    return _platform.local_alias(bring_input(weight, target, axes))
