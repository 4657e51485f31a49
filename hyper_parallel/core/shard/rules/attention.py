"""Scaled dot-product attention: batch dims, heads and the sequence may be sharded.

Note [Heads that share keys]
With fewer key heads than query heads, query head h uses key head h // (query heads per key head). Where the number of
parts divides the number of key heads, all three are cut together. Where it does not, the keys and values stay whole and
every rank picks those of its own query heads.

Note [One letter for queries and keys]
Queries and keys that are sharded alike along the sequence have one letter for it: they stay where they are, and how
they meet is a scheme of ``core/context_parallel``. Otherwise (cross-attention, a cache, keys that are whole) the keys
are made whole before.

Note [Causal attention over cut queries]
``is_causal`` means that query i sees the keys up to i, counted from the start of both. A rank whose queries start at an
offset says so with a mask, and leaves out the keys that none of its queries sees.

Note [The same dropout under every layout]
The framework's kernel draws its own random numbers, which would differ with the layout. With dropout the weights are
computed in the open and masked with numbers that are addressed by global position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from hyper_parallel.core.context_parallel.blocks.alone import attend_alone
from hyper_parallel.core.context_parallel.blocks.schemes import attend_sharded, refuse_other_schemes
from hyper_parallel.core.context_parallel.blocks.scoring import Scoring
from hyper_parallel.core.context_parallel.blocks.visibility import Visibility
from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.dtensor.random import random_state
from hyper_parallel.core.dtensor.random.random_fill import next_block
from hyper_parallel.core.shard.rule_kit.rule_table import rule, set_function_rule
from hyper_parallel.core.shard.rule_kit.signature import Labels, LocalCall, OpCall, Signature, TensorSpec, letters
from hyper_parallel.core.shard.rules.matmul import align
from hyper_parallel.platform import get_platform

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_HEADS, _QUERIES, _FEATURES = "H", "L", "V"
_CAUSAL, _EVERYTHING = Visibility(causal=True), Visibility()


@rule("scaled_dot_product_attention")
def scaled_dot_product_attention(call: OpCall) -> Signature | None:
    given = call.bind(*_NAMES)
    query, key, value, mask = (given.get(name) for name in _NAMES[:4])
    if not (isinstance(query, TensorSpec) and isinstance(key, TensorSpec) and isinstance(value, TensorSpec)):
        return None
    output = call.outputs[0]
    has_heads = len(output) > 3
    batch = (*letters(len(output) - 3), _HEADS) if has_heads else letters(len(output) - 2)
    shares_heads = has_heads and bool(given.get("enable_gqa")) and query.shape[-3] != key.shape[-3]

    def leading(spec: TensorSpec) -> tuple[Any, ...]:
        return align(spec.shape[:-2], batch, output[:-2])

    divisors = {}
    keys, values = leading(key), leading(value)
    if shares_heads:
        together = key.shape[-3] % _num_parts(query, -3) == 0
        keys, values = ((*labels[:-1], _HEADS if together else None) for labels in (keys, values))
        divisors = {_HEADS: key.shape[-3]} if together else {}
    meets = _QUERIES if mask is None and _meet_where_they_are(query, key, value) else None
    inputs = [(*leading(query), _QUERIES, None), (*keys, meets, None), (*values, meets, _FEATURES)]
    if isinstance(mask, TensorSpec):
        rows = align(mask.shape[:-1], (*batch, _QUERIES), output[:-1])
        inputs.append((*rows, None))
    return Signature(
        tuple(inputs),
        ((*batch, _QUERIES, _FEATURES),),
        divisors=divisors,
        linear=(frozenset({2}),),
        local=_attend,
        needs_local=_needs_care,
    )


def _num_parts(spec: TensorSpec, dim: int) -> int:
    return math.prod(spec.layout.mesh.shape[axis] for axis in spec.layout.shard_axes[dim])


def _meet_where_they_are(query: TensorSpec, key: TensorSpec, value: TensorSpec) -> bool:
    """Whether the sequence of all three is sharded alike; see Note [One letter for queries and keys]."""
    if not query.ndim == key.ndim == value.ndim == 4 or query.shape[0] != key.shape[0]:
        return False
    cuts = query.layout.shard_axes[-2]
    alike = cuts == key.layout.shard_axes[-2] == value.layout.shard_axes[-2]
    return bool(cuts) and alike and query.shape[-2] == key.shape[-2]


def _meet_sharded(call: LocalCall) -> bool:
    """Whether this rank has a part of the keys only."""
    return len(call.input_shapes[1]) == 4 and bool(call.inputs[1].shard_axes[-2])


def _arguments(call: LocalCall) -> dict[str, Any]:
    given = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None, "enable_gqa": False}
    given.update(zip(_NAMES, call.args, strict=False))
    given.update(call.kwargs)
    return given


def _needs_care(call: LocalCall) -> bool:
    given = _arguments(call)
    # Whether there is dropout is only known when the call is made: plans do not depend on floating-point numbers.
    may_drop = len(call.args) > 4 or "dropout_p" in call.kwargs
    cuts_queries = bool(given["is_causal"]) and bool(call.axes.get(_QUERIES))
    is_empty = 0 in call.local_output_shape() or any(
        0 in layout.local_shape(shape) for layout, shape in zip(call.inputs, call.input_shapes, strict=True)
    )
    if may_drop or cuts_queries or is_empty or _meet_sharded(call):
        return True
    return _picks_heads(call, bool(given["enable_gqa"]))


def _picks_heads(call: LocalCall, shares_heads: bool) -> bool:
    """Whether query heads are cut while the key heads they share are whole."""
    if not shares_heads or not call.axes.get(_HEADS):
        return False
    return call.input_shapes[1][-3] > 1 and not call.inputs[1].shard_axes[-3]


def _attend(call: LocalCall) -> Any:
    given = _arguments(call)
    query, key, value, mask = (given[name] for name in _NAMES[:4])
    shares_heads = bool(given["enable_gqa"])
    is_causal = bool(given["is_causal"])
    scale = given["scale"]
    if _picks_heads(call, shares_heads):
        key, value = _keys_of_own_heads(call, key), _keys_of_own_heads(call, value)
        shares_heads = False
    if _meet_sharded(call):
        visible = _CAUSAL if is_causal else _EVERYTHING
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        how = AttentionCall(visible, scale, None, float(given["dropout_p"]), None)
        return _meet(call, how, query, key, value, None)
    if mask is not None and call.axes.get(_QUERIES):
        refuse_other_schemes("scaled_dot_product_attention", call.inputs)
    length, offset = query.shape[-2], 0
    if call.axes.get(_QUERIES):  # which keys are left out follows from it
        offset = call.inputs[0].deciding_region(call.input_shapes[0]).offsets[-2]
    if is_causal and call.axes.get(_QUERIES):
        num_keys = min(offset + length, key.shape[-2])
        key, value = key.narrow(-2, 0, num_keys), value.narrow(-2, 0, num_keys)
        mask = _causal_mask(query, offset, length, num_keys)
        is_causal = False
    is_empty = 0 in (*query.shape, *key.shape, *value.shape)
    if not given["dropout_p"] and not is_empty:
        shared = {"enable_gqa": True} if shares_heads else {}
        return call.func(query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale, **shared)
    if is_causal:
        mask = _causal_mask(query, offset, length, key.shape[-2])
    return _in_the_open(call, query, key, value, mask, given["dropout_p"], scale, shares_heads)


def _keys_of_own_heads(call: LocalCall, keys: Any) -> Any:
    """The keys of the query heads that this rank has; see Note [Heads that share keys]."""
    num_query_heads = call.input_shapes[0][-3]
    per_key_head = num_query_heads // keys.shape[-3]
    start, block = call.inputs[0].local_region(call.input_shapes[0])
    heads = [(start[-3] + head) // per_key_head for head in range(block[-3])]
    return keys.index_select(-3, get_platform().index_tensor([heads], keys.device)[0])


def _causal_mask(query: Any, offset: int, length: int, num_keys: int) -> Any:
    platform = get_platform()
    rows = platform.arange(offset, offset + length, device=query.device)
    return rows.unsqueeze(-1) >= platform.arange(0, num_keys, device=query.device)


def _in_the_open(
    call: LocalCall,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    dropout: float,
    scale: float | None,
    shares_heads: bool,
) -> Any:
    """The definition, step by step; see Note [The same dropout under every layout]."""
    platform = get_platform()
    if shares_heads and key.shape[-3] > 0:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(repeats, -3) for tensor in (key, value))
    scores = query.matmul(key.transpose(-2, -1)) * (scale if scale is not None else 1 / math.sqrt(query.shape[-1]))
    if mask is not None and mask.dtype == platform.str_to_dtype("bool"):
        weights = scores.masked_fill(mask.logical_not(), -math.inf).softmax(-1)
        # A query that sees nothing gets zeros, as from the framework's kernel, and not the average of nothing.
        weights = weights.masked_fill(mask.any(-1, keepdim=True).logical_not(), 0.0)
    else:
        weights = (scores if mask is None else scores + mask).softmax(-1)
    if dropout:
        keep = _keep_mask(call, weights, 1.0 - dropout)
        weights = weights * keep * (0.0 if dropout == 1.0 else 1.0 / (1.0 - dropout))
    return weights.matmul(value)


def _keep_mask(call: LocalCall, weights: Any, keep: float) -> Any:
    """Ones and zeros for this rank's weights, of (..., heads, queries, keys); keys that are left out come last."""
    axes = [*call.outputs[0].shard_axes[:-1], ()]
    shape = (*call.output_shapes[0][:-1], call.input_shapes[1][-2])
    layout = Layout.of(call.mesh, axes)
    block = next_block("bernoulli", {"p": keep}, layout, shape, weights.dtype, weights.device)
    return block.narrow(-1, 0, weights.shape[-1])


