"""Operators that go by the order of tokens, refused where tokens lie in another order than that of the sequence.

Note [Whom the order of tokens concerns]
A sequence may lie on its ranks in another order than its own, so that they have equal work in causal attention. Most
operators treat tokens one by one, or sum over them, and attention goes by coordinates. A convolution, a running sum, a
recurrent layer or a slice of the sequence would take neighbours for neighbours that are none, and give numbers that
look fine; so would a tensor with an entry for each token that the model has made by counting them. Calls are planned
anew under a guard: what is right outside of it may be wrong inside.

Note [Integers that go by the order]
Models make integers along the tokens that end in no number of theirs: transformers finds packed documents by where
positions jump, and hands what it finds to the mask function, which knows documents by their coordinates. So integers
and booleans that went by the order are marked, what is made of them is too, and the error comes when floating-point
numbers would be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

from hyper_parallel.core.dtensor.distributed_tensor import DTensor
from hyper_parallel.core.dtensor.layout import Layout, Shape
from hyper_parallel.core.shard.rule_kit.signature import OpCall, Signature
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.membership import belongs_to_rank

_platform = get_platform()
_CONVOLUTIONS = {f"conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3)}
_POOLS = {f"{kind}_pool{dims}d" for kind in ("avg", "max") for dims in (1, 2, 3)}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
_RUNNING = {"cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "diff", "argmax", "argmin", "unique_consecutive"}
_SLICES = {"narrow", "select", "getitem", "split", "split_with_sizes", "chunk", "tensor_split", "unbind", "unfold"}
_JOINING = {"cat", "concat", "concatenate"}
_MOVING = {"roll", "flip", "pad", "constant_pad_nd", "tril", "triu", *_JOINING}
_WRITTEN_SLICES = {"select_scatter", "slice_scatter", "setitem"}
_SPECTRAL = {"fft_fft", "fft_ifft", "fft_rfft", "fft_irfft"}
_ORDERED = frozenset(_CONVOLUTIONS | _POOLS | _RECURRENT | _RUNNING | _SLICES | _MOVING | _WRITTEN_SLICES | _SPECTRAL)
_INDEXED = frozenset({"getitem", "setitem"})
_VIEWS = frozenset({"view", "reshape", "unflatten", "view_as", "reshape_as", "_unsafe_view"})
_BY_INDEX = frozenset({"scaled_dot_product_attention"})
_LOOK_UPS = frozenset({"embedding", "index_select", "gather", "take_along_dim", "take", *_INDEXED})
_PRODUCTS = frozenset({"matmul", "mm", "bmm", "linear"})


@dataclass(frozen=True)
class OrderGuard:
    """A sequence of ``num_tokens``, sharded over the mesh axis ``axis``, lies in the order called ``name``."""

    name: str
    num_tokens: int
    axis: str = "cp"

    def is_sharded(self, layout: Layout, dim: int) -> bool:
        """Whether a dim is sharded as the sequence is."""
        return any(layout.mesh.axis_label(axis) == self.axis for axis in layout.shard_axes[dim])

    def error(self, what: str, inputs: str) -> ValueError:
        """What is refused, and why."""
        return ValueError(
            f"{what} goes by the order of tokens, and the {self.num_tokens} tokens lie in {self.name} order (inputs: "
            f"{inputs}); write order='contiguous'"
        )


_guard: OrderGuard | None = None
_on_change: list[Callable[[OrderGuard | None], None]] = []


def _set_guard(guard: OrderGuard | None) -> None:
    global _guard
    if guard != _guard:
        _guard = guard
        for tell in _on_change:
            tell(guard)


belongs_to_rank(lambda: _guard, _set_guard)


@contextmanager
def guarded_order(guard: OrderGuard | None) -> Iterator[None]:
    """Context: operators that go by the order of tokens are refused; see Note [Whom the order of tokens concerns]."""
    before = _guard
    _set_guard(guard)
    try:
        yield
    finally:
        _set_guard(before)


def on_change_of_guard(tell: Callable[[OrderGuard | None], None]) -> None:
    """Let the dispatcher know, which plans anew under a guard."""
    _on_change.append(tell)


# ---------------------------------------------------------------------------------------------------------------------
# Planned calls
# ---------------------------------------------------------------------------------------------------------------------


def watched(run: Callable[..., Any], call: OpCall, signature: Signature) -> Callable[..., Any]:
    """How a planned call runs: as it does, and under a guard with an error for what goes by the order of tokens."""
    guard = _guard
    if guard is None:
        return run
    described = ", ".join(f"{spec.shape} under {spec.layout}" for spec in call.tensors)
    goes_along = _goes_along(guard, call, signature)

    def watch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = list(_tensors_in((args, kwargs)))
        by = call.name if goes_along else next((tensor._by_order for tensor in given if _is_marked(tensor)), None)
        if goes_along and _is_floating(given[0]):
            raise guard.error(call.name, described)
        result = run(func, args, kwargs)
        if by is not None:
            for made in _tensors_in(result):
                if _is_floating(made):
                    what = f"{call.name} of integers that {by} made along the sequence" if by != call.name else by
                    raise guard.error(what, described)
                made._by_order = by
        return result

    return watch


def _is_marked(tensor: DTensor) -> bool:
    return "_by_order" in tensor.__dict__


def _is_floating(tensor: Any) -> bool:
    name = _platform.dtype_name(tensor.dtype)
    return "float" in name or "complex" in name


def _tensors_in(value: Any) -> Iterator[DTensor]:
    if isinstance(value, DTensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_in(item)


def _goes_along(guard: OrderGuard, call: OpCall, signature: Signature) -> bool:
    """Whether the call goes along the tokens."""
    name = call.name.rstrip("_")
    if name in _BY_INDEX:
        given = call.bind("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        return bool(given.get("is_causal")) or given.get("attn_mask") is not None
    first = call.tensors[0]
    if name in _VIEWS:
        return any(
            guard.is_sharded(first.layout, dim) and _takes_apart(guard.num_tokens, first.shape, dim, call.outputs[0])
            for dim in range(first.ndim)
        )
    if name not in _ORDERED or (name in _INDEXED and _by_given_indices(call)):
        return False
    if name in _JOINING and any(spec.shape == call.outputs[0] for spec in call.tensors):  # the others are empty
        return False
    for spec, labels in zip(call.tensors, signature.inputs, strict=True):
        sharded = [guard.is_sharded(spec.layout, dim) for dim in range(spec.ndim)]
        for dim, (letter, size) in enumerate(zip(labels, spec.shape, strict=True)):
            mixes = letter is None or letter in signature.handled or (name in _SLICES and letter in signature.reduces)
            may_be_whole = size == guard.num_tokens > 1 and not (name in _SLICES | _JOINING and any(sharded))
            if mixes and (sharded[dim] or may_be_whole):
                return True
        if name in _SLICES and not any(sharded) and _is_cut_to(guard.num_tokens, spec.shape, call.outputs):
            return True
    return False


def _by_given_indices(call: OpCall) -> bool:
    """Whether a tensor of integers says which entries are meant, as mixtures of experts say it of tokens."""
    return any("int" in _platform.dtype_name(spec.dtype) for spec in call.tensors[1:])


def _is_cut_to(num_tokens: int, shape: Shape, outputs: Iterable[Shape]) -> bool:
    """Whether a slice has an entry for each token: a table of positions is cut to their number."""
    return num_tokens > 1 and any(list(one).count(num_tokens) > shape.count(num_tokens) for one in outputs)


def _takes_apart(num_tokens: int, shape: Shape, dim: int, output: Sequence[int]) -> bool:
    """Whether a view of ``shape`` as ``output`` makes several dims of the tokens, which lie in ``dim``."""
    behind = prod(shape[dim + 1 :])
    if shape[dim] % num_tokens:
        return True
    for place, size in enumerate(output):
        inner = prod(output[place + 1 :])
        if inner <= behind and behind % max(inner, 1) == 0 and (size * inner) % (num_tokens * behind) == 0:
            return False
    return prod(output) > 0


# ---------------------------------------------------------------------------------------------------------------------
# Calls without a plan, and tensors that the model makes
# ---------------------------------------------------------------------------------------------------------------------


def check_gathered(name: str, layouts: Iterable[Layout]) -> None:
    """Raise if an operator without a rule goes along the tokens and these lie in another order."""
    if _guard is None or name not in _ORDERED:
        return
    found = list(layouts)
    if any(_guard.is_sharded(layout, dim) for layout in found for dim in range(layout.ndim)):
        raise _guard.error(name, ", ".join(map(str, found)))


def check_made_inside(name: str, args: Any, kwargs: Any) -> None:
    """Raise if a plain tensor that meets distributed ones has an entry for each token: the model has counted them."""
    guard = _guard
    if guard is None or guard.num_tokens < 2:
        return
    plain, distributed = [], []
    for value in _values_in((args, kwargs)):
        if isinstance(value, DTensor):
            distributed.append(value)
        elif _platform.is_dense_tensor(value) and guard.num_tokens in tuple(value.shape):
            plain.append(value)
    for made in plain:
        shape = tuple(made.shape)
        if name in _LOOK_UPS:
            meets = not _is_floating(made)
        elif name in _PRODUCTS:
            meets = guard.num_tokens in shape[:-1] or any(_contracts(guard, one) for one in distributed)
        else:
            meets = any(_lies_beside(guard, shape, one) for one in distributed)
        if meets:
            inputs = ", ".join(f"{tuple(one.shape)} under {one.layout}" for one in distributed)
            what = f"a plain tensor of {shape}, which the model makes by itself and gives to {name},"
            raise guard.error(what, inputs)


def _values_in(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _values_in(item)
    elif isinstance(value, Mapping):
        yield from _values_in(list(value.values()))
    else:
        yield value


def _lies_beside(guard: OrderGuard, shape: Shape, tensor: DTensor) -> bool:
    """Whether a dim of the tokens of ``shape`` broadcasts with the sharded one of a tensor."""
    layout, other = tensor.layout, tuple(tensor.shape)
    return any(
        shape[-back] == other[-back] == guard.num_tokens and guard.is_sharded(layout, len(other) - back)
        for back in range(1, min(len(shape), len(other)) + 1)
    )


def _contracts(guard: OrderGuard, tensor: DTensor) -> bool:
    """Whether a matrix of tokens by tokens would mix those of a tensor."""
    dims = range(max(0, tensor.ndim - 2), tensor.ndim)
    return any(guard.is_sharded(tensor.layout, dim) and tensor.shape[dim] == guard.num_tokens for dim in dims)
