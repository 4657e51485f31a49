"""Products of matrices: a cut inner dim leaves a pending sum, to which a further term is added once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from hyper_parallel.core.shard.rule_kit.added_term import added_once, replace_tensor
from hyper_parallel.core.shard.rule_kit.empty_blocks import has_empty_block, zeros_in_graph
from hyper_parallel.core.shard.rule_kit.rule_table import einsum_rule, rule
from hyper_parallel.core.shard.rule_kit.signature import Labels, LocalCall, OpCall, Signature, broadcast_labels, letters

_ALONE = (frozenset({0}), frozenset({1}))
_SUM = {"k": "sum"}

einsum_rule("mk,kn->mn", "mm", reduces=_SUM, linear=_ALONE)
einsum_rule("bmk,bkn->bmn", "bmm", reduces=_SUM, linear=_ALONE)
einsum_rule("mk,k->m", "mv", reduces=_SUM, linear=_ALONE)
einsum_rule("k,k->", "dot", "vdot", reduces=_SUM, linear=_ALONE)
einsum_rule("m,n->mn", "outer", linear=_ALONE)


def align(shape: tuple[int, ...], labels: Labels, sizes: tuple[int, ...]) -> Labels:
    """The labels of a tensor that broadcasts to dims ``labels`` of ``sizes``; stretched dims are None."""
    offset = len(sizes) - len(shape)
    return tuple(labels[offset + d] if size == sizes[offset + d] else None for d, size in enumerate(shape))


@rule("matmul")
def matmul(call: OpCall) -> Signature:
    first, second = call.tensors[0], call.tensors[1]
    left: Labels = ("K",) if first.ndim == 1 else ("M", "K")
    right: Labels = ("K",) if second.ndim == 1 else ("K", "N")
    batch = letters(max(first.ndim, second.ndim, 2) - 2)
    sizes = call.outputs[0][: len(batch)]
    inputs = tuple(
        (*align(spec.shape[: spec.ndim - len(own)], batch, sizes), *own)
        for spec, own in ((first, left), (second, right))
    )
    out = (*batch, *left[:-1], *right[1:])
    return Signature(inputs, (out,), reduces={"K": "sum"}, linear=_ALONE)


@rule("linear")
def linear(call: OpCall) -> Signature:
    x, weight = call.tensors[0], call.tensors[1]
    batch = letters(x.ndim - 1)
    out_label: Labels = ("N",) if weight.ndim == 2 else ()
    product = ((*batch, "K"), (*out_label, "K"))
    output = (*batch, *out_label)
    term = align(call.tensors[2].shape, output, call.outputs[0]) if len(call.tensors) > 2 else ()
    return _plus_term(call, 2, product, term, output, {"K": "sum"})


@rule("bilinear")
def bilinear(call: OpCall) -> Signature:
    batch = letters(call.tensors[0].ndim - 1)
    product = ((*batch, "I"), (*batch, "J"), ("N", "I", "J"))
    # The framework refuses items without features, which a rank may have where the cut is uneven.
    even = frozenset({"I", "J"})
    return _plus_term(call, 3, product, ("N",), (*batch, "N"), {"I": "sum", "J": "sum"}, even)


def _plus_term(
    call: OpCall,
    term: int,
    product: tuple[Labels, ...],
    term_labels: Labels,
    output: Labels,
    reduces: dict[str, str],
    even: frozenset[str] = frozenset(),
) -> Signature:
    """A product of ``term`` factors, with or without a term that comes behind them."""
    alone = tuple(frozenset({factor}) for factor in range(term))
    if len(call.tensors) == term:
        return Signature(product, (output,), reduces=reduces, linear=alone, even=even)
    together = tuple(frozenset({factor, term}) for factor in range(term))
    linear_in = (*alone, *together)
    inputs = (*product, term_labels)
    return Signature(inputs, (output,), reduces=reduces, linear=linear_in, even=even, **added_once(term))


_TERM_PLUS_PRODUCT = {
    "addmm": ("mk,kn->mn", {"k": "sum"}),
    "addmv": ("mk,k->m", {"k": "sum"}),
    "addr": ("m,n->mn", {}),
    "addbmm": ("bmk,bkn->mn", {"b": "sum", "k": "sum"}),
    "baddbmm": ("bmk,bkn->bmn", {"k": "sum"}),
}
_FACTOR_AND_TERM = (frozenset({1}), frozenset({2}), frozenset({0, 1}), frozenset({0, 2}))


@rule(*_TERM_PLUS_PRODUCT, "_addmm_activation", ignores_scalars=True)
def term_plus_product(call: OpCall) -> Signature | None:
    """``beta * term + alpha * product``. Written into the term it is never pending where the term is not."""
    if len(call.tensors) != 3:
        return None
    is_linear = call.name != "_addmm_activation"
    equation, reduces = _TERM_PLUS_PRODUCT[call.name.removesuffix("_") if is_linear else "addmm"]
    left, right = equation.split("->")
    output = tuple(right)
    term = align(call.tensors[0].shape, output, call.outputs[0])
    inputs = (term, *(tuple(labels) for labels in left.split(",")))
    if not is_linear:
        return Signature(inputs, (output,))
    care: dict[str, Any] = {} if call.name.endswith("_") else added_once(0)
    if call.name == "addmv":
        care = _with_stretched_term(**care)
    return Signature(inputs, (output,), reduces=reduces, linear=_FACTOR_AND_TERM, **care)


def _with_stretched_term(
    local: Callable[[LocalCall], Any], needs_local: Callable[[LocalCall], bool]
) -> dict[str, Callable[[LocalCall], Any]]:
    """``addmv`` of a matrix without rows gives the term as it is, however long: there it is stretched before."""

    def stretched(call: LocalCall) -> Any:
        if has_empty_block(call):
            args, kwargs = replace_tensor(call, 0, lambda term: term.expand(call.local_output_shape()))
            call = dataclasses.replace(call, args=tuple(args), kwargs=kwargs)
        return local(call) if needs_local(call) else call.func(*call.args, **call.kwargs)

    return {"local": stretched, "needs_local": lambda call: needs_local(call) or has_empty_block(call)}


@rule("inner")
def inner(call: OpCall) -> Signature:
    first, second = call.tensors[0], call.tensors[1]
    if first.ndim == 0 or second.ndim == 0:
        other = letters(max(first.ndim, second.ndim))
        inputs = tuple(other if spec.ndim else () for spec in (first, second))
        return Signature(inputs, (other,), linear=_ALONE)
    left, right = letters(first.ndim - 1), letters(second.ndim - 1, start=first.ndim - 1)
    return Signature(((*left, "K"), (*right, "K")), ((*left, *right),), reduces={"K": "sum"}, linear=_ALONE)


@rule("tensordot")
def tensordot(call: OpCall) -> Signature | None:
    """Contracted dims of size 1 stretch to those of the other tensor."""
    bound = call.bind("a", "b", "dims", dims=2)
    first, second, dims = bound["a"], bound["b"], bound["dims"]
    if isinstance(dims, int):
        pairs = [(first.ndim - dims + index, index) for index in range(dims)]
    elif isinstance(dims, (tuple, list)) and len(dims) == 2:
        both = [[one] if isinstance(one, int) else list(one) for one in dims]
        pairs = [(a % first.ndim, b % second.ndim) for a, b in zip(*both, strict=True)]
    else:
        return None
    left: list[str | None] = list(letters(first.ndim))
    right: list[str | None] = list(letters(second.ndim, start=first.ndim))
    reduces = {}
    for number, (a, b) in enumerate(pairs):
        letter = f"K{number}"
        largest = max(first.shape[a], second.shape[b])
        left[a] = letter if first.shape[a] == largest else None
        right[b] = letter if second.shape[b] == largest else None
        reduces[letter] = "sum"
    kept_left = [label for dim, label in enumerate(left) if dim not in [a for a, _ in pairs]]
    kept_right = [label for dim, label in enumerate(right) if dim not in [b for _, b in pairs]]
    output = (*kept_left, *kept_right)
    return Signature((tuple(left), tuple(right)), (output,), reduces=reduces, linear=_ALONE)


@rule("chain_matmul", "linalg_multi_dot")
def chain(call: OpCall) -> Signature:
    """``linalg.multi_dot`` also takes a vector at either end."""
    inputs: list[Labels] = []
    inner_letters = [f"K{number}" for number in range(len(call.tensors) + 1)]
    for number, spec in enumerate(call.tensors):
        pair = (inner_letters[number], inner_letters[number + 1])
        if spec.ndim == 1:
            pair = pair[1:] if number == 0 else pair[:1]  # type: ignore[assignment]
        inputs.append(pair)
    first, last = inputs[0], inputs[-1]
    output = (*first[: len(first) - 1], *last[1:])
    reduces = dict.fromkeys(inner_letters[1:-1], "sum")
    alone = tuple(frozenset({number}) for number in range(len(inputs)))
    return Signature(tuple(inputs), (output,), reduces=reduces, linear=alone)


@rule("linalg_vecdot")
def vecdot(call: OpCall) -> Signature:
    dim = call.bind("x", "y", "dim", dim=-1)["dim"]
    shapes = [spec.shape for spec in call.tensors]
    ndim = max(len(shape) for shape in shapes)
    dim = dim % ndim
    sizes = list(call.outputs[0])
    sizes.insert(dim, max(shape[dim - ndim] for shape in shapes if len(shape) >= ndim - dim))
    inputs = broadcast_labels(shapes, tuple(sizes))
    all_letters = letters(ndim)
    output = (*all_letters[:dim], *all_letters[dim + 1 :])
    return Signature(inputs, (output,), reduces={str(all_letters[dim]): "sum"}, linear=_ALONE)


@rule("kron")
def kron(call: OpCall) -> Signature:
    """Every element of the first times all of the second: cut where the first is cut evenly, or has size 1."""
    ndim = len(call.outputs[0])
    padded = [(1,) * (ndim - spec.ndim) + spec.shape for spec in call.tensors]
    output = letters(ndim)
    even = {str(label) for label, a, b in zip(output, *padded, strict=True) if a != 1 and b != 1}
    first = tuple(label if size != 1 else None for label, size in zip(output, padded[0], strict=True))
    second = tuple(None if a != 1 else label for label, a in zip(output, padded[0], strict=True))
    inputs = (first[ndim - call.tensors[0].ndim :], second[ndim - call.tensors[1].ndim :])
    return Signature(inputs, (output,), even=frozenset(even), linear=_ALONE, local=_kron)


def _kron(call: LocalCall) -> Any:
    """PyTorch's function refuses some tensors whose elements do not lie in order, as on one rank they may not."""
    return call.func(*(block.contiguous() for block in (*call.args, *call.kwargs.values())))