# ---------------------------------------------------------------- the operator of both frameworks


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """What ``attention`` is given besides tensors. All are equal as keys: how a call is planned depends on none."""

    visible: Visibility
    scale: float
    soft_cap: float | None
    dropout: float
    scheme: str | None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AttentionCall)

    def __hash__(self) -> int:
        return 1


def attention_outline(query: Any, key: Any, value: Any, sinks: Any = None, *, how: AttentionCall) -> Any:
    """The shape of what ``attention`` gives; the values are computed by the rule's local function."""
    del key, sinks, how
    return get_platform().new_tensor((*query.shape[:3], value.shape[3]), query.dtype, query.device)


def _attention(call: OpCall) -> Signature:
    query, key, value = call.tensors[:3]
    shares_heads = query.shape[1] != key.shape[1]
    together = not shares_heads or key.shape[1] % _num_parts(query, 1) == 0
    key_heads = _HEADS if together else None
    meets = _QUERIES if _meet_where_they_are(query, key, value) else None
    inputs: list[Labels] = [
        ("a", _HEADS, _QUERIES, None),
        ("a", key_heads, meets, None),
        ("a", key_heads, meets, _FEATURES),
    ]
    inputs += [(_HEADS,)] * (len(call.tensors) - 3)
    return Signature(
        tuple(inputs),
        (("a", _HEADS, _QUERIES, _FEATURES),),
        divisors={_HEADS: key.shape[1]} if together and shares_heads else {},
        linear=(frozenset({2}),),
        local=_attend_as_called,
    )


