"""MindSpore's random functions on plain tensors, while draws have addresses: see ``core/dtensor/random/by_sample.py``.

All dropouts of ``nn`` and ``ops`` end in the primitives ``Dropout``, ``Dropout2D`` and ``Dropout3D``, which are
replaced as such; the functions that make random tensors are replaced in ``ops`` and ``mint``. Where draws have no
addresses, a DTensor is given, or the caller names a seed, MindSpore's own run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import mindspore as ms
from mindspore import Tensor, mint, ops

from hyper_parallel.platform.mindspore.dtensor.services import number_like
from hyper_parallel.platform.mindspore.dtensor.tensor_type import has_dtensor

_Drawn = Callable[..., Any]  # (kind, shape, dtype, device, **parameters)


class _Replacements:
    """The random functions, made of values that ``drawn`` gives."""

    def __init__(self, drawn: _Drawn) -> None:
        self._drawn = drawn

    def _like(self, kind: str, tensor: Any, dtype: Any = None, **parameters: Any) -> Any:
        return self._drawn(kind, tuple(tensor.shape), dtype or tensor.dtype, tensor.device, **parameters)

    def _new(self, kind: str, shape: Any, dtype: Any, **parameters: Any) -> Any:
        if isinstance(shape, Tensor):
            shape = shape.asnumpy().tolist()
        shape = (shape,) if isinstance(shape, int) else tuple(map(int, shape))
        return self._drawn(kind, shape, dtype or ms.float32, None, **parameters)

    def drop(self, input: Any, keep: float, num_dims: int | None = None) -> tuple[Any, Any]:
        """(the input with elements dropped, the mask with the scale in it); one choice for all dims from `num_dims`."""
        shape = tuple(input.shape)
        if num_dims is not None:
            shape = (*shape[:num_dims], *(1,) * (len(shape) - num_dims))
        mask = self._drawn("bernoulli", shape, input.dtype, input.device, p=keep)
        scale = number_like(1.0 / keep if keep else 0.0, input)
        return input * mask * scale, mask * scale

    def dropout(self, input: Any, p: float = 0.5, training: Any = True, *_: Any) -> Any:
        return self.drop(input, 1.0 - p)[0] if training is not False and p else input

    def rand(self, *size: Any, dtype: Any = None, **_: Any) -> Any:
        return self._new("uniform", size[0] if len(size) == 1 else size, dtype)

    def randn(self, *size: Any, dtype: Any = None, **_: Any) -> Any:
        return self._new("normal", size[0] if len(size) == 1 else size, dtype)

    def rand_like(self, input: Any, *_: Any, dtype: Any = None, **__: Any) -> Any:
        return self._like("uniform", input, dtype)

    def randn_like(self, input: Any, *_: Any, dtype: Any = None, **__: Any) -> Any:
        return self._like("normal", input, dtype)

    def randint(self, low: int, high: int, size: Any, *_: Any, dtype: Any = None, **__: Any) -> Any:
        return self._new("randint", size, dtype or ms.int64, low=int(low), high=int(high))

    def randint_like(self, input: Any, low: int, high: int, *_: Any, dtype: Any = None, **__: Any) -> Any:
        return self._like("randint", input, ms.int64, low=int(low), high=int(high)).to(dtype or input.dtype)

    def standard_normal(self, shape: Any, **_: Any) -> Any:
        return self._new("normal", shape, ms.float32)

    def uniform(self, shape: Any, minval: Any, maxval: Any, *_: Any, dtype: Any = ms.float32, **__: Any) -> Any:
        return minval + self._new("uniform", shape, dtype) * (maxval - minval)

    def bernoulli(self, input: Any, p: Any = 0.5, **_: Any) -> Any:
        if isinstance(p, Tensor):
            return (self._like("uniform", input, ms.float32) < p).to(input.dtype)
        return self._like("bernoulli", input, p=float(p))


_FUNCTIONS = {
    ops: (
        *("rand", "randn", "rand_like", "randn_like", "randint", "randint_like", "standard_normal", "uniform"),
        "bernoulli",
    ),
    mint: ("rand", "randn", "rand_like", "randn_like"),
    mint.nn.functional: ("dropout",),
}
_PRIMITIVES = {ops.Dropout: None, ops.Dropout2D: 2, ops.Dropout3D: 2}

_installed: list[Any] = []


def install_addressed_draws(is_active: Callable[[], bool], drawn: _Drawn) -> None:
    """Let ``drawn(kind, shape, dtype, device, **parameters)`` make the values while ``is_active()``; twice is once."""
    if _installed:
        return
    ours = _Replacements(drawn)
    _installed.append(ours)
    for owner, names in _FUNCTIONS.items():
        for name in names:
            setattr(owner, name, _replaced(getattr(owner, name), getattr(ours, name), is_active))
    for primitive, num_dims in _PRIMITIVES.items():
        primitive.__call__ = _replaced_primitive(primitive.__call__, ours, num_dims, is_active)


def _replaced(theirs: Callable[..., Any], ours: Callable[..., Any], is_active: Callable[[], bool]) -> Any:
    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not is_active() or kwargs.get("seed") is not None or kwargs.get("generator") is not None:
            return theirs(*args, **kwargs)
        return theirs(*args, **kwargs) if has_dtensor((*args, *kwargs.values())) else ours(*args, **kwargs)

    return call


def _replaced_primitive(
    theirs: Callable[..., Any], ours: _Replacements, num_dims: int | None, is_active: Callable[[], bool]
) -> Any:
    @functools.wraps(theirs)
    def call(primitive: Any, data: Any) -> Any:
        if not is_active() or hasattr(data, "to_local"):
            return theirs(primitive, data)
        return ours.drop(data, primitive.keep_prob, num_dims)

    return call