@rule("cdist", "_cdist_forward")
def cdist(call: OpCall) -> Signature:
    """Distances between the rows of two batches of matrices."""
    first, second = call.tensors[0], call.tensors[1]
    batch = letters(len(call.outputs[0]) - 2)
    sizes = call.outputs[0][: len(batch)]
    inputs = (
        (*align(first.shape[:-2], batch, sizes), "P", None),
        (*align(second.shape[:-2], batch, sizes), "R", None),
    )
    # Of nothing the framework's own operator has no gradients of gradients.
    return Signature(inputs, ((*batch, "P", "R"),), local=_no_distances, needs_local=has_empty_block)


def _no_distances(call: LocalCall) -> Any:
    return zeros_in_graph(call, combine=lambda first, second: (first + second).exp() - 1)


@rule("linalg_cross", "cross")
def cross(call: OpCall) -> Signature:
    dim = call.bind("input", "other", "dim", dim=-1 if call.name == "linalg_cross" else None)["dim"]
    size = call.outputs[0]
    dim = next(d for d, length in enumerate(size) if length == 3) if dim is None else dim % len(size)
    shapes = [spec.shape for spec in call.tensors]
    whole = letters(len(size))[dim]
    inputs = tuple(
        tuple(None if label == whole else label for label in labels) for labels in broadcast_labels(shapes, size)
    )
    output = tuple(None if label == whole else label for label in letters(len(size)))

    def along_dim(local: LocalCall) -> Any:
        """A block may have another first dim of size 3 than the whole tensor, so the dim is always named."""
        given = {**dict(zip(("input", "other"), local.args, strict=False)), **local.kwargs}
        return local.func(given["input"], given["other"], dim=dim)

    return Signature(inputs, (output,), linear=_ALONE, local=along_dim)