attention_outline.__name__ = "attention"  # as errors and records call it
set_function_rule(attention_outline, _attention)


def _attend_as_called(call: LocalCall) -> Any:
    query, key, value, *sinks = call.args
    if _picks_heads(call, call.input_shapes[0][1] != call.input_shapes[1][1]):
        key, value = _keys_of_own_heads(call, key), _keys_of_own_heads(call, value)
    return _meet(call, call.kwargs["how"], query, key, value, sinks[0] if sinks else None)


def _meet(call: LocalCall, how: AttentionCall, query: Any, key: Any, value: Any, sinks: Any) -> Any:
    """This rank's part of the output."""
    offsets, sizes = call.inputs[0].deciding_region(call.input_shapes[0])
    scoring = Scoring(
        how.visible.of_rows(offsets[0], sizes[0]),
        how.scale,
        (*call.input_shapes[0][:3], call.input_shapes[1][2]),
        first_row=offsets[0],
        first_head=offsets[1],
        soft_cap=how.soft_cap,
        dropout=how.dropout,
        draw=random_state.next_draw() if how.dropout else None,
    )
    if _meet_sharded(call):
        return attend_sharded(query, key, value, sinks, scoring, call.inputs[:3], call.input_shapes[:3], how.scheme)
    if call.axes.get(_QUERIES):
        refuse_other_schemes("attention", call.inputs, how.scheme)
    return attend_alone(query, key, value, sinks, scoring, ((offsets[2], offsets[2] + sizes[2]),))
