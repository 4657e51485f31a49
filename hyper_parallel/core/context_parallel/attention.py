"""Attention, in the same words on both frameworks, on plain and on distributed tensors.

The sequence may be sharded: then keys and values meet the queries of other ranks in the way that costs least, or in the
one that is asked for (``scheme``). The numbers are those of one device in all of them.
"""

from __future__ import annotations

import math
from typing import Any

from hyper_parallel.core.context_parallel.blocks.alone import attend_alone
from hyper_parallel.core.context_parallel.blocks.scoring import Scoring
from hyper_parallel.core.context_parallel.blocks.visibility import Visibility
from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.random import random_state
from hyper_parallel.core.shard.dispatching.dispatch import dispatch
from hyper_parallel.core.shard.rules.attention import AttentionCall, attention_outline
from hyper_parallel.platform import get_platform

_platform = get_platform()

EVERYTHING = Visibility()


def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    visible: Visibility | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    soft_cap: float | None = None,
    sinks: Any = None,
    scheme: str | None = None,
) -> Any:
    """Scaled dot-product attention: each query's mean of the values, weighted by the softmax of its scores.

    ``query`` is (batch, heads, queries, width), ``key`` (batch, key heads, keys, width) and ``value`` (batch, key
    heads, keys, value width); the result is (batch, heads, queries, value width) in the type of ``query``. Fewer key
    heads than heads are shared: head h uses key head h // (heads / key heads); do not repeat them. ``value width`` may
    differ from ``width``.

    ``visible``: which keys a query sees (:class:`Visibility`: causal, window, documents, positions, padding); all of
    them without. A query that sees nothing gets zeros. ``scale``: what scores are multiplied with, 1 / sqrt(width) if
    not given. ``soft_cap``: scores s become soft_cap * tanh(s / soft_cap), before anything is hidden. ``sinks``: a
    tensor of (heads,), of which every query of a head sees one more key with that score and the value 0; it has a
    gradient. ``dropout``: the probability with which a weight is dropped; pass 0.0 outside of training. Which ones are
    dropped follows from ``hyper_parallel.manual_seed`` and the place in the sequence, the same under every layout and
    scheme and on one device.

    Tensors are all plain or all distributed on one mesh (``sinks`` too). Batch and heads may be sharded freely. Where
    the sequence is sharded, queries, keys and values alike, ``scheme`` says how they meet: "gather" (keys and values
    are gathered), "ring" (they travel from rank to rank, no rank holds more than a few blocks), "ulysses" (each rank
    computes some heads over the whole sequence), "hybrid" (the sequence is sharded by two axes: ring over the first,
    Ulysses over the second), "auto" (the cheapest). None: what :func:`attention_scheme` says, else "auto". The result
    lies as ``query`` does.

    >>> import hyper_parallel as hp
    >>> query = hp.get_platform().ones((1, 4, 6, 8))
    >>> hp.attention(query, query[:, :2], query[:, :2], visible=hp.Visibility(causal=True)).shape
    torch.Size([1, 4, 6, 8])
    """
    tensors = [tensor for tensor in (query, key, value, sinks) if tensor is not None]
    _check(query, key, value, sinks, dropout)
    visible = EVERYTHING if visible is None else visible
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else float(scale)
    if visible.num_tokens not in (None, key.shape[-2]):
        raise ValueError(
            f"attention: {visible!r} has coordinates for {visible.num_tokens} tokens, but there are {key.shape[-2]} "
            f"keys; give those of the whole sequence, in the order in which it lies"
        )
    how = AttentionCall(visible, scale, soft_cap, float(dropout), scheme)
    if any(isinstance(tensor, DTensor) for tensor in tensors):
        return dispatch(attention_outline, tuple(tensors), {"how": how})
    shape = (*query.shape[:3], key.shape[2])
    draw = random_state.next_draw() if dropout else None
    scoring = Scoring(visible, scale, shape, soft_cap=soft_cap, dropout=float(dropout), draw=draw)
    return attend_alone(query, key, value, sinks, scoring)


def _check(query: Any, key: Any, value: Any, sinks: Any, dropout: float) -> None:
    shapes = [tuple(tensor.shape) for tensor in (query, key, value)]
    described = f"attention of query {shapes[0]}, key {shapes[1]} and value {shapes[2]}"
    if any(len(shape) != 4 for shape in shapes):
        raise ValueError(f"{described}: each must be (batch, heads, tokens, width)")
    (batch, heads, _, width), (key_batch, key_heads, _, key_width), value_shape = shapes
    if (key_batch, key_width) != (batch, width) or value_shape[:3] != shapes[1][:3]:
        raise ValueError(
            f"{described}: they must have one batch, query and key one width, key and value the same heads and tokens"
        )
    if key_heads and heads % key_heads:
        raise ValueError(f"{described}: {heads} heads cannot share {key_heads} key heads equally")
    if sinks is not None and tuple(sinks.shape) != (heads,):
        raise ValueError(f"{described}: sinks must be of shape ({heads},), one for each head, got {tuple(sinks.shape)}")
    if not 0.0 <= dropout <= 1.0:
        raise ValueError(f"{described}: dropout is a probability, got {dropout}")
