"""Products of matrices: a cut inner dim leaves a pending sum."""

from __future__ import annotations

from typing import Any

from hyper_parallel.core.shard.rule_table import einsum_rule, rule
from hyper_parallel.core.shard.signature import Labels, LocalCall, OpCall, Signature, letters
from hyper_parallel.platform import get_platform

_ALONE = (frozenset({0}), frozenset({1}))
_SUM = {"k": "sum"}

einsum_rule("mk,kn->mn", "mm", reduces=_SUM, linear=_ALONE)
einsum_rule("bmk,bkn->bmn", "bmm", reduces=_SUM, linear=_ALONE)
einsum_rule("mk,k->m", "mv", reduces=_SUM, linear=_ALONE)
einsum_rule("k,k->", "dot", "vdot", "inner", reduces=_SUM, linear=_ALONE)
einsum_rule("m,n->mn", "outer", linear=_ALONE)


@rule("matmul", "rmatmul")
def matmul(call: OpCall) -> Signature:
    first, second = call.tensors[0], call.tensors[1]
    batch_rank = max(first.ndim, second.ndim, 2) - 2
    batch = letters(batch_rank)
    left: Labels = ("k",) if first.ndim == 1 else ("m", "k")
    right: Labels = ("k",) if second.ndim == 1 else ("k", "n")
    out = (*batch, *(() if first.ndim == 1 else ("m",)), *(() if second.ndim == 1 else ("n",)))
    sizes = call.outputs[0][: len(batch)]

    def stretched(shape: tuple[int, ...], own: Labels) -> Labels:
        given = shape[: len(shape) - len(own)]
        offset = batch_rank - len(given)
        return (*(batch[offset + d] if size == sizes[offset + d] else None for d, size in enumerate(given)), *own)

    relabel = {"m": "M", "k": "K", "n": "N"}

    def named(labels: Labels) -> Labels:
        return tuple(relabel.get(label, label) if label else None for label in labels)

    inputs = (stretched(first.shape, named(left)), stretched(second.shape, named(right)))
    return Signature(inputs, (named(out),), reduces={"K": "sum"}, linear=_ALONE)


@rule("linear")
def linear(call: OpCall) -> Signature:
    x, weight = call.tensors[0], call.tensors[1]
    batch = letters(x.ndim - 1)
    has_bias = len(call.tensors) > 2
    out_label: Labels = ("N",) if weight.ndim == 2 else ()
    inputs: tuple[Labels, ...] = ((*batch, "K"), (*out_label, "K"))
    if has_bias:
        inputs = (*inputs, out_label)
    local = _linear_bias_once if has_bias else None
    return Signature(inputs, ((*batch, *out_label),), reduces={"K": "sum"}, linear=_ALONE, local=local)


def _linear_bias_once(call: LocalCall) -> Any:
    """Where the product is a pending sum, the bias is added by one rank only; the others keep it in their graph."""
    args = list(call.args)
    kwargs = dict(call.kwargs)
    if not call.counts_here():
        holder, key = (args, 2) if len(args) > 2 else (kwargs, "bias")
        holder[key] = get_platform().silenced(holder[key])  # type: ignore[index, call-overload]
    return call.func(*args, **kwargs)
