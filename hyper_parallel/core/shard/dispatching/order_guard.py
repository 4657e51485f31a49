"""Operators that go by the order of tokens, refused where tokens lie in another order than that of the sequence.

Note [Whom the order of tokens concerns]
A sequence may lie on its ranks in another order than its own, so that they have equal work in causal attention. Most
operators treat tokens one by one, or sum over them, and attention goes by coordinates. A convolution, a running sum, a
recurrent layer or a slice of the sequence would take neighbours for neighbours that are none, and give numbers that
look fine. They are found when their calls are planned: a plan that was made outside, where they are right, is
forgotten when such a sequence comes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hyper_parallel.core.dtensor.layout import Layout
from hyper_parallel.core.shard.rule_kit.signature import OpCall, Signature, TensorSpec
from hyper_parallel.platform import get_platform
from hyper_parallel.platform.shared.membership import belongs_to_rank

_platform = get_platform()
_CONVOLUTIONS = {f"conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3)}
_POOLS = {f"{kind}_pool{dims}d" for kind in ("avg", "max") for dims in (1, 2, 3)}
_RECURRENT = {"lstm", "gru", "rnn_tanh", "rnn_relu"}
_RUNNING = {"cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "diff"}
_MOVING = {"roll", "flip", "pad", "constant_pad_nd", "unfold", "narrow", "select", "__getitem__", "tril", "triu"}
_SPECTRAL = {"fft_fft", "fft_ifft", "fft_rfft", "fft_irfft"}
_ORDERED = frozenset(_CONVOLUTIONS | _POOLS | _RECURRENT | _RUNNING | _MOVING | _SPECTRAL)
_BY_INDEX = frozenset({"scaled_dot_product_attention"})


@dataclass(frozen=True)
class OrderGuard:
    """A sequence of ``num_tokens``, sharded over the mesh axis ``axis``, lies in the order called ``name``."""

    name: str
    num_tokens: int
    axis: str = "cp"


_guard: OrderGuard | None = None
_made_outside = False  # plans of such operators
_forget_plans: list[Callable[[], None]] = []


def _set_guard(guard: OrderGuard | None) -> None:
    global _guard
    _guard = guard


belongs_to_rank(lambda: _guard, _set_guard)


@contextmanager
def guarded_order(guard: OrderGuard | None) -> Iterator[None]:
    """Context: operators that go by the order of tokens are refused; see Note [Whom the order of tokens concerns]."""
    global _made_outside
    before = _guard
    if guard is not None and _made_outside:
        for forget in _forget_plans:
            forget()
        _made_outside = False
    _set_guard(guard)
    try:
        yield
    finally:
        _set_guard(before)


def on_forgetting(forget: Callable[[], None]) -> None:
    """Tell how plans are forgotten."""
    _forget_plans.append(forget)


def check_planned(call: OpCall, signature: Signature) -> None:
    """Raise if the call goes along the tokens and these lie in another order."""
    global _made_outside
    name = call.name.rstrip("_") if not call.name.endswith("__") else call.name
    if name not in _ORDERED and name not in _BY_INDEX:
        return
    if _guard is None:
        _made_outside = True
        return
    if name in _BY_INDEX:
        given = call.bind("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        if given.get("is_causal") or given.get("attn_mask") is not None:
            _refuse(name, call.tensors)
        return
    # What models make of integers, where documents begin and which tokens are padding, is known by coordinates.
    if "float" not in _platform.dtype_name(call.tensors[0].dtype):
        return
    for spec, labels in zip(call.tensors, signature.inputs, strict=True):
        for dim, (letter, size) in enumerate(zip(labels, spec.shape, strict=True)):
            mixes = letter is None or letter in signature.handled
            if mixes and (_is_sharded(spec.layout, dim) or size == _guard.num_tokens > 1):
                _refuse(name, call.tensors)


def check_gathered(name: str, layouts: Iterable[Layout]) -> None:
    """Raise if an operator without a rule goes along the tokens and these lie in another order."""
    global _made_outside
    if name not in _ORDERED:
        return
    if _guard is None:
        _made_outside = True
        return
    found = list(layouts)
    if any(_is_sharded(layout, dim) for layout in found for dim in range(layout.ndim)):
        raise _error(name, ", ".join(map(str, found)))


def _is_sharded(layout: Layout, dim: int) -> bool:
    assert _guard is not None
    return any(layout.mesh.axis_label(axis) == _guard.axis for axis in layout.shard_axes[dim])


def _refuse(name: str, tensors: Iterable[TensorSpec]) -> None:
    raise _error(name, ", ".join(f"{spec.shape} under {spec.layout}" for spec in tensors))


def _error(name: str, described: str) -> ValueError:
    assert _guard is not None
    return ValueError(
        f"{name} goes by the order of tokens, and the {_guard.num_tokens} tokens lie in {_guard.name} order (inputs: "
        f"{described}); write order='contiguous'"
    )
